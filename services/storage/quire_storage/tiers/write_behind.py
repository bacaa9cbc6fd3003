"""Chunks on their way to the object tier: written behind the stores, with a bounded lag, and listed in the index.

An object is announced to the index before it is written, so that it is deleted if no entry ever lists it. Its name has
the generation of the index entry under which it is written, and only that very entry lists it. No object is deleted
while its key has an entry, so a listed object exists. For a chunk whose object an earlier incarnation of this node
wrote, the index is read first. Chunks that wait for the index at the same time share its calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from opentelemetry.metrics import Observation

from quire.model.errors import DeadlineExceeded, QuireError
from quire.model.records import ChunkRecord
from quire.telemetry import background, logger, meter, names
from quire_server import tasks
from quire_storage.cluster.registry import Registry
from quire_storage.core.chunks import Chunk, Header
from quire_storage.ports import Clock
from quire_storage.tiers.object_tier import ChunkObjects

Bytes = npt.NDArray[np.uint8]
Reader = Callable[[bytes], Awaitable[tuple[Chunk, Bytes] | None]]
_AT_ONCE: Final = 8
_LISTED_AT_ONCE: Final = 64
_PAUSE_S, _PAUSE_S_MAX = 0.2, 10.0
_REBUILD_PAUSE_S: Final = 2.0


class Chunks(Protocol):
    """The node's chunks, as the write-behind sees them."""

    def listed(self, key: bytes) -> tuple[Header, int] | None:
        """Return the header of a chunk that can be read here, and the generation of the index entry that lists it."""

    def wants_object(self, key: bytes) -> bool:
        """Whether a chunk that is here and listed is not in the object tier, as far as is known."""

    def uploaded(self, chunk: Chunk, generation: int) -> None:
        """The object tier has a chunk, and the index entry of that generation lists it there."""


