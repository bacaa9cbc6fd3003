"""Turns at a bounded resource, in which tenants alternate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from quire.model.fair_queue import FairQueue


class FairTurns:
    """A semaphore whose waiting tenants take turns, so that a greedy one delays others by one turn."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def waiting(self) -> int:
        """Return how many callers wait."""
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold one of the turns."""
        if self._free and not self.waiting:
            self._free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._free += 1
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._queue.add(tenant, granted)
        try:
            await granted
        except asyncio.CancelledError:
            self._queue.remove(tenant, granted)
            if granted.done() and not granted.cancelled():  # it was granted at the moment of the cancellation
                self._free += 1
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._free and len(self._queue):
            granted = self._queue.take()
            if not granted.done():  # its caller was cancelled, and has not run since
                self._free -= 1
                granted.set_result(None)
