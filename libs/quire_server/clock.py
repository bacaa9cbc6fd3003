"""Time as a port: what decides never reads a clock by itself."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


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
