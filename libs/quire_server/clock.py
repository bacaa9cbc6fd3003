"""Time as a port: what decides never reads a clock by itself."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

_DRIFT: Final = 200e-6
"""By how much the clocks of two machines differ more with each second that passes."""


class Clock(Protocol):
    """Wall time for leases that cross processes, monotonic time for durations, and sleep."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""

    def monotonic_s(self) -> float:
        """Seconds that only grow."""

    async def sleep(self, seconds: float) -> None:
        """Return when so much time has passed."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        """Seconds that only grow."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """As asyncio does."""
        await asyncio.sleep(seconds)


class ClusterClock:
    """The clock of Redis, as a member of the cluster knows it: no member's own clock decides what members compare.

    The orchestrator asks Redis, and tells the others with each heartbeat's answer. Until the first answer it is the
    clock of this machine; from then on a step of that one changes nothing.
    """

    def __init__(self, own: Clock) -> None:
        self._own = own
        self._at_zero_ms: float | None = None  # of Redis' clock, when the monotonic clock was at 0
        self._uncertain_s = 0.0
        self._set_s = 0.0

    def follow(self, now_ms: int, asked_s: float) -> None:
        """Redis' clock was at `now_ms` (ms since the Unix epoch) at some time since `asked_s` (monotonic).

        It is taken unless what is known is more certain: answers that were long under way say little.
        """
        answered_s = self._own.monotonic_s()
        uncertain_s = (answered_s - asked_s) / 2
        known_s = self._uncertain_s + _DRIFT * (answered_s - self._set_s)
        if now_ms and (self._at_zero_ms is None or uncertain_s <= known_s):
            self._at_zero_ms = now_ms + 1000 * (uncertain_s - answered_s)
            self._uncertain_s, self._set_s = uncertain_s, answered_s

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        if self._at_zero_ms is None:
            return self._own.now_ms()
        return int(self._at_zero_ms + 1000 * self._own.monotonic_s())

    def monotonic_s(self) -> float:
        """Seconds that only grow."""
        return self._own.monotonic_s()

    async def sleep(self, seconds: float) -> None:
        """As the machine's clock does."""
        await self._own.sleep(seconds)
