"""Chunks on their way to the object tier: what cannot be sent, what is there already, what is being deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quire.model.durability import Durability
from quire.model.index import ObjectMark
from quire.model.records import ChunkRecord
from quire.testing import FakeClock
from quire.testing.objects import MemoryObjects
from quire_storage.cluster.registry import Registry
from quire_storage.core.chunks import Chunk, Header
from quire_storage.errors import ObjectTierFailed
from quire_storage.ports import ObjectName
from quire_storage.tiers.object_tier import ChunkObjects
from quire_storage.tiers.write_behind import WriteBehind
from tests.unit.storage.residency_world import chunk_of

_GENERATION = 7


class _Tier(MemoryObjects):
    """Keys in `broken` cannot be written."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[bytes] = set()
        self.took: Callable[[], None] = lambda: None

    @property
    def keys(self) -> set[bytes]:
        return {key for key, _ in self.objects}

    async def put(self, name: ObjectName, data: bytes) -> None:
        self.took()
        if name[0] in self.broken:
            raise ObjectTierFailed("no")
        await super().put(name, data)


class _Index:
    """Lists what it is asked to; `deleting`: keys whose objects are going; `rebuilding`: more may be listed soon."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.listed: set[bytes] = set()
        self.deleting: set[bytes] = set()
        self.rebuilding = False

    async def expect_objects(self, records: Sequence[ChunkRecord]) -> list[bool]:
        self.calls.append("expect")
        return [record.key not in self.deleting for record in records]

    async def object_generations(self, records: Sequence[ChunkRecord]) -> tuple[list[int], bool]:
        self.calls.append("ask")
        return [_GENERATION if record.key in self.listed else 0 for record in records], not self.rebuilding

    async def add_objects(
        self, records: Sequence[ChunkRecord], generations: Sequence[int], *, reporter: str
    ) -> list[ObjectMark]:
        self.calls.append("list")
        if set(generations) != {_GENERATION}:
            return [ObjectMark.GONE] * len(records)
        self.listed |= {record.key for record in records}
        return [ObjectMark.LISTED] * len(records)


class _Node:
    """Chunks 0 … 3 are here and listed; `written`: an object was written of all of them once."""

    def __init__(self, *, written: bool) -> None:
        self.chunks = {chunk_of(number).key: chunk_of(number) for number in range(4)}
        self.written = written
        self.generation = _GENERATION
        self.uploads: set[bytes] = set()

    def listed(self, key: bytes) -> tuple[Header, int] | None:
        return Header(self.chunks[key], Durability.LOCAL, self.written), self.generation

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
        objects=ChunkObjects(tier, clock, 5.0), registry=registry, clock=clock, lag_bytes_max=1 << 30, timeout_s=5.0
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
    assert index.listed == set(node.chunks) == tier.keys
    await behind.close()


async def test_an_object_is_announced_before_it_is_written_and_listed_afterwards() -> None:
    behind, node, _, index, clock = _parts(written=False)
    key = next(iter(node.chunks))
    behind.enqueue(key, 4096, written=False)
    await _until_sent(node, clock, {key})
    assert index.calls == ["expect", "list"]
    await behind.close()


async def test_chunks_that_wait_together_are_announced_together() -> None:
    writer, node, tier, index, clock = _parts(written=False)
    for key in node.chunks:
        writer.enqueue(key, 4096, written=False)
    await _until_sent(node, clock, set(node.chunks))
    assert index.calls.count("expect") == 1 and tier.keys == set(node.chunks) and not writer.lag_bytes
    await writer.close()


async def test_one_chunk_that_cannot_be_read_or_hangs_stops_none_of_the_others() -> None:
    """The other chunks are listed, and a store that waits for one of these is acknowledged."""
    writer, node, tier, index, _ = _parts(written=False)
    unreadable, slow, *rest = node.chunks
    read, put = node.read, tier.put

    async def fail_once(key: bytes) -> tuple[Chunk, npt.NDArray[np.uint8]]:
        if key == unreadable:
            raise MemoryError
        return await read(key)

    async def hang(name: ObjectName, data: bytes) -> None:
        await (asyncio.Event().wait() if name[0] == slow else put(name, data))

    node.read, tier.put, writer._read = fail_once, hang, fail_once  # type: ignore[method-assign]
    for key in node.chunks:
        writer.enqueue(key, 4096, written=False)
    await writer.settle(rest)
    assert index.listed == set(rest) and writer.lag_bytes == 2 * 4096
    await writer.close()


@pytest.mark.parametrize("there", [True, False])
async def test_the_index_is_asked_for_what_was_written_before(there: bool) -> None:
    """After a restart nothing is written again that is listed; the rest is."""
    behind, node, tier, index, clock = _parts(written=True)
    key = next(iter(node.chunks))
    index.listed = {key} if there else set()
    behind.enqueue(key, 4096, written=True)
    await _until_sent(node, clock, {key})
    assert index.calls == (["ask"] if there else ["ask", "expect", "list"])
    assert tier.keys == (set() if there else {key})
    await behind.close()


async def test_nothing_is_written_again_while_the_index_is_rebuilt() -> None:
    """An index that was lost is told what lies in the object tier: until then it knows of nothing there."""
    behind, node, tier, index, clock = _parts(written=True)
    listed, lost, *_ = node.chunks
    index.rebuilding = True
    behind.enqueue(listed, 4096, written=True)
    behind.enqueue(lost, 4096, written=True)
    for _ in range(5):
        await clock.advance(0.5)
    assert set(index.calls) == {"ask"} and not node.uploads and behind.lag_bytes == 0
    index.listed = {listed}
    for _ in range(5):
        await clock.advance(2.0)
    assert node.uploads == {listed}
    index.rebuilding = False
    await _until_sent(node, clock, {lost})
    assert tier.keys == {lost}
    await behind.close()


async def test_a_rebuild_holds_up_no_new_chunk_and_none_that_a_store_waits_for() -> None:
    behind, node, tier, index, clock = _parts(written=True)
    idle, awaited, new, _ = node.chunks
    index.rebuilding = True
    behind.enqueue(idle, 4096, written=True)
    behind.enqueue(awaited, 4096, written=True)
    await clock.advance(0.3)
    behind.enqueue(new, 4096, written=False)
    settled = asyncio.create_task(behind.settle([awaited]))
    await _until_sent(node, clock, {new, awaited})
    await asyncio.wait_for(settled, 10)
    assert tier.keys == {new, awaited} and behind.lag_bytes == 0
    await behind.close()


async def test_an_object_is_named_by_the_entry_under_which_it_is_written_and_listed_by_no_other() -> None:
    """The entry ends while the object is written, and the chunk is stored again: another object is written."""
    behind, node, tier, index, clock = _parts(written=False)
    key = next(iter(node.chunks))
    node.generation = _GENERATION - 1
    tier.took = lambda: setattr(node, "generation", _GENERATION)
    behind.enqueue(key, 4096, written=False)
    await _until_sent(node, clock, {key})
    assert await tier.generations(key) == [_GENERATION, _GENERATION - 1]
    assert index.calls == ["expect", "list", "expect", "list"]
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
    assert key in tier.keys
    await behind.close()
