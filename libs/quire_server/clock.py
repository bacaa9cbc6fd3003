"""Time as a port: decisions take the time as an argument."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

_DRIFT: Final = 200e-6
"""Assumed drift between the clocks of two machines, seconds per second."""
_ROUNDED_MS: Final = 2
"""Redis' clock and the estimate of it are each rounded down to milliseconds."""


def end_ms(now_ms: int, ttl_ms: int) -> int:
    """Return when a lease or retention ends that was given at `now_ms`: at least `ttl_ms` later, by an exact clock."""
    return now_ms + ttl_ms + _ROUNDED_MS


class Clock(Protocol):
    """Wall time for leases that cross processes, monotonic time for durations, and sleep."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""

    async def known_ms(self) -> int:
        """Return `now_ms`, by the clock that decides. Raises `MetadataUnavailable` if that clock cannot be read."""

    def monotonic_s(self) -> float:
        """Seconds that only grow."""

    async def sleep(self, seconds: float) -> None:
        """Return when this time has passed."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    async def known_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return self.now_ms()

    def monotonic_s(self) -> float:
        """Seconds that only grow."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep by asyncio."""
        await asyncio.sleep(seconds)


class ClusterClock:
    """An estimate of Redis' clock, which decides wherever members of the cluster compare times.

    The orchestrator reads the clock of Redis; heartbeat responses carry it to the other members. Before the first
    response this is the machine's clock. Later steps of the machine's clock change nothing.

    `read`: requests the clock of Redis, for a member that has access to Redis itself.
    """

    def __init__(self, own: Clock, read: Callable[[], Awaitable[int]] | None = None) -> None:
        self._own = own
        self._read = read
        self._at_zero_ms: float | None = None  # of Redis' clock, when the monotonic clock was at 0
        self._uncertain_s = 0.0
        self._set_s = 0.0

    def follow(self, now_ms: int, asked_s: float) -> None:
        """Update the estimate, unless the current one is more certain: a slow response is a poor measurement.

        Args:
            now_ms: Redis' clock, in ms since the Unix epoch; 0 if the response did not contain it.
            asked_s: When the clock was requested, by the monotonic clock.
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

    async def known_ms(self) -> int:
        """Return `now_ms`; read the clock of Redis first if there was no response yet.

        A lease that a member gives before its first heartbeat would else end by the machine's clock. Raises
        `MetadataUnavailable`.
        """
        if self._at_zero_ms is None and self._read is not None:
            asked_s = self._own.monotonic_s()
            self.follow(await self._read(), asked_s)
        return self.now_ms()

    def monotonic_s(self) -> float:
        """Seconds that only grow."""
        return self._own.monotonic_s()

    async def sleep(self, seconds: float) -> None:
        """Return after this time, by the machine's clock."""
        await self._own.sleep(seconds)
