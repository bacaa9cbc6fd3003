"""A chain whose ranges lie at several nodes is registered by all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from quire.model.keys import ChunkKeys
from quire.model.records import ChunkRecord, records
from quire.testing import FakeClock
from quire.testing.index import MemoryIndex
from quire_storage.cluster.registry import Registry

KEYS = ChunkKeys(b"".join(number.to_bytes(32, "big") for number in range(40)))


class _Index:
    """`asked`: how many chunks each node had to ask for."""

    def __init__(self) -> None:
        self.index = MemoryIndex()
        self.asked: dict[str, list[int]] = {"a": [], "b": []}

    async def commit(
        self, node_id: str, chunks: Sequence[ChunkRecord], reporter: str, fresh: int, wait_ms: int
    ) -> list[int]:
        """Answers at once, as an orchestrator of the release before does."""
        self.asked[node_id].append(len(chunks))
        return await self.index.register(node_id, chunks, 0, fresh=fresh)


async def test_only_what_waits_for_another_node_is_asked_for_again() -> None:
    index: Any = _Index()
    clock = FakeClock()

    async def register(node: str, parts: Sequence[int]) -> int:
        registry = Registry(node, index, clock, 5.0)
        wanted = [record for first in parts for record in records(KEYS, first, 10)]
        return sum([len(indexed) async for indexed in registry.registering(wanted)])

    waiting = asyncio.create_task(register("b", (10, 30)))
    for _ in range(100):
        await clock.advance(0.01)
    assert index.asked["b"][0] == 20 and set(index.asked["b"][1:]) == {2}, "the first of each range"
    assert len(index.asked["b"]) <= 30, "ever less often"
    other = asyncio.create_task(register("a", (0, 20)))
    for _ in range(20):
        await clock.advance(0.05)
    assert (await waiting, await other) == (20, 20)
    assert (await index.index.match(KEYS)).count == 40
    assert sum(index.asked["a"]) <= 60


async def test_a_comparison_waits_for_reports_under_way() -> None:
    """And those that come during it wait for its end."""
    index: Any = _Index()
    registry = Registry("a", index, FakeClock(), 1.0)
    commit, answered, steps = index.commit, asyncio.Event(), list[str]()

    async def slow(*arguments: Any, **options: Any) -> list[int]:
        steps.append("asked")
        await answered.wait()
        return cast(list[int], await commit(*arguments, **options))

    index.commit = slow

    async def register() -> None:
        async for _ in registry.registering(records(KEYS, 0, 1)):
            steps.append("registered")

    async def compare() -> None:
        async with registry.quiet():
            steps.append("compared")

    first = asyncio.create_task(register())
    await asyncio.sleep(0)
    comparing = asyncio.create_task(compare())
    for _ in range(10):
        await asyncio.sleep(0)
    second = asyncio.create_task(register())
    for _ in range(10):
        await asyncio.sleep(0)
    assert steps == ["asked"]
    answered.set()
    await asyncio.gather(first, comparing, second)
    assert steps == ["asked", "registered", "compared", "asked", "registered"]


async def test_what_never_comes_is_waited_for_for_a_time() -> None:
    index: Any = _Index()
    clock = FakeClock()
    registry = Registry("a", index, clock, 1.0)

    async def register() -> list[dict[bytes, int]]:
        return [indexed async for indexed in registry.registering(records(KEYS, 5, 10))]

    task = asyncio.create_task(register())
    for _ in range(40):
        await clock.advance(0.05)
    assert task.done() and not any(await task)
