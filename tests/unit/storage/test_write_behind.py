"""Chunks on their way to the object tier: what cannot be sent, what is there already, what is being deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from isal import isal_zlib

from quire.model.chunk_object import header_at_end
from quire.model.durability import Durability
from quire.model.index import ChunkRecord, ObjectMark
from quire.testing import FakeClock
from quire_storage.core.chunks import Chunk, Header
from quire_storage.errors import ObjectTierFailed
from quire_storage.object_store import ObjectStore
from quire_storage.registry import Registry
from quire_storage.write_behind import WriteBehind
from tests.unit.storage.residency_world import chunk_of

_GENERATION = 7


class _Tier:
    """Objects in a dictionary; keys in `broken` cannot be written."""

    description = "a dictionary"

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.broken: set[bytes] = set()
        self.puts = 0
        self.took: Callable[[], None] = lambda: None

    async def put(self, key: bytes, data: bytes) -> None:
        self.puts += 1
        self.took()
        if key in self.broken:
            raise ObjectTierFailed("no")
        self.objects[key] = data

    async def get(self, key: bytes) -> bytes | None:
        return self.objects.get(key)

    async def header(self, key: bytes) -> bytes | None:
        return header_at_end(self.objects[key][-8192:]) if key in self.objects else None

    async def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    async def list(self) -> AsyncIterator[list[bytes]]:
        yield list(self.objects)


class _Index:
    """Lists what it is asked to; `deleting`: objects that are going, which cannot be announced."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.listed: set[bytes] = set()
        self.deleting: set[bytes] = set()

    async def expect_objects(self, records: Sequence[ChunkRecord]) -> tuple[list[bool], int]:
        self.calls.append("expect")
        return [record.key not in self.deleting for record in records], 60_000

    async def add_objects(
        self, records: Sequence[ChunkRecord], generations: Sequence[int], *, reporter: str
    ) -> list[ObjectMark]:
        self.calls.append("list")
        assert set(generations) == {_GENERATION}
        self.listed |= {record.key for record in records}
        return [ObjectMark.LISTED] * len(records)


class _Node:
    """Chunks 0 … 3 are here and listed; `written`: an object was written of all of them once."""

    def __init__(self, *, written: bool) -> None:
        self.chunks = {chunk_of(number).key: chunk_of(number) for number in range(4)}
        self.written = written
        self.uploads: set[bytes] = set()

    def listed(self, key: bytes) -> tuple[Header, int] | None:
        return Header(self.chunks[key], Durability.LOCAL, self.written), _GENERATION

    def wants_object(self, key: bytes) -> bool:
        return key not in self.uploads

    def uploaded(self, chunk: Chunk, generation: int) -> None:
        self.uploads.add(chunk.key)

    async def read(self, key: bytes) -> tuple[Chunk, npt.NDArray[np.uint8]]:
        chunk = self.chunks[key]
        return chunk, np.zeros((chunk.num_layers, chunk.slice_bytes), dtype=np.uint8)


def _parts(*, written: bool) -> tuple[WriteBehind, _Node, _Tier, _Index, FakeClock]:
    clock, tier, index, node = FakeClock(), _Tier(), _Index(), _Node(written=written)
    outer: Any = index
    registry = Registry("a", outer, clock, 1.0)
    behind = WriteBehind(
        objects=ObjectStore(tier, clock, 5.0), registry=registry, clock=clock, lag_bytes_max=1 << 30, timeout_s=5.0
    )
    behind.start(node, node.read)
    return behind, node, tier, index, clock


async def _until_sent(node: _Node, clock: FakeClock, keys: set[bytes]) -> None:
    async with asyncio.timeout(10):
        while not keys <= node.uploads:
            await clock.advance(0.3)
            await asyncio.sleep(0)


async def test_one_object_that_cannot_be_sent_stops_none_of_the_others() -> None:
    """Finding 16: it was put back in front, and tried again for ever. It is sent too once it can be."""
    behind, node, tier, index, clock = _parts(written=False)
    first, *others = node.chunks
    tier.broken = {first}
    for key in node.chunks:
        behind.enqueue(key, 4096, written=False)
    await _until_sent(node, clock, set(others))
    assert first not in node.uploads and behind.lag_bytes == 4096
    tier.broken = set()
    await _until_sent(node, clock, set(node.chunks))
    assert index.listed == set(node.chunks) == set(tier.objects)
    await behind.close()


async def test_an_object_is_announced_before_it_is_written_and_listed_afterwards() -> None:
    behind, node, _, index, clock = _parts(written=False)
    key = next(iter(node.chunks))
    behind.enqueue(key, 4096, written=False)
    await _until_sent(node, clock, {key})
    assert index.calls == ["expect", "list"]
    await behind.close()


@pytest.mark.parametrize("there", [True, False])
async def test_what_was_written_before_is_looked_for_first(there: bool) -> None:
    """After a restart nothing is written again that is there; what is gone is."""
    again, node, other, index, clock = _parts(written=True)
    key = next(iter(node.chunks))
    if there:
        payload = np.zeros((1, 4096), dtype=np.uint8)
        sums = np.array([isal_zlib.crc32(payload.tobytes())], dtype=np.uint32)
        known = node.chunks[key]
        node.chunks[key] = Chunk(known.record, 1, 4096, sums)
        await ObjectStore(other, clock, 5.0).put(node.chunks[key], payload)
        other.puts = 0
    again.enqueue(key, 4096, written=True)
    await _until_sent(node, clock, {key})
    assert other.puts == (0 if there else 1)
    assert index.calls[0] == "expect" and index.calls[-1] == "list"
    await again.close()


async def test_an_object_that_took_long_is_announced_once_more_and_looked_for() -> None:
    """By then it might have been deleted as one that nothing lists; it is not written again if it is there."""
    behind, node, tier, index, clock = _parts(written=False)
    key, chunk = next(iter(node.chunks.items()))
    payload = np.zeros((1, 4096), dtype=np.uint8)
    sums = np.array([isal_zlib.crc32(payload.tobytes())], dtype=np.uint32)
    node.chunks[key] = Chunk(chunk.record, 1, 4096, sums)
    tier.took = lambda: setattr(clock, "_now_s", clock.monotonic_s() + 45.0)
    behind.enqueue(key, 4096, written=False)
    await _until_sent(node, clock, {key})
    assert index.calls == ["expect", "expect", "list"] and tier.puts == 1
    await behind.close()


async def test_an_object_that_is_being_deleted_is_written_when_that_is_over() -> None:
    behind, node, tier, index, clock = _parts(written=False)
    key = next(iter(node.chunks))
    index.deleting = {key}
    behind.enqueue(key, 4096, written=False)
    for _ in range(5):
        await clock.advance(0.5)
    assert not tier.objects
    index.deleting = set()
    await _until_sent(node, clock, {key})
    assert key in tier.objects
    await behind.close()
