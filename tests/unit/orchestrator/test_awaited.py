"""A store over several nodes is registered range by range: a registration waits for the chunks before its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from quire.model.keys import ChunkKeys
from quire.model.records import ChunkRecord, ChunkRecords, records
from quire.testing import FakeClock
from quire.testing.index import MemoryIndex
from quire_orchestrator import awaited
from quire_orchestrator.runtime import Orchestrator
from quire_storage.cluster.registry import Registry
from tests.unit.orchestrator.world import World

KEYS = ChunkKeys(b"".join(number.to_bytes(32, "big") for number in range(1, 81)))
BOUND_S = 30


class _Calls:
    """A storage node's way to an orchestrator. `count`: how often it was asked."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self.count = 0

    async def commit(self, node_id: str, chunks: ChunkRecords, reporter: str, fresh: int, wait_ms: int) -> list[int]:
        self.count += 1
        return await self.orchestrator.reports.commit(node_id, chunks, fresh, wait_ms)


async def _register(index: Any, node: str, first: Sequence[int]) -> int:
    """Register ranges of ten chunks. The node's clock stands still: without the orchestrator it never looks again."""
    chunks = [record for start in first for record in records(KEYS, start, 10)]
    registering = Registry(node, index, FakeClock(), 5.0).registering(chunks)
    return sum([len(indexed) async for indexed in registering])


async def test_each_range_wakes_the_next_one() -> None:
    world = World()
    calls = _Calls(await world.start())
    async with asyncio.timeout(BOUND_S):
        second = asyncio.create_task(_register(calls, "b", (10, 30, 50, 70)))
        await asyncio.sleep(0)
        assert sum(await asyncio.gather(second, _register(calls, "a", (0, 20, 40, 60)))) == 80
    assert (await world.index.match(KEYS)).count == 80
    assert calls.count <= 10, "none asked again and again"


async def test_no_chunk_waits_for_none() -> None:
    orchestrator = await World().start()
    async with asyncio.timeout(BOUND_S):
        assert await orchestrator.reports.commit("a", records(KEYS, 0, 0), 0, wait_ms=200) == []


async def test_what_came_by_another_orchestrator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk is indexed twice: one that was evicted in between would come back under the same generation."""
    world, indexed, register = World(), list[bytes](), MemoryIndex.register

    async def noted(
        index: MemoryIndex, node: str, chunks: Sequence[ChunkRecord], *rest: Any, **options: Any
    ) -> list[int]:
        generations = await register(index, node, chunks, *rest, **options)
        indexed.extend(chunk.key for chunk, generation in zip(chunks, generations, strict=True) if generation)
        return generations

    monkeypatch.setattr(MemoryIndex, "register", noted)
    calls = _Calls(await world.start())
    async with asyncio.timeout(BOUND_S):
        second = asyncio.create_task(_register(calls, "b", (10,)))
        await asyncio.sleep(0)
        assert await _register(_Calls(await world.start()), "a", (0,)) == await second == 10
    assert len(indexed) == len(set(indexed)) == 20


@pytest.mark.parametrize("room", [0, 1])
async def test_it_answers_when_the_time_is_over_or_many_wait(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "_WAITING_MAX", room)
    reports, looks = (await World().start()).reports, list[int]()
    monkeypatch.setattr(reports, "_commit", _refusing(looks))
    async with asyncio.timeout(BOUND_S):
        assert await reports.commit("b", records(KEYS, 10, 10), 0, 100) == [0] * 10
    assert looks[0] == 10 and set(looks[1:]) == ({1} if room else set()), (
        "what is behind the first one is not asked for"
    )
    assert not reports._awaited._waiting and reports._awaited.has_room is bool(room)


def _refusing(looks: list[int]) -> Any:
    async def commit(node_id: str, chunks: Sequence[ChunkRecord], fresh: int) -> list[int]:
        looks.append(len(chunks))
        return [0] * len(chunks)

    return commit


async def test_one_that_is_given_up_waits_no_more() -> None:
    reports = (await World().start()).reports
    registration = asyncio.create_task(reports.commit("b", records(KEYS, 10, 10), 0, 1000))
    await asyncio.sleep(0)
    assert len(reports._awaited._waiting) == 1
    registration.cancel()
    await asyncio.wait([registration])
    assert not reports._awaited._waiting
