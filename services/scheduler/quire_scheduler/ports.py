"""What the scheduler needs from outside: the clock, and a lease that one of several schedulers can hold."""

from __future__ import annotations

from typing import Protocol

from quire_server.clock import Clock


class LeaderLease(Protocol):
    """Held by one at a time."""

    async def hold(self, name: str, ttl_ms: int) -> tuple[str, str]:
        """Take or keep it for `ttl_ms` unless another has it; who has it now, and who took it last before.

        Raises `MetadataUnavailable`.
        """

    async def release(self, name: str) -> None:
        """Give it up if it is held under that name."""


__all__ = ["Clock", "LeaderLease"]
