"""Simulated threads that copy."""

from __future__ import annotations

import asyncio

import pytest

from quire.testing.simulation.loop import SimulatedLoop, simulate
from quire.testing.simulation.shared_memory import _Thread, wait_in_thread

_HEALING_S = 0.5


@pytest.mark.timeout(30)
def test_the_loop_runs_while_a_thread_waits_for_it() -> None:
    """Day 613 stood still: a thread had found a rotten chunk, and waited for a loop that waited for the thread."""

    async def main(loop: SimulatedLoop) -> None:
        end_s: asyncio.Future[float] = loop.create_future()

        def work() -> None:
            wait_in_thread(asyncio.sleep(_HEALING_S), loop)
            loop.call_soon_threadsafe(end_s.set_result, loop.time())

        loop.call_soon(_Thread(loop, work).go_on)
        assert await end_s >= _HEALING_S

    simulate(1, main)
