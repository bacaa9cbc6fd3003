"""Waiting for the death of a simulated process."""

from __future__ import annotations

import asyncio

from quire.testing.simulation import Process, SimulatedLoop, simulate


def test_a_death_is_noticed_before_and_afterwards() -> None:
    """A caller that began to watch a dead process waited for ever (seed 1198)."""

    async def noticed(loop: SimulatedLoop) -> float:
        process = Process("p")
        early = asyncio.ensure_future(process.died())
        await asyncio.sleep(1.0)
        process.crash()
        async with asyncio.timeout(1.0):
            await early
            await process.died()
        return loop.time()

    assert 1.0 < simulate(1, noticed) < 1.5


def test_a_process_that_wakes_its_watchers_lives() -> None:
    """A node that had closed its connections counted as dead while it was stopping, so nothing restarted it (868)."""

    async def woken(loop: SimulatedLoop) -> bool:
        process = Process("p")
        death = asyncio.ensure_future(process.died())
        await asyncio.sleep(1.0)
        process.wake()
        await asyncio.sleep(1.0)
        return death.done()

    assert simulate(1, woken) is False
