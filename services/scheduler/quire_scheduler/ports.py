"""Ports of the scheduler: the clock, a lease that one of several can hold, and a place for curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from quire_scheduler.core.curves import Learned
from quire_server.clock import Clock


class LeaderLease(Protocol):
    """Held by one at a time."""

    async def hold(self, name: str, ttl_ms: int) -> tuple[str, str]:
        """Take or keep it for `ttl_ms` unless another has it; who has it now, and who took it last before.

        Raises `MetadataUnavailable`.
        """

    async def release(self, name: str) -> None:
        """Give it up if it is held under that name."""


class CurveShelf(Protocol):
    """Store of learned curves, by kind of link, for the next leader. Both raise `MetadataUnavailable`."""

    async def keep(self, learned: Mapping[str, Sequence[Learned]]) -> None:
        """Replace the stored curves."""

    async def found(self) -> dict[str, list[Learned]]:
        """Return the stored curves; none, if they are too old or of another release."""


__all__ = ["Clock", "CurveShelf", "LeaderLease"]
