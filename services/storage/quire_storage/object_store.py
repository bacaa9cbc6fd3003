"""Chunks in the object tier: put, looked for, fetched when no nearer tier has them, listed, deleted.

What an object is stands in `quire.model.chunk_object`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.chunk_object import read_chunk_object, record_of, sound_header, write_chunk_object
from quire.model.durability import Durability
from quire.model.errors import CorruptData, DeadlineExceeded, QuireError
from quire.model.index import ChunkRecord
from quire.telemetry import logger
from quire_storage.core.chunks import Chunk, Header
from quire_storage.core.pool_format import pack_header, unpack_header
from quire_storage.ports import Clock, ObjectTier

Bytes = npt.NDArray[np.uint8]
_AT_ONCE: Final = 8
_HEADERS_AT_ONCE: Final = 32
_ABSENT_MAX: Final = 65_536
_DELETED_AT_ONCE: Final = 256


class ObjectStore:
    """The object tier with chunks as its objects."""

    def __init__(self, tier: ObjectTier, clock: Clock, timeout_s: float) -> None:
        self._tier = tier
        self._clock = clock
        self._timeout_s = timeout_s
        self._absent: OrderedDict[bytes, None] = OrderedDict()

    @property
    def description(self) -> str:
        return self._tier.description

    async def put(self, chunk: Chunk, payload: Bytes) -> None:
        """`payload`: (L, S). Raises `ObjectTierUnavailable` and what else the tier raises."""
        await self._tier.put(chunk.key, pack_object(chunk, payload))
        self._absent.pop(chunk.key, None)

    async def has(self, chunk: Chunk) -> bool:
        """Whether there is an object of a chunk, of these very bytes by its header."""
        raw = await self._tier.header(chunk.key)
        row = sound_header(raw) if raw is not None else None
        if raw is None or row is None or row["key"].tobytes() != chunk.key:
            return False
        return unpack_header(np.frombuffer(raw, dtype=np.uint8)).chunk.same_content(chunk)

    # ---- reading

    async def fetch(self, keys: Sequence[bytes]) -> AsyncIterator[tuple[Header, Bytes]]:
        """Chunks with their (L, S) bytes, verified, in order. What is not there or not sound is left out.

        No more than eight are here at a time.
        """
        ahead: deque[asyncio.Task[tuple[Header, Bytes] | None]] = deque()
        left = iter(keys)
        try:
            while True:
                for key in islice(left, _AT_ONCE - len(ahead)):
                    ahead.append(asyncio.create_task(self._fetch_one(key)))
                if not ahead:
                    return
                await asyncio.wait([ahead[0]])
                if (found := ahead.popleft().result()) is not None:
                    yield found
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

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

    async def still_absent(self, keys: Iterable[bytes]) -> set[bytes]:
        """Which of `keys` have no object now. Raises what the tier raises."""
        return {key for key in keys if await self._tier.header(key) is None}

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
            for first in range(0, len(keys), _HEADERS_AT_ONCE):
                part = keys[first : first + _HEADERS_AT_ONCE]
                for key, raw in zip(part, await asyncio.gather(*map(self._tier.header, part)), strict=True):
                    if (record := _record(key, raw)) is not None:
                        yield record


def _record(key: bytes, raw: bytes | None) -> ChunkRecord | None:
    """Of the chunk `key`, from its object's header; None if that is not one, or another chunk's."""
    row = sound_header(raw) if raw is not None else None
    return record_of(row) if row is not None and row["key"].tobytes() == key else None


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
