"""Prefetches take turns: one group of chunks at a time, and the prefetch that is due first has the next."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire.model.errors import TooManyRequests
from quire.model.keys import ChunkKeys
from quire_storage.delivery import prefetch as module
from quire_storage.delivery.prefetch import Prefetches

_CHUNK = 8 << 20


class _Tiers:
    """All chunks lie in memory already; each pin waits for `go`. The keys' first bytes tell which prefetch it was."""

    def __init__(self, capacity_bytes: int) -> None:
        self.arena = SimpleNamespace(slots=SimpleNamespace(capacity_bytes=capacity_bytes))
        self.go = asyncio.Event()
        self.pinned: list[tuple[int, int]] = []
        self.unpinned = 0

    async def pin(self, keys: Any) -> Any:
        self.pinned.append((keys[0][0], len(keys)))
        await self.go.wait()
        chunks = [SimpleNamespace(key=key, shape=SimpleNamespace(slot_bytes=_CHUNK)) for key in keys]
        return SimpleNamespace(copies=[SimpleNamespace(chunk=each, memory=1, disk=None) for each in chunks])

    def unpin(self, pinned: Any) -> None:
        self.unpinned += 1


def _prefetches(capacity_bytes: int = 1 << 30) -> tuple[Prefetches, _Tiers]:
    tiers: Any = _Tiers(capacity_bytes)
    reading: Any = SimpleNamespace(tiers=tiers)
    clock: Any = SimpleNamespace(monotonic_s=lambda: 0.0)
    none: Any = None
    return Prefetches(reading, none, clock), tiers


def _keys(which: int, count: int) -> ChunkKeys:
    return ChunkKeys(b"".join(bytes([which, at]).ljust(32, b"k") for at in range(count)))


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_is_due_first_goes_first() -> None:
    prefetches, tiers = _prefetches()
    wanted = {which: 10.0 * which for which in (3, 2, 1)}
    tasks = []
    for which, within_s in wanted.items():
        tasks.append(asyncio.create_task(prefetches.prefetch(_keys(which, 6), within_s)))
        await _settle()
    assert tiers.pinned == [(3, 1)], "one at a time"
    tiers.go.set()
    assert all(all(there) for there in await asyncio.gather(*tasks))
    assert tiers.pinned[1:] == [(1, 1), (1, 4), (1, 1), (2, 1), (2, 4), (2, 1), (3, 4), (3, 1)]
    assert tiers.unpinned == len(tiers.pinned)


async def test_one_that_is_given_up_passes_its_turn_on() -> None:
    prefetches, tiers = _prefetches()
    tasks = [asyncio.create_task(prefetches.prefetch(_keys(which, 1), 1.0 * which)) for which in (1, 2, 3)]
    await _settle()
    tasks[1].cancel()
    tasks[0].cancel()
    tiers.go.set()
    assert await tasks[2] == [True]
    assert await prefetches.prefetch(_keys(4, 1), 0.0) == [True]


async def test_no_more_than_half_of_memory_is_filled() -> None:
    prefetches, tiers = _prefetches(capacity_bytes=12 * _CHUNK)
    tiers.go.set()
    assert sum(await prefetches.prefetch(_keys(1, 20), 0.0)) == 6


async def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAITING_MAX", 1)
    prefetches, tiers = _prefetches()
    tasks = [asyncio.create_task(prefetches.prefetch(_keys(which, 1), 0.0)) for which in (1, 2)]
    await _settle()
    with pytest.raises(TooManyRequests):
        await prefetches.prefetch(_keys(3, 1), 0.0)
    tiers.go.set()
    await asyncio.gather(*tasks)
