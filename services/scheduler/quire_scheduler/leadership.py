"""Election of the deciding scheduler. One holds a lease and renews it; when it falls silent, another takes it."""

from __future__ import annotations

import asyncio
import contextlib

from quire.model.errors import QuireError
from quire.telemetry import counter, logger, names
from quire_scheduler.errors import NotLeader
from quire_scheduler.ports import Clock, LeaderLease
from quire_server import tasks

_RENEWALS_PER_LEASE = 4
_PAUSES_PER_LEASE, _FORGOTTEN, _LONGER_MAX = 3, 0.98, 10
"""A lease's length in longest recent pauses; what is left of a pause after each renewal; a lease's greatest length, in
configured ones.
"""


class Leadership:
    """`lease` is None for a scheduler that is alone: it leads.

    One that was late, and finds that no other led in between, leads on in the same term.

    The time for which it leads is counted from before it asked, on its own clock: it stops before the lease ends. A
    lease has its configured length, or more if this process has paused lately: else each pause would cost the lead.
    """

    def __init__(self, name: str, lease: LeaderLease | None, ttl_ms: int, clock: Clock) -> None:
        self._name = name
        self._lease = lease
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._until_s = float("-inf")
        self._leader = ""
        self._task: asyncio.Task[None] | None = None
        self._paused_s = 0.0
        self._changes = counter(names.LEADER_CHANGES, "1", "times that this scheduler began to lead")
        self.term = 0
        self.since_s: float | None = None
        """Since when it leads; None for one that is alone, with no predecessor."""

    @property
    def leading(self) -> bool:
        return self._lease is None or self._clock.monotonic_s() < self._until_s

    def check(self) -> None:
        """Check that it leads. Raises `NotLeader`."""
        if not self.leading:
            raise NotLeader(f"{self._leader or 'none'} leads, not {self._name}")

    async def start(self) -> None:
        if self._lease is not None:
            await self._ask(self._lease)
            self._task = asyncio.create_task(self._keep_asking(self._lease))

    async def close(self) -> None:
        """Let another lead at once."""
        await tasks.end([self._task])
        self._until_s = float("-inf")
        if self._lease is not None:
            with contextlib.suppress(QuireError):
                await self._lease.release(self._name)

    @property
    def lease_ms(self) -> int:
        """Length of the lease to ask for, ms."""
        return min(_LONGER_MAX * self._ttl_ms, max(self._ttl_ms, round(1000 * _PAUSES_PER_LEASE * self._paused_s)))

    async def _keep_asking(self, lease: LeaderLease) -> None:
        while True:
            wait_s, began_s = self._ttl_ms / 1000 / _RENEWALS_PER_LEASE, self._clock.monotonic_s()
            await self._clock.sleep(wait_s)
            late_s = self._clock.monotonic_s() - began_s - wait_s
            self._paused_s = max(late_s, _FORGOTTEN * self._paused_s)
            await self._ask(lease)

    async def _ask(self, lease: LeaderLease) -> None:
        asked_s, lease_ms = self._clock.monotonic_s(), self.lease_ms
        try:
            async with asyncio.timeout(lease_ms / 1000):
                self._leader, previous = await lease.hold(self._name, lease_ms)
        except Exception as error:  # whatever it is: to stop asking would leave the cluster without a leader
            logger().warning("the leader is unknown", error=str(error) or type(error).__name__)
            return
        was_leading = self.leading
        if self._leader == self._name:
            self._until_s = asked_s + lease_ms / 1000
            if not was_leading and (previous != self._name or not self.term):
                self.term += 1
                self._changes.add(1)
                self.since_s = asked_s
                logger().info("leads", scheduler=self._name, term=self.term)
            elif not was_leading:
                logger().warning("was too slow to keep the lease, which no other took", scheduler=self._name)
