"""When a buffer is free: every node has stopped, or is dead. A connection that was never made is no sign of death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.client.memory.quiescence import Quiescence
from quire.model.errors import DeadlineExceeded, PeerLost
from quire.model.outcome import NodeOutcome
from quire.model.ranges import ChunkRange

RANGES = (ChunkRange("storage-0", 0, 2), ChunkRange("storage-1", 2, 2))


@dataclass
class _Peer:
    """A connection that breaks when it is told to."""

    reached: bool = True
    watchers: list[Callable[[PeerLost], None]] = field(default_factory=list)

    def on_failure(self, callback: Callable[[PeerLost], None]) -> Callable[[], None]:
        self.watchers.append(callback)
        return lambda: self.watchers.remove(callback)

    def fail(self) -> None:
        for callback in list(self.watchers):
            callback(PeerLost("broke"))


class _World:
    """Two nodes, and the buffer that they write to."""

    def __init__(self) -> None:
        self.peers = {b"0": _Peer(), b"1": _Peer()}
        self.lent, self.told = True, 0
        transport: Any = self
        loan: Any = self
        self.quiescence = Quiescence(RANGES, {"storage-0": b"0", "storage-1": b"1"}, transport, loan, self._tell, 60.0)

    def connect(self, address: bytes) -> _Peer:
        return self.peers[address]

    def end(self) -> None:
        self.lent = False

    def _tell(self) -> None:
        self.told += 1

    def outcome(self, index: int, *, quiesced: bool) -> None:
        run = RANGES[index]
        self.quiescence.ended(NodeOutcome(run.node_id, (run,), bytes(2), quiesced=quiesced))


@pytest.fixture
async def world() -> _World:
    world = _World()
    world.quiescence.connect()
    world.quiescence.node(1)
    return world


async def test_a_node_that_was_reached_and_is_lost_is_dead(world: _World) -> None:
    world.peers[b"0"].fail()
    assert not world.lent and world.told == 1
    await world.quiescence.wait(1)


async def test_a_node_that_was_never_reached_may_be_at_work(world: _World) -> None:
    """It writes by a connection of its own: the buffer stays lent until it says that it has stopped."""
    world.peers[b"0"].reached = False
    world.peers[b"0"].fail()
    assert world.lent
    with pytest.raises(DeadlineExceeded, match="storage-0"):
        await world.quiescence.wait(0.05)
    world.quiescence.node(0)
    assert not world.lent


async def test_what_the_node_says_through_the_gateway_counts(world: _World) -> None:
    world.peers[b"0"].reached = False
    world.peers[b"0"].fail()
    world.outcome(0, quiesced=True)
    assert not world.lent


async def test_a_node_that_the_gateway_has_lost_may_be_at_work(world: _World) -> None:
    world.outcome(0, quiesced=False)
    assert world.lent


@pytest.fixture
async def unquiet() -> _World:
    """Neither of the two nodes is quiet yet."""
    world = _World()
    world.quiescence.connect()
    return world


@pytest.mark.parametrize(("chunks", "is_whole"), [((2, 2), True), ((2, 1), False), ((0, 0), False), ((3, 2), False)])
async def test_a_transfer_is_whole_by_the_nodes_reports(
    unquiet: _World, chunks: tuple[int, int], is_whole: bool
) -> None:
    asking = asyncio.create_task(unquiet.quiescence.is_whole(4, asyncio.get_running_loop().create_future()))
    unquiet.quiescence.node(0, chunks[0])
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asking.done(), "the other one has said nothing"
    unquiet.quiescence.node(1, chunks[1])
    async with asyncio.timeout(5):
        assert await asking == is_whole


async def test_what_the_gateway_says_counts_no_chunks(unquiet: _World) -> None:
    """Also where the node's own word has come before, or comes later."""
    unquiet.quiescence.node(0, 2)
    unquiet.outcome(0, quiesced=True)
    unquiet.outcome(1, quiesced=True)
    assert not await unquiet.quiescence.is_whole(4)
    unquiet.quiescence.node(1, 2)
    assert await unquiet.quiescence.is_whole(4)


async def test_a_dead_node_has_said_nothing(unquiet: _World) -> None:
    unquiet.quiescence.node(0, 2)
    unquiet.peers[b"1"].fail()
    assert not await unquiet.quiescence.is_whole(4)


async def test_the_end_of_a_transfer_is_not_waited_beyond(unquiet: _World) -> None:
    end = asyncio.get_running_loop().create_future()
    end.set_result(None)
    unquiet.quiescence.node(0, 4)
    async with asyncio.timeout(5):
        assert not await unquiet.quiescence.is_whole(4, end), "the other node may still be at work"
