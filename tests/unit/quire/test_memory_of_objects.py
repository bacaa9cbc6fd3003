"""When the memory of an object may be used again: not before the last node is quiet, whatever the answer was."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.client import Buffer
from quire.integrations.objects import Objects, Owner
from quire.integrations.staging import StagingPool, staged
from quire.model.durability import Durability
from quire.model.errors import NodeUnavailable, ResourceExhausted
from quire.transport.memory import MemoryTransport

PLACE = Owner(model="m", version="v").place(b"a", 4096)


class _Lost:
    """A client whose answers are lost; a node has the memory for a while all the same."""

    def __init__(self) -> None:
        self.quiet = asyncio.Event()

    async def retrieve(self, namespace: Any, keys: Any, memory: Buffer, **_: Any) -> None:
        loan = memory.lend_range("a node", memory.length)

        async def end() -> None:
            await self.quiet.wait()
            loan.end()

        self.ending = asyncio.ensure_future(end())
        raise NodeUnavailable("the answer was lost")

    async def store(self, namespace: Any, keys: Any, first: int, memory: Buffer, **_: Any) -> None:
        await self.retrieve(namespace, keys, memory)


@pytest.mark.parametrize("what", ["get", "put"])
async def test_an_error_comes_when_no_node_can_touch_the_memory(what: str) -> None:
    lost: Any = _Lost()
    memory = Buffer.allocate(MemoryTransport(), 4096)
    objects = Objects(lost, Durability.MEMORY)
    working = asyncio.ensure_future(
        objects.get([PLACE], memory, [0]) if what == "get" else objects.put([PLACE], memory)
    )
    await asyncio.sleep(0.1)
    assert memory.is_busy and not working.done()
    lost.quiet.set()
    with pytest.raises(NodeUnavailable):
        await asyncio.wait_for(working, 5)
    assert not memory.is_busy


async def test_what_comes_too_late_is_not_taken_and_its_memory_comes_back() -> None:
    pool, late, taken = StagingPool(Buffer.allocate(MemoryTransport(), 8192)), asyncio.Event(), list[str]()

    async def arrive(part: Buffer) -> str:
        await late.wait()
        return "late"

    assert await staged(pool, 4096, 0.05, arrive, lambda part, what: taken.append(what)) is None
    assert pool.free_bytes == 4096
    late.set()
    while pool.free_bytes < 8192:
        await asyncio.sleep(0)
    assert not taken
    assert await staged(pool, 4096, 5, arrive, lambda part, what: taken.append(what)) == "late" and taken == ["late"]


async def test_what_staging_memory_never_has_room_for_is_refused_at_once() -> None:
    """It was waited for as long as a transfer may take, each time."""
    pool = StagingPool(Buffer.allocate(MemoryTransport(), 8192))
    async with asyncio.timeout(1):
        with pytest.raises(ResourceExhausted, match="raise staging_bytes"):
            await pool.take_soon(8193, 60)
