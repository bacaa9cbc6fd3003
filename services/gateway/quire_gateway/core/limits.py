"""Limits of each tenant at one gateway, at a time. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from quire_gateway.errors import TenantExhausted

_RETRY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """0 for none. `bytes`: payloads on their way; `memory`: of clients, named to storage nodes by running requests."""

    requests: int = 0
    bytes: int = 0
    memory: int = 0


@dataclass(slots=True)
class _Has:
    requests: int = 0
    bytes: int = 0
    memory: int = 0


@dataclass(slots=True)
class Taken:
    """Share of one request in its tenant's limits."""

    has: _Has = field(default_factory=_Has)
    limits: Limits = Limits()
    bytes: int = 0

    def take(self, payload: int) -> None:
        """Count more bytes that will be on their way.

        Raises `TenantExhausted`. A single request may exceed the limit.
        """
        by_others = self.has.bytes - self.bytes
        if payload and self.limits.bytes and by_others and self.has.bytes + payload > self.limits.bytes:
            raise TenantExhausted(f"{self.has.bytes} bytes of this tenant are on their way", retry_after_s=_RETRY_S)
        self.bytes += payload
        self.has.bytes += payload


@dataclass(slots=True)
class TenantLimits:
    """Counts requests while they run."""

    limits: Limits
    _has: dict[str, _Has] = field(default_factory=dict)

    @property
    def stats(self) -> dict[str, float]:
        """Counts by tenant; tenants without a request are not listed."""
        stats: dict[str, float] = {}
        for tenant, has in self._has.items():
            stats[f"tenant.{tenant or 'none'}.requests"] = has.requests
            stats[f"tenant.{tenant or 'none'}.bytes"] = has.bytes
        return stats

    @contextlib.contextmanager
    def admitted(self, tenant: str, payload: int = 0, memory: int = 0) -> Iterator[Taken]:
        """Count one request.

        Raises `TenantExhausted`. A payload above the limit is admitted alone; requests without one are not held up by
        it.
        """
        has = self._has.setdefault(tenant, _Has())
        limits = self.limits
        taken = Taken(has, limits)
        try:
            if limits.requests and has.requests >= limits.requests:
                raise TenantExhausted(f"{has.requests} requests of this tenant are running", retry_after_s=_RETRY_S)
            if memory and limits.memory and has.memory and has.memory + memory > limits.memory:
                raise TenantExhausted(f"{has.memory} bytes of this tenant's memory are in use", retry_after_s=_RETRY_S)
            taken.take(payload)
        except TenantExhausted:
            self._forget(tenant)
            raise
        has.requests += 1
        has.memory += memory
        try:
            yield taken
        finally:
            has.requests -= 1
            has.bytes -= taken.bytes
            has.memory -= memory
            self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        if not self._has[tenant].requests:
            del self._has[tenant]
