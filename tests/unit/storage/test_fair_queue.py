"""Turns at the wire and at the places of chunkwise deliveries."""

from __future__ import annotations

import asyncio

import pytest

from quire_storage.delivery.fair_queue import Wire, WireQueue

_LONG_S = 60.0


async def test_tenants_take_turns_at_places() -> None:
    """A tenant with many chunkwise deliveries in line does not keep another's first one waiting."""
    gate, order = WireQueue(1), []

    async def delivery(tenant: str) -> None:
        leave = await gate.enter(tenant, 1.0, 1, _LONG_S)
        order.append(tenant)
        await asyncio.sleep(0)
        leave()

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for _ in range(10):
            tasks.create_task(delivery("many"))
        await asyncio.sleep(0)
        tasks.create_task(delivery("one"))
    assert order.index("one") <= 3
    assert len(order) == 11


async def test_one_that_gives_up_in_line_costs_no_other_a_place() -> None:
    gate = WireQueue(2)
    leave_first = await gate.enter("a", 1.0, 1, _LONG_S)
    leave_second = await gate.enter("a", 1.0, 1, _LONG_S)
    waiting = [asyncio.create_task(gate.enter(name, 1.0, 1, _LONG_S)) for name in "bcd"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    leave_first()
    waiting[1].cancel()  # at the moment when it was admitted
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    async with asyncio.timeout(5):
        leave_third = await waiting[2]
    leave_second()
    leave_third()
    async with asyncio.timeout(5):
        await gate.enter("e", 1.0, 2, _LONG_S)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (10.0, 1.0)])
async def test_the_wire_is_shared_by_rates(weights: tuple[float, float]) -> None:
    """Two lanes that always have something to send, over a wire that takes one piece at a time."""
    wire, sent = Wire(1000), [0, 0]
    lanes = [wire.lane(str(index), lambda weight=weight: 100 * weight) for index, weight in enumerate(weights)]  # type: ignore[misc]
    arriving: asyncio.Queue[object] = asyncio.Queue()

    async def send(index: int) -> None:
        while sum(sent) < 400_000:
            arrived = await lanes[index].turn(1000)
            assert arrived is not None
            sent[index] += 1000
            arriving.put_nowait(arrived)

    async def arrive() -> None:
        while True:
            arrived = await arriving.get()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            arrived()  # type: ignore[operator]

    taker = asyncio.create_task(arrive())
    async with asyncio.timeout(20):
        async with asyncio.TaskGroup() as tasks:
            for index in range(2):
                tasks.create_task(send(index))
    taker.cancel()
    assert sent[0] / sent[1] == pytest.approx(weights[0] / weights[1], rel=0.1)


async def test_a_client_that_takes_nothing_holds_its_turn_for_a_moment_only() -> None:
    wire = Wire(1000)
    stuck, other = wire.lane("stuck", lambda: 1.0), wire.lane("other", lambda: 1.0)
    assert await stuck.turn(1000) is not None
    async with asyncio.timeout(5):
        leave = await other.turn(1000)
    assert leave is not None
    leave()
    leave()
    stuck.close()
    stuck.close()
    assert await other.turn(10**9) is None, "alone again, it need not ask"
