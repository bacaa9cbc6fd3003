"""Store for learned curves, so that they outlive the leader."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from quire.model.errors import QuireError
from quire.telemetry import background, logger
from quire_scheduler.leadership import Leadership
from quire_scheduler.ports import Clock, CurveShelf
from quire_scheduler.runtime import Scheduler
from quire_server import tasks

_LOOK_S: Final = 0.5
_KEEP_S: Final = 10.0


class CurveStore:
    """A new leader takes over the stored curves; a leader stores new ones, each ten seconds and when it stops."""

    def __init__(self, scheduler: Scheduler, leadership: Leadership, shelf: CurveShelf, clock: Clock) -> None:
        self._scheduler = scheduler
        self._leadership = leadership
        self._shelf = shelf
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._term = -1
        self._kept = 0
        self._kept_s = clock.monotonic_s()

    async def start(self) -> None:
        """Take over now, if this one leads already, and go on."""
        await self._try()
        self._task = asyncio.create_task(self._run(), context=background())

    async def close(self) -> None:
        """Store new curves, before it gives up the lease."""
        await tasks.end([self._task])
        with contextlib.suppress(QuireError):
            if self._leadership.leading and self._leadership.term == self._term:
                await self._keep()

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(_LOOK_S)
            await self._try()

    async def _try(self) -> None:
        try:
            if not self._leadership.leading:
                return
            if self._leadership.term != self._term:
                self._scheduler.take_over(await self._shelf.found())
                self._term, self._kept = self._leadership.term, self._scheduler.observed
            elif self._clock.monotonic_s() - self._kept_s >= _KEEP_S:
                await self._keep()
        except QuireError as error:
            logger().warning("what the policies learned cannot be kept now", error=str(error))

    async def _keep(self) -> None:
        if self._scheduler.observed != self._kept:
            self._kept, self._kept_s = self._scheduler.observed, self._clock.monotonic_s()
            await self._shelf.keep(self._scheduler.learned())
