"""Turns at a bounded resource: tenants alternate, turns are never exceeded, and none is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from quire_server.limits.turns import FairTurns


async def _settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_modest_tenant_waits_for_one_turn() -> None:
    turns, order, gate = FairTurns(1), list[str](), asyncio.Event()

    async def work(tenant: str) -> None:
        async with turns.turn(tenant):
            order.append(tenant)
            await gate.wait()

    tasks = [asyncio.create_task(work("greedy")) for _ in range(20)]
    await _settle()
    tasks.append(asyncio.create_task(work("modest")))
    await _settle()
    gate.set()
    await asyncio.gather(*tasks)
    assert order.index("modest") == 2


async def test_a_holder_is_not_harmed_by_a_waiter_that_is_cancelled_with_it() -> None:
    """In one step of the loop: the waiter's future is cancelled, and the waiter has not run since."""
    turns, gate = FairTurns(1), asyncio.Event()

    async def hold() -> str:
        async with turns.turn("a"):
            await gate.wait()
        return "done"

    async def wait() -> None:
        async with turns.turn("b"):
            pass

    holder, waiter = asyncio.create_task(hold()), asyncio.create_task(wait())
    await _settle()
    gate.set()
    await asyncio.sleep(0)
    waiter.cancel()
    assert await holder == "done"
    with pytest.raises(asyncio.CancelledError):
        await waiter
    async with asyncio.timeout(1), turns.turn("c"):
        pass


async def test_deadlines_that_end_together_are_deadlines() -> None:
    turns = FairTurns(1)

    async def work() -> None:
        async with asyncio.timeout(0.05), turns.turn("a"):
            await asyncio.sleep(60)

    ends = await asyncio.gather(*(work() for _ in range(5)), return_exceptions=True)
    assert [type(end) for end in ends] == [TimeoutError] * 5


@pytest.mark.parametrize("seed", range(8))
async def test_turns_are_kept_and_given_back(seed: int) -> None:
    """Also by callers that are cancelled, before and at their turn."""
    chance, turns, held, most = random.Random(seed), FairTurns(3), 0, 0

    async def work(tenant: str) -> None:
        nonlocal held, most
        async with turns.turn(tenant):
            held += 1
            most = max(most, held)
            try:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                held -= 1

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(work(chance.choice("abc"))))
        if chance.random() < 0.5:
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(end) for end in ends} == {type(None), asyncio.CancelledError} and most == 3
    assert not turns.waiting
    async with asyncio.timeout(1), turns.turn("a"), turns.turn("b"), turns.turn("c"):  # all are free again
        pass
