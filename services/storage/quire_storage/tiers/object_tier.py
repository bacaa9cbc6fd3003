"""Stores chunks in the object tier, fetches, lists and deletes them.

`quire.model.chunk_object` describes the format of an object. A chunk may have several objects, which were written under
index entries that have ended since. Any sound one will do. Once the chunk has left the index, all of them are deleted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.chunk_object import (
    header_at_end,
    object_bytes,
    read_chunk_object,
    record_of,
    sound_header,
    write_chunk_object,
)
from quire.model.durability import Durability
from quire.model.errors import ChunkMissing, CorruptData, DeadlineExceeded, QuireError
from quire.model.records import ChunkRecord
from quire.telemetry import logger
from quire_storage.core.chunks import Chunk, Header
from quire_storage.core.pool.format import header_bytes, pack_header, unpack_header
from quire_storage.core.pool.slots import Shape
from quire_storage.ports import Clock, ObjectName, ObjectTier
from quire_storage.tiers.object_reads import ObjectReads

Bytes = npt.NDArray[np.uint8]
_HEADERS_AT_ONCE: Final = 32
_ABSENT_MAX: Final = 65_536
_LISTED_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class ChunkStart:
    """A chunk in the object tier, and its first layers, one after the other, not verified."""

    name: ObjectName
    chunk: Chunk
    data: memoryview


class ChunkObjects:
    """The object tier with chunks as its objects."""

    def __init__(self, tier: ObjectTier, clock: Clock, timeout_s: float) -> None:
        self._tier = tier
        self.reads = ObjectReads(tier, clock, timeout_s)
        self._clock = clock
        self._timeout_s = timeout_s
        self._absent: OrderedDict[bytes, None] = OrderedDict()
        self._headers_beside = True  # as far as the last object shows

    @property
    def description(self) -> str:
        return self._tier.description

    async def put(self, chunk: Chunk, payload: Bytes, generation: int) -> None:
        """Write a chunk under the index entry of that generation. Raises what the tier raises.

        Args:
            chunk: The chunk.
            payload: Its bytes, (L, S).
            generation: Of the entry that is to list the object; not 0.
        """
        await self._tier.put((chunk.key, generation), pack_object(chunk, payload))
        self._absent.pop(chunk.key, None)

    # ---- reading

    async def chunk(self, key: bytes, generation: int) -> tuple[Header, Bytes] | None:
        """Return a whole chunk with its (L, S) bytes, verified; None if there is no sound object, or no answer.

        Where there is no object of that generation, the key's other objects are tried: an index that was rebuilt
        lists objects under new entries.

        Args:
            key: Of the chunk.
            generation: Of the index entry that lists the object; 0 if unknown.
        """
        self._absent.pop(key, None)
        try:
            async for name in self._names((key, generation)):
                if (chunk := await self._read(name)) is not None:
                    return chunk
        except QuireError as error:
            logger().warning("the object tier cannot be read", error=str(error))
            return None
        self._note_absent(key)
        return None

    async def headers(self, generations: Mapping[bytes, int]) -> list[Chunk]:
        """Return the chunks that have an object, as its header describes them; those without an answer are left out.

        Args:
            generations: By key, the generation of the index entry that lists the object; 0 if unknown.
        """
        names, chunks = list(generations.items()), list[Chunk]()
        for first in range(0, len(names), _HEADERS_AT_ONCE):
            answers = map(self._header, names[first : first + _HEADERS_AT_ONCE])
            chunks += [chunk for chunk in await asyncio.gather(*answers) if chunk is not None]
        return chunks

    async def _header(self, listed: ObjectName) -> Chunk | None:
        try:
            async for name in self._names(listed):
                raw = await self._tier.header(name)
                if raw is not None and _record(name[0], raw) is not None:
                    return unpack_header(np.frombuffer(raw, dtype=np.uint8)).chunk
        except QuireError as error:
            logger().warning("the object tier cannot be read", error=str(error))
        return None

    async def _names(self, listed: ObjectName) -> AsyncIterator[ObjectName]:
        """Yield the name that the index lists, if its generation is known, then the key's other names, newest first."""
        key, generation = listed
        if generation:
            yield listed
        for unlisted in [*await self._tier.generations(key), 0]:
            if unlisted != generation or not generation:
                yield key, unlisted

    async def _read(self, name: ObjectName) -> tuple[Header, Bytes] | None:
        raw = await self._tier.get(name)
        chunk = unpack_object(raw) if raw is not None else None
        if raw is not None and (chunk is None or chunk[0].chunk.key != name[0]):
            logger().error("an object is not the chunk of its name", key=name[0].hex(), generation=name[1])
            return None
        return chunk

    async def begin(self, name: ObjectName, shape: Shape, stop_layer: int, tenant: str, due_s: float) -> ChunkStart:
        """Read the header of a chunk and its layers before `stop_layer`, without verifying them.

        One request where the header is in the object's metadata, else two. If that object is not sound, the key's
        other objects are tried.

        Args:
            name: Of the object; generation 0 if unknown.
            shape: Of the chunk, as the reader wants it.
            stop_layer: Behind the last layer that is wanted.
            tenant: Whose turn the request takes.
            due_s: When the layers are needed.

        Raises:
            ChunkMissing: There is no such object, or only unsound ones.
            ObjectTierFailed: The tier does not answer, or refuses.
        """
        self._absent.pop(name[0], None)
        async for candidate in self._names(name):
            if (start := await self._begin(candidate, shape, stop_layer, tenant, due_s)) is not None:
                return start
        self._note_absent(name[0])
        raise ChunkMissing(f"the object tier has no sound object of {name[0].hex()}", field="chunk_keys")

    async def _begin(
        self, name: ObjectName, shape: Shape, stop_layer: int, tenant: str, due_s: float
    ) -> ChunkStart | None:
        read = partial(self.reads.read, name, tenant=tenant, due_s=due_s)
        end = shape.num_layers * shape.slice_bytes
        size = object_bytes(shape.num_layers, shape.slice_bytes, header_bytes(shape.num_layers))
        tail = None
        if self._headers_beside:
            part = await read(0, stop_layer * shape.slice_bytes)
        else:
            part, tail = await asyncio.gather(read(0, stop_layer * shape.slice_bytes), read(end, size))
        if part is None or part.size != size:
            return None
        self._headers_beside = part.header is not None
        raw = part.header
        if raw is None or sound_header(raw) is None:
            tail = tail or await read(end, size)
            raw = header_at_end(bytes(tail.data)) if tail is not None else None
        if raw is None or sound_header(raw) is None:
            logger().error("an object has no sound header", key=name[0].hex(), generation=name[1])
            return None
        chunk = unpack_header(np.frombuffer(raw, dtype=np.uint8)).chunk
        if chunk.key != name[0] or chunk.shape != shape or len(part.data) != stop_layer * shape.slice_bytes:
            logger().error("an object is not the chunk of its name", key=name[0].hex(), generation=name[1])
            return None
        return ChunkStart(name, chunk, part.data)

    async def layers(self, name: ObjectName, shape: Shape, *, run: range, tenant: str, due_s: float) -> memoryview:
        """Read a run of layers of a chunk, not verified. Raises `ChunkMissing`, `ObjectTierFailed`."""
        size = shape.slice_bytes
        start, stop = run.start * size, run.stop * size
        part = await self.reads.read(name, start, stop, tenant=tenant, due_s=due_s, described=False)
        if part is None or len(part.data) != len(run) * size:
            raise ChunkMissing(f"an object of {name[0].hex()} is missing, or truncated", field="chunk_keys")
        return part.data

    def _note_absent(self, key: bytes) -> None:
        self._absent[key] = None
        while len(self._absent) > _ABSENT_MAX:
            self._absent.popitem(last=False)

    async def still_absent(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return which of `keys` have no object now. Raises the tier's errors."""
        return {key for key in keys if not await self._has_object(key)}

    async def look_for(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return which of `keys` have no object now, and count these as found absent; those without an answer, too."""
        keys, lacking = list(keys), set[bytes]()
        for first in range(0, len(keys), _LISTED_AT_ONCE):
            part = keys[first : first + _LISTED_AT_ONCE]
            answers = await asyncio.gather(*map(self._has_object, part), return_exceptions=True)
            for key, answer in zip(part, answers, strict=True):
                if isinstance(answer, QuireError):
                    logger().warning("the object tier cannot be read", error=str(answer))
                elif isinstance(answer, BaseException):
                    raise answer
                elif answer:
                    continue
                else:
                    self._note_absent(key)
                lacking.add(key)
        return lacking

    async def _has_object(self, key: bytes) -> bool:
        for generation in [*await self._tier.generations(key), 0]:
            if await self._tier.header((key, generation)) is not None:
                return True
        return False

    def found_absent(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return which of `keys` a read has lately found without a sound object; each is returned once."""
        absent = {key for key in keys if key in self._absent}
        for key in absent:
            del self._absent[key]
        return absent

    async def delete(self, keys: Sequence[bytes], until_ms: int) -> None:
        """Remove all objects of chunks that are out of the index.

        Only objects that exist at that time: one that is written later has another name. Raises `DeadlineExceeded`
        after `until_ms` (Unix epoch), and what the tier raises: from then on objects may be written.
        """
        for first in range(0, len(keys), _LISTED_AT_ONCE):
            part = keys[first : first + _LISTED_AT_ONCE]
            listed = await asyncio.gather(*map(self._tier.generations, part))
            left_s = until_ms / 1000 - self._clock.now_ms() / 1000
            if left_s < self._timeout_s:
                raise DeadlineExceeded("too late to delete objects", field="until_ms")
            names = [
                (key, generation)
                for key, generations in zip(part, listed, strict=True)
                for generation in [*generations, 0]
            ]
            await self._tier.delete(names)

    async def records(self) -> AsyncIterator[ChunkRecord]:
        """Yield the index record of each sound object, from its header: several times if a chunk has several."""
        async for names in self._tier.list():
            for first in range(0, len(names), _HEADERS_AT_ONCE):
                part = names[first : first + _HEADERS_AT_ONCE]
                for (key, _), raw in zip(part, await asyncio.gather(*map(self._tier.header, part)), strict=True):
                    if (record := _record(key, raw)) is not None:
                        yield record


def _record(key: bytes, raw: bytes | None) -> ChunkRecord | None:
    """Return the index record of the chunk `key` from its object; None if invalid, or another chunk's."""
    row = sound_header(raw) if raw is not None else None
    return record_of(row) if row is not None and row["key"].tobytes() == key else None


def pack_object(chunk: Chunk, payload: Bytes) -> bytes:
    """`payload`: (L, S)."""
    return write_chunk_object(payload, pack_header(Header(chunk, Durability.OBJECT, in_object=True)))


def unpack_object(raw: bytes) -> tuple[Header, Bytes] | None:
    """Return the header and the (L, S) bytes; None if any part is damaged."""
    try:
        parsed = read_chunk_object(raw)
    except CorruptData:
        return None
    header = unpack_header(np.frombuffer(parsed.header, dtype=np.uint8))
    return Header(header.chunk, Durability.OBJECT, in_object=True), parsed.payload
