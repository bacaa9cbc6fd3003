"""Turns at a bounded resource: tenants alternate, units are never exceeded, and none is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from quire_server.turns import FairTurns


async def _settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_modest_tenant_waits_for_one_turn() -> None:
    turns, order, gate = FairTurns(4), list[str](), asyncio.Event()

    async def work(tenant: str, cost: int) -> None:
        async with turns.turn(tenant, cost):
            order.append(tenant)
            await gate.wait()

    tasks = [asyncio.create_task(work("greedy", 4)) for _ in range(20)]
    await _settle()
    tasks.append(asyncio.create_task(work("modest", 1)))
    await _settle()
    gate.set()
    await asyncio.gather(*tasks)
    assert order.index("modest") == 2


@pytest.mark.parametrize("seed", range(8))
async def test_units_are_kept_and_given_back(seed: int) -> None:
    """Also by callers that are cancelled, before and at their turn."""
    chance, turns, held, most = random.Random(seed), FairTurns(7), 0, 0

    async def work(tenant: str, cost: int) -> None:
        nonlocal held, most
        async with turns.turn(tenant, cost):
            held += min(cost, 7)
            most = max(most, held)
            try:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                held -= min(cost, 7)

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(work(chance.choice("abc"), chance.choice((1, 1, 3, 7, 100)))))
        if chance.random() < 0.5:
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(end, asyncio.CancelledError) for end in ends) and most <= 7
    assert not turns.waiting
    async with asyncio.timeout(1), turns.turn("a", 7):  # all units are free again
        pass


async def test_a_large_one_is_not_starved_by_small_ones() -> None:
    turns, done = FairTurns(4), asyncio.Event()

    async def small() -> None:
        while not done.is_set():
            async with turns.turn("small", 1):
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(small()) for _ in range(6)]
    await _settle()
    async with asyncio.timeout(5), turns.turn("large", 4):
        done.set()
    await asyncio.gather(*tasks)
