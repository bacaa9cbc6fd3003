"""The clock's port: wall time, monotonic time, sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Clock = Any
"""What `quire.testing.FakeClock` does."""
Elapse = Callable[[float], Awaitable[None]]


class ClockContract:
    """Fixtures `clock`, and `elapse`, which lets a number of seconds pass."""

    async def test_time_goes_on(self, clock: Clock, elapse: Elapse) -> None:
        """Wall time in whole milliseconds since 1970, monotonic time in seconds; both by as much as passes."""
        wall_ms, monotonic_s = clock.now_ms(), clock.monotonic_s()
        assert isinstance(wall_ms, int)
        await elapse(0.03)
        assert clock.now_ms() - wall_ms >= 29
        assert clock.monotonic_s() - monotonic_s >= 0.029

    async def test_sleepers_wake_when_their_time_has_come_and_not_before(self, clock: Clock, elapse: Elapse) -> None:
        began_s, woken = clock.monotonic_s(), list[float]()

        async def sleeper(seconds: float) -> None:
            await clock.sleep(seconds)
            woken.append(clock.monotonic_s() - began_s)

        tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (0.06, 0.02, 0.0)]
        await elapse(0.1)
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks)
        assert all(late_s >= due_s - 0.001 for late_s, due_s in zip(woken, (0.0, 0.02, 0.06), strict=True))

    async def test_a_sleep_can_be_cancelled(self, clock: Clock, elapse: Elapse) -> None:
        task = asyncio.create_task(clock.sleep(1000.0))
        await asyncio.sleep(0)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        await elapse(0.01)
