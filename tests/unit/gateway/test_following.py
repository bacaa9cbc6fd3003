"""Look-ups that count chunks whose store is running."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from quire.model.errors import DeadlineExceeded, MetadataUnavailable
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.nodes import Node, NodeAddress, StorageInfo
from quire.model.ranges import ChunkRange
from quire.testing import FakeClock
from quire.testing.running_stores import MemoryRunningStores
from quire_gateway.grpc.public import _remaining_ms
from quire_gateway.kv.following import Announcements, Following
from quire_server.lookups import LookupAnswer, Question

KEYS = ChunkKeys(os.urandom(32 * 100))
QUESTION = Question(Namespace("m", "1", KvLayout(1, 16, 1, 16, Dtype.BF16)), KEYS)
STORE = b"s" * 16


class _World:
    """`readable`: chunks that look-ups find, on node `a`; `live`: nodes that the view has."""

    def __init__(self, readable: int, live: str = "ab") -> None:
        self.readable, self.live = readable, live
        self.running = MemoryRunningStores()
        self.clock = FakeClock()
        this: Any = self
        self.following = Following(this, self.running, this, self.clock)

    async def lookup(self, question: Question) -> LookupAnswer:
        ranges = (ChunkRange("a", 0, self.readable),) if self.readable else ()
        return LookupAnswer(ranges, [NodeAddress("a", "at a", b"a")] if ranges else [])

    peek = lookup

    def storage_nodes(self) -> dict[str, Node]:
        return {name: Node(node_id=name, about=StorageInfo(), grpc_address=f"at {name}") for name in self.live}

    async def begin(self, node: str, first: int, stop: int, *, minutes: int = 1) -> None:
        until_ms = self.clock.now_ms() + 60_000 * minutes
        await self.running.begin(KEYS, [ChunkRange(node, first, stop - first)], os.urandom(16), until_ms)


async def test_what_arrives_goes_on_behind_what_is_readable() -> None:
    world = _World(10)
    await world.begin("b", 0, 40)
    await world.begin("a", 40, 70)
    await world.begin("b", 80, 100)
    found = await world.following.lookup(QUESTION)
    assert found.arriving == (ChunkRange("b", 10, 30), ChunkRange("a", 40, 30))
    assert found.chunks == 70, "not behind a gap"
    assert found.readable.addresses == {"a": "at a", "b": "at b"}


async def test_of_two_stores_the_later_one_is_followed() -> None:
    """The other's end was lost: nothing of it will come."""
    world = _World(10)
    await world.begin("a", 0, 100)
    await world.begin("b", 10, 100, minutes=2)
    assert (await world.following.lookup(QUESTION)).arriving == (ChunkRange("b", 10, 90),)


async def test_a_node_that_has_left_delivers_nothing() -> None:
    """What could be read of one that leaves at this moment fails by itself, and nothing else with it."""
    world = _World(10, live="b")
    await world.begin("c", 10, 100)
    found = await world.following.lookup(QUESTION)
    assert not found.arriving and found.readable.addresses == {"a": "at a"}


async def test_a_wait_ends_with_its_time_or_when_all_arrives() -> None:
    world = _World(10)
    waiting = asyncio.create_task(world.following.until_they_arrive(QUESTION, 5.0))
    for _ in range(20):
        await asyncio.sleep(0)
        await world.clock.advance(0.1)
    assert not waiting.done()
    await world.begin("b", 10, 100)
    for _ in range(20):
        await asyncio.sleep(0)
        await world.clock.advance(0.1)
    assert waiting.done()
    world.running = MemoryRunningStores()
    late = asyncio.create_task(_World(10).following.until_they_arrive(QUESTION, 0.0))
    await asyncio.wait_for(late, 5)


async def test_a_part_is_enough_after_a_while() -> None:
    """After `part_s` what there is suffices; with nothing there, any chunk."""
    world = _World(10)
    await world.begin("b", 10, 40)
    for first, waits in ((10, False), (40, True), (0, False)):
        wait = asyncio.create_task(world.following.until_they_arrive(QUESTION, 5.0, first=first, part_s=1.0))
        for step in range(30):
            await asyncio.sleep(0)
            await world.clock.advance(0.1)
            assert step > 5 or not wait.done()
        assert wait.done() != waits
        wait.cancel()


class _Away:
    """Redis does not answer; or the answer takes a while."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.ended = 0

    async def begin(self, *_: Any) -> None:
        await self.go.wait()
        raise MetadataUnavailable("Redis is away")

    async def end(self, *_: Any) -> None:
        self.ended += 1


async def test_a_store_waits_for_no_announcement() -> None:
    """And a gateway that ends waits for its withdrawals."""
    away = _Away()
    running: Any = away
    announcements = Announcements(running, FakeClock(), 1000)
    with announcements.announced(KEYS, [ChunkRange("a", 0, 100)], STORE, 0):
        await asyncio.sleep(0)
    assert not away.ended
    away.go.set()
    await announcements.close()
    assert away.ended > 0


def test_memory_is_lent_for_no_longer_than_said() -> None:
    assert _remaining_ms(10_000, 2.5) == 7_500 and _remaining_ms(0, 2.5) == 0
    with pytest.raises(DeadlineExceeded):
        _remaining_ms(10_000, 10.0)
