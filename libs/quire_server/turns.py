"""Turns at a bounded resource, in which tenants alternate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from quire_server.core.fair_queue import FairQueue

_Waiting = tuple[asyncio.Future[None], int]


class FairTurns:
    """A semaphore over `count` units whose waiting tenants take turns, so that a greedy one delays others by one turn.

    The next one in turn waits until it fits, also if a smaller one would fit before it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = count
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._next: _Waiting | None = None

    @property
    def waiting(self) -> int:
        """Return how many callers wait."""
        return len(self._queue) + (self._next is not None)

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, cost: int = 1) -> AsyncIterator[None]:
        """Hold `cost` units; a cost above the total takes all of them."""
        cost = min(max(1, cost), self._count)
        if not self.waiting and cost <= self._free:
            self._free -= cost
        else:
            await self._wait(tenant, cost)
        try:
            yield
        finally:
            self._free += cost
            self._pass_on()

    async def _wait(self, tenant: str, cost: int) -> None:
        waiting = asyncio.get_running_loop().create_future(), cost
        self._queue.add(tenant, waiting)
        try:
            await waiting[0]
        except asyncio.CancelledError:
            if self._next is waiting:
                self._next = None
                self._pass_on()
            elif not self._queue.remove(tenant, waiting):  # the turn came at the moment of the cancellation
                self._free += cost
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._next is not None or len(self._queue):
            if self._next is None:
                self._next = self._queue.take()
            waiting, cost = self._next
            if cost > self._free:
                return
            self._free -= cost
            self._next = None
            waiting.set_result(None)
