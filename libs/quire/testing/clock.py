"""A clock that a test advances."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """The `Clock` port. `await clock.advance(s)` runs every task whose sleep ends within these seconds, in order."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self._now_s = now_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = itertools.count()

    def now_ms(self) -> int:
        return round(self._now_s * 1000)

    async def known_ms(self) -> int:
        return self.now_ms()

    def monotonic_s(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        """Return when `advance` has come so far."""
        awake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + max(0.0, seconds), next(self._number), awake))
        await awake

    async def advance(self, seconds: float) -> None:
        """Time passes."""
        end_s = self._now_s + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            at_s, _, awake = heapq.heappop(self._sleepers)
            self._now_s = at_s
            if not awake.done():
                awake.set_result(None)
            await _settle()
        self._now_s = end_s
        await _settle()


async def _settle() -> None:
    """Let the loop run until those that can go on have gone on; nothing here waits for the outside."""
    for _ in range(20):
        await asyncio.sleep(0)
