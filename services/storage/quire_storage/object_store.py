"""Chunks in the object tier: written behind the stores with a bounded lag, fetched when nobody nearer has them.

What an object is stands in `quire.chunk_object`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from opentelemetry.metrics import Observation

from quire.chunk_object import read_chunk_object, record_of, sound_header, write_chunk_object
from quire.durability import Durability
from quire.errors import CorruptData, DeadlineExceeded, QuireError
from quire.metadata.index import ChunkRecord
from quire.telemetry import background, logger, meter, names
from quire_storage.core.chunks import Chunk, Header
from quire_storage.core.pool_format import pack_header, unpack_header
from quire_storage.ports import Clock, ObjectTier

Bytes = npt.NDArray[np.uint8]
Reader = Callable[[bytes], Awaitable[tuple[Chunk, Bytes] | None]]
_AT_ONCE: Final = 8
_ABSENT_MAX: Final = 65_536
_DELETED_AT_ONCE: Final = 256
_PAUSE_S, _PAUSE_S_MAX = 0.2, 10.0


class ObjectStore:
    """`lag_bytes_max`: stores wait while more than that is not in the object tier yet, unless it does not answer."""

    def __init__(self, tier: ObjectTier, clock: Clock, lag_bytes_max: int, timeout_s: float) -> None:
        self._tier = tier
        self._clock = clock
        self._lag_bytes_max = lag_bytes_max
        self._timeout_s = timeout_s
        self._unsent: OrderedDict[bytes, int] = OrderedDict()
        self._sending: set[bytes] = set()
        self._there_is_work = asyncio.Event()
        self._changed = asyncio.Condition()
        self._failing = False
        self._waiting = 0
        self._telling: asyncio.Task[None] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._absent: OrderedDict[bytes, None] = OrderedDict()
        self.lag_bytes = 0
        lag = [lambda options: [Observation(self.lag_bytes)]]
        meter().create_observable_gauge(names.OBJECT_LAG_BYTES, lag, "By")

    def start(self, read: Reader, stored: Callable[[Chunk], Awaitable[bool]]) -> None:
        """`read` gives a chunk that is here with its verified bytes; `stored` says whether the index lists the object
        now, or nobody wants it any more; else it is written again."""
        self._read, self._stored = read, stored
        self._workers = [asyncio.create_task(self._work()) for _ in range(_AT_ONCE)]

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    @property
    def description(self) -> str:
        return self._tier.description

    @property
    def lag_chunks(self) -> int:
        return len(self._unsent) + len(self._sending)

    # ---- write-behind

    def enqueue(self, key: bytes, size: int) -> None:
        """To be written when there is time."""
        if key not in self._unsent and key not in self._sending:
            self._unsent[key] = size
            self.lag_bytes += size
            self._there_is_work.set()

    def forget(self, key: bytes) -> None:
        """A chunk is gone here before it was written."""
        self.lag_bytes -= self._unsent.pop(key, 0)
        if self._waiting:
            self._telling = asyncio.get_running_loop().create_task(self._tell(), context=background())

    async def settle(self, keys: Sequence[bytes]) -> None:
        """Return when none of `keys` waits to be written any more. Raises `DeadlineExceeded`."""
        for key in reversed(keys):
            if key in self._unsent:
                self._unsent.move_to_end(key, last=False)
        try:
            async with asyncio.timeout(self._timeout_s), self._changed:
                self._waiting += 1
                try:
                    await self._changed.wait_for(
                        lambda: not any(key in self._unsent or key in self._sending for key in keys)
                    )
                finally:
                    self._waiting -= 1
        except TimeoutError:
            raise DeadlineExceeded(f"not in the object tier within {self._timeout_s} s") from None

    async def wait_for_room(self) -> None:
        """Back-pressure: wait while the lag is over its bound and the tier takes chunks."""
        if self.lag_bytes <= self._lag_bytes_max or self._failing:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.lag_bytes <= self._lag_bytes_max or self._failing)

    async def _work(self) -> None:
        pause_s = _PAUSE_S
        while True:
            while not self._unsent:
                self._there_is_work.clear()
                await self._there_is_work.wait()
            key, size = self._unsent.popitem(last=False)
            self._sending.add(key)
            sent = False
            try:
                sent = await self._send(key)
            finally:
                self._sending.discard(key)
                if sent:
                    self.lag_bytes -= size
                else:
                    self._unsent[key] = size  # behind the others: they may have more luck
                self._failing = not sent
            await self._tell()
            if sent:
                pause_s = _PAUSE_S
            else:
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _send(self, key: bytes) -> bool:
        """Write one chunk; True also where there is nothing to write any more."""
        try:
            found = await self._read(key)
            if found is None:
                return True
            chunk, payload = found
            await self._tier.put(key, pack_object(chunk, payload))
            self._absent.pop(key, None)
            return await self._stored(chunk)
        except QuireError as error:
            logger().warning("the object tier takes no chunk", error=str(error), lag_bytes=self.lag_bytes)
            return False
        except Exception as error:
            logger().error("a chunk could not be written to the object tier", key=key.hex(), exc_info=error)
            return False

    # ---- reading

    async def fetch(self, keys: Sequence[bytes]) -> AsyncIterator[tuple[Header, Bytes]]:
        """Chunks with their (L, S) bytes, verified, as they come. What is not there or not sound is left out."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(key: bytes) -> tuple[Header, Bytes] | None:
            async with gate:
                return await self._fetch_one(key)

        tasks = [asyncio.create_task(one(key)) for key in keys]
        try:
            for task in tasks:
                if (found := await task) is not None:
                    yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch_one(self, key: bytes) -> tuple[Header, Bytes] | None:
        self._absent.pop(key, None)
        try:
            raw = await self._tier.get(key)
        except QuireError as error:
            logger().warning("the object tier cannot be read", error=str(error))
            return None
        found = unpack_object(raw) if raw is not None else None
        if raw is not None and (found is None or found[0].chunk.key != key):
            logger().error("an object is not the chunk that it should be", key=key.hex())
            found = None
        if found is None:
            self._absent[key] = None
            while len(self._absent) > _ABSENT_MAX:
                self._absent.popitem(last=False)
        return found

    def found_absent(self, keys: Iterable[bytes]) -> set[bytes]:
        """Which of `keys` a fetch has lately found to be no sound object; asking again says nothing of them."""
        gone = {key for key in keys if key in self._absent}
        for key in gone:
            del self._absent[key]
        return gone

    async def delete(self, keys: Sequence[bytes], until_ms: int) -> None:
        """Remove objects. Raises `DeadlineExceeded` after `until_ms` (Unix epoch): by then others may want them."""
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            left_s = until_ms / 1000 - self._clock.now_ms() / 1000
            if left_s < self._timeout_s:
                raise DeadlineExceeded("too late to delete objects", field="until_ms")
            await self._tier.delete(keys[first : first + _DELETED_AT_ONCE])

    async def records(self) -> AsyncIterator[ChunkRecord]:
        """Of every sound chunk object, from its header."""
        async for keys in self._tier.list():
            for first in range(0, len(keys), _AT_ONCE):
                part = keys[first : first + _AT_ONCE]
                for key, raw in zip(part, await asyncio.gather(*map(self._tier.header, part)), strict=True):
                    row = sound_header(raw) if raw is not None else None
                    if row is not None and row["key"].tobytes() == key:
                        yield record_of(row)


def pack_object(chunk: Chunk, payload: Bytes) -> bytes:
    """`payload`: (L, S)."""
    return write_chunk_object(payload, pack_header(Header(chunk, Durability.OBJECT, in_object=True)))


def unpack_object(raw: bytes) -> tuple[Header, Bytes] | None:
    """The chunk and its (L, S) bytes; None if anything of it is not as it was written."""
    try:
        found = read_chunk_object(raw)
    except CorruptData:
        return None
    header = unpack_header(np.frombuffer(found.header, dtype=np.uint8))
    return Header(header.chunk, Durability.OBJECT, in_object=True), found.payload
