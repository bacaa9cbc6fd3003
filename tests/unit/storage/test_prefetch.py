"""Prefetches take turns: one group of chunks at a time, and the prefetch that is due first has the next."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire.model.errors import TooManyRequests
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.ranges import ChunkRange
from quire.model.transfers import PrefetchOrder
from quire_storage.core.pool.slots import Shape
from quire_storage.delivery import prefetch as module
from quire_storage.delivery.object_loads import ObjectChunk
from quire_storage.delivery.prefetch import Prefetches

_CHUNK = 8 << 20
_LAYOUT = KvLayout(2, 16, 8, 8192, Dtype.BF16)


class _Node:
    """The object tier has all chunks; each read waits for `go`. The keys' first bytes tell which prefetch it was."""

    def __init__(self, capacity_bytes: int) -> None:
        self.arena = SimpleNamespace(slots=SimpleNamespace(capacity_bytes=capacity_bytes))
        self.go = asyncio.Event()
        self.read: list[tuple[int, int]] = []
        self.pins = 0
        self.listed: list[dict[bytes, int]] = []
        self.indexed: dict[bytes, int] = {}
        self.residency = SimpleNamespace(generation=lambda key: self.indexed.get(key, 0))

    def pin(self, keys: Any) -> Any:
        self.pins += 1
        return SimpleNamespace(copies=[], missing=list(keys))

    def unpin(self, pinned: Any) -> None:
        self.pins -= 1

    async def find(self, records: Any, shape: Shape) -> dict[bytes, ObjectChunk]:
        return {record.key: ObjectChunk(record.key, 0, shape) for record in records}

    async def object_generations(self, records: Any) -> dict[bytes, int]:
        return {record.key: 7 if record.key[1] % 2 else 0 for record in records}

    async def list_copies(self, generations: dict[bytes, int]) -> None:
        self.listed.append(generations)

    async def bring(self, chunks: Any, until_s: float) -> set[bytes]:
        self.read.append((chunks[0].key[0], len(chunks)))
        await self.go.wait()
        return {chunk.key for chunk in chunks}


def _prefetches(capacity_bytes: int = 1 << 30) -> tuple[Prefetches, _Node]:
    node: Any = _Node(capacity_bytes)
    reading: Any = SimpleNamespace(tiers=node, loads=node)
    clock: Any = SimpleNamespace(monotonic_s=lambda: 0.0)
    none: Any = None
    return Prefetches(reading, none, clock), node


def _order(which: int, count: int, within_s: float = 0.0) -> PrefetchOrder:
    keys = ChunkKeys(b"".join(bytes([which, at]).ljust(32, b"k") for at in range(count)))
    return PrefetchOrder(keys=keys, ranges=(ChunkRange("node", 0, count),), layout=_LAYOUT, within_s=within_s)


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_is_due_first_goes_first() -> None:
    prefetches, node = _prefetches()
    wanted = {which: 10.0 * which for which in (3, 2, 1)}
    tasks = []
    for which, within_s in wanted.items():
        tasks.append(asyncio.create_task(prefetches.prefetch(_order(which, 6, within_s))))
        await _settle()
    assert node.read == [(3, 4)], "one at a time"
    node.go.set()
    assert all(all(there) for there in await asyncio.gather(*tasks))
    assert node.read[1:] == [(1, 4), (1, 2), (2, 4), (2, 2), (3, 2)]
    assert not node.pins


async def test_one_that_is_given_up_passes_its_turn_on() -> None:
    prefetches, node = _prefetches()
    tasks = [asyncio.create_task(prefetches.prefetch(_order(which, 1, 1.0 * which))) for which in (1, 2, 3)]
    await _settle()
    tasks[1].cancel()
    tasks[0].cancel()
    node.go.set()
    assert await tasks[2] == [True]
    assert await prefetches.prefetch(_order(4, 1)) == [True]


async def test_no_more_than_half_of_memory_is_filled() -> None:
    prefetches, node = _prefetches(capacity_bytes=12 * _CHUNK)
    node.go.set()
    assert sum(await prefetches.prefetch(_order(1, 20))) == 6


async def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAITING_MAX", 1)
    prefetches, node = _prefetches()
    tasks = [asyncio.create_task(prefetches.prefetch(_order(which, 1))) for which in (1, 2)]
    await _settle()
    with pytest.raises(TooManyRequests):
        await prefetches.prefetch(_order(3, 1))
    node.go.set()
    await asyncio.gather(*tasks)


async def test_chunks_in_memory_that_the_object_tier_has_are_listed() -> None:
    """Also those that a delivery has left there; not those that are listed, nor those whose entry is not known."""
    prefetches, node = _prefetches()
    node.go.set()
    order = _order(1, 4)
    keys = [record.key for record in order.records()]
    node.indexed[keys[3]] = 7
    assert await prefetches.prefetch(order) == [True] * 4
    assert node.listed == [{keys[1]: 7}]