class WriteBehind:
    """`lag_bytes_max`: stores wait while more than that is not in the object tier yet, unless it does not answer."""

    def __init__(
        self, *, objects: ChunkObjects, registry: Registry, clock: Clock, lag_bytes_max: int, timeout_s: float
    ) -> None:
        self._objects = objects
        self._registry = registry
        self._clock = clock
        self._lag_bytes_max = lag_bytes_max
        self._timeout_s = timeout_s
        self._unsent: OrderedDict[bytes, int] = OrderedDict()
        self._unlisted: OrderedDict[bytes, int] = OrderedDict()
        self._sending: set[bytes] = set()
        self._there_is_work = asyncio.Event()
        self._changed = asyncio.Condition()
        self._failing = False
        self._waiting = 0
        self._telling: asyncio.Task[None] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._rebuilding: asyncio.Task[None] | None = None
        self.lag_bytes = 0
        lag = [lambda options: [Observation(self.lag_bytes)]]
        meter().create_observable_gauge(names.OBJECT_LAG_BYTES, lag, "By")

    def start(self, chunks: Chunks, read: Reader) -> None:
        """`read` gives a chunk that is here with its verified bytes."""
        self._chunks, self._read = chunks, read
        self._workers = [asyncio.create_task(self._work()) for _ in range(_AT_ONCE)]

    async def close(self) -> None:
        await tasks.end([*self._workers, self._rebuilding])

    @property
    def lag_chunks(self) -> int:
        return len(self._unsent) + len(self._unlisted) + len(self._sending)

    def enqueue(self, key: bytes, size: int, *, written: bool) -> None:
        """Queue a chunk to be written, or to be listed if an object of it was `written` before."""
        if key in self._unsent or key in self._unlisted or key in self._sending:
            return
        if written:
            self._unlisted[key] = size
        else:
            self._write_later(key, size)
        self._there_is_work.set()

    def forget(self, key: bytes) -> None:
        """Remove a chunk that was evicted here before it was written."""
        self.lag_bytes -= self._unsent.pop(key, 0)
        self._unlisted.pop(key, None)
        if self._waiting:
            self._telling = asyncio.get_running_loop().create_task(self._tell(), context=background())

    async def settle(self, keys: Sequence[bytes]) -> None:
        """Return when none of `keys` waits to be written. Raises `DeadlineExceeded`."""
        for key in reversed(keys):
            if self._rebuilding and key in self._unlisted:  # the rebuild may take long
                self._write_later(key, self._unlisted.pop(key))
                self._there_is_work.set()
            for queue in (self._unsent, self._unlisted):
                if key in queue:
                    queue.move_to_end(key, last=False)
        try:
            async with asyncio.timeout(self._timeout_s), self._changed:
                self._waiting += 1
                try:
                    await self._changed.wait_for(lambda: not any(map(self._is_on_its_way, keys)))
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

    # ---- workers

    def _write_later(self, key: bytes, size: int) -> None:
        self._unsent[key] = size
        self.lag_bytes += size

    def _is_on_its_way(self, key: bytes) -> bool:
        return key in self._unsent or key in self._unlisted or key in self._sending

    async def _work(self) -> None:
        pause_s = _PAUSE_S
        while True:
            while not self._unsent and (self._rebuilding or not self._unlisted):
                self._there_is_work.clear()
                await self._there_is_work.wait()
            asks = self._unlisted and not self._rebuilding
            succeeded = await (self._list_some() if asks else self._write_one())
            self._failing = not succeeded
            await self._tell()
            if succeeded:
                pause_s = _PAUSE_S
            else:
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _write_one(self) -> bool:
        key, size = self._unsent.popitem(last=False)
        self._sending.add(key)
        sent = False
        try:
            sent = await self._logged(self._send(key))
        finally:
            self._sending.discard(key)
            if sent:
                self.lag_bytes -= size
            else:
                self._unsent[key] = size  # behind the others: they may have more luck
        return sent

    async def _list_some(self) -> bool:
        """Objects that were written before: ask which are listed, and write the others."""
        batch = dict(self._unlisted.popitem(last=False) for _ in range(min(_LISTED_AT_ONCE, len(self._unlisted))))
        self._sending.update(batch)
        answered = False
        try:
            answered = await self._logged(self._ask(list(batch)))
        finally:
            for key, size in batch.items():
                self._sending.discard(key)
                if self._chunks.wants_object(key) and answered and not self._rebuilding:
                    self._write_later(key, size)
                elif self._chunks.wants_object(key):
                    self._unlisted[key] = size
        return answered

    async def _ask_again(self) -> None:
        await self._clock.sleep(_REBUILD_PAUSE_S)
        self._rebuilding = None
        self._there_is_work.set()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _logged(self, sending: Awaitable[bool]) -> bool:
        try:
            return await sending
        except QuireError as error:
            logger().warning("the object tier takes no chunk", error=str(error), lag_bytes=self.lag_bytes)
        except Exception as error:
            logger().error("a chunk could not be written to the object tier", exc_info=error)
        return False

    # ---- one chunk, or a few

    async def _send(self, key: bytes) -> bool:
        """Write one chunk and have it listed; True also if there is nothing left to write."""
        listing = self._wanted(key)
        if listing is None:
            return True
        record, generation = listing
        if not await self._registry.expect_object(record):
            return False
        chunk = await self._read(key)
        if chunk is None or self._wanted(key) != listing:
            return chunk is None
        await self._objects.put(*chunk, generation)
        if await self._registry.list_object(record, generation):
            self._chunks.uploaded(chunk[0], generation)
        return not self._chunks.wants_object(key)

    async def _ask(self, keys: Sequence[bytes]) -> bool:
        """Request from the index which chunks have a listed object.

        While it is being rebuilt, the request is repeated for the other chunks, whose objects it may list yet.
        """
        chunks = [chunk for key in keys if (chunk := self._wanted(key)) is not None]
        if not chunks:
            return True
        listed, complete = await self._registry.object_generations([record for record, _ in chunks])
        for record, generation in chunks:
            listing = self._chunks.listed(record.key)
            if listing is not None and listed.get(record.key) == listing[1] == generation:
                self._chunks.uploaded(listing[0].chunk, generation)
        if not complete and self._rebuilding is None:
            self._rebuilding = asyncio.create_task(self._ask_again())
        return True

    def _wanted(self, key: bytes) -> tuple[ChunkRecord, int] | None:
        """A chunk that is here, and the generation of its entry, which does not list the object tier yet."""
        listing = self._chunks.listed(key)
        if listing is None or not listing[1] or not self._chunks.wants_object(key):
            return None
        return listing[0].chunk.record, listing[1]
