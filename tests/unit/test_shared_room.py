"""Room that tenants share: one that keeps its share waits alone."""

from __future__ import annotations

import asyncio

import pytest

from quire.model.errors import TooManyRequests
from quire_server.limits.shared_room import SharedRoom


async def test_one_tenant_leaves_room_to_others() -> None:
    room, gate = SharedRoom(8), asyncio.Event()

    async def keep(tenant: str, amount: int, wait_s: float = 60.0) -> None:
        async with room.held(tenant, amount, wait_s):
            await gate.wait()

    tasks = [asyncio.create_task(keep("greedy", 2)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests):
        await keep("greedy", 2, 0.02)
    waiting = asyncio.create_task(keep("greedy", 2))
    tasks.append(asyncio.create_task(keep("modest", 2)))
    await asyncio.sleep(0.01)
    assert room.taken == 6 and not waiting.done()
    gate.set()
    await asyncio.gather(*tasks, waiting)
    assert not room.taken


async def test_what_is_held_is_given_back_by_those_that_leave() -> None:
    room = SharedRoom(4)

    async def keep() -> None:
        async with room.held("a", 2, 60.0):
            await asyncio.sleep(60)

    holder, waiter = asyncio.create_task(keep()), asyncio.create_task(keep())
    await asyncio.sleep(0)
    waiter.cancel()
    holder.cancel()
    await asyncio.gather(holder, waiter, return_exceptions=True)
    assert not room.taken and not room._waiting
    async with asyncio.timeout(1), room.held("a", 2, 1.0):  # the room is free again
        pass
