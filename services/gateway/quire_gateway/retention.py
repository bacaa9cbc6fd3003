"""Prefixes that are not evicted before a time that a client has set.

A retention is a pin in the index, as a lease is. The end of a session does not end it. A tenant has at most one on a
chunk: retaining the same prefix again replaces the time. One of a longer prefix is another retention.

Retained chunks are not evicted when a tenant exceeds its limit of stored bytes, so they may not exceed it either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

from quire.model.errors import InvalidRequest, QuotaExceeded
from quire.model.hashing import Namespace
from quire.model.index import Match, Pin
from quire.model.keys import ChunkKeys
from quire.model.policy import TenantPolicy
from quire_server.clock import Clock


class RetentionIndex(Protocol):
    """What retentions need of the index; see `quire_server.redis.PrefixIndex`."""

    async def match(self, keys: ChunkKeys, pin: Pin | None = None) -> Match: ...
    async def unpin_all(self, keys: ChunkKeys, lease_id: bytes) -> int: ...


class Retained(Protocol):
    """The bytes that tenants retain; see `quire_server.redis.RetainedBytes`."""

    async def reserve(
        self, tenant: str, keys: Sequence[bytes], retained_bytes: int, until_ms: int, now_ms: int, limit: int
    ) -> int: ...
    async def end(self, tenant: str, keys: Sequence[bytes]) -> None: ...


class Retention:
    """Every method is one request."""

    def __init__(
        self,
        index: RetentionIndex,
        clock: Clock,
        longest_s: int,
        *,
        policy: Callable[[str], TenantPolicy] = TenantPolicy,
        retained: Retained | None = None,
    ) -> None:
        """Set up without state.

        Args:
            index: The prefix index.
            clock: The cluster's.
            longest_s: The longest time of a retention, seconds.
            policy: Returns the policy of a tenant.
            retained: Counts retained bytes; None for tenants without limits.
        """
        self._policy = policy
        self._retained = retained
        self._index = index
        self._clock = clock
        self._longest_ms = longest_s * 1000

    async def retain(self, namespace: Namespace, keys: ChunkKeys, ttl_ms: int) -> tuple[int, int]:
        """Keep the longest indexed prefix; how many chunks of it can be read, and until when (ms since the Unix epoch).

        Raises `InvalidRequest` for a time that is too long, and for keys that are no prefix; `QuotaExceeded` if the
        tenant would retain more than it may store.
        """
        if not 0 < ttl_ms <= self._longest_ms:
            raise InvalidRequest(f"{ttl_ms} ms, {self._longest_ms} at most", field="ttl_ms")
        now_ms = await self._clock.known_ms()
        await self._reserve(namespace, keys.distinct(), now_ms + ttl_ms, now_ms)
        pin = Pin(lease_id=_name(namespace), expires_ms=now_ms + ttl_ms, ttl_ms=ttl_ms, now_ms=now_ms)
        match = await self._index.match(keys.distinct(), pin)
        held = takewhile(lambda run: run.nodes, match.runs)
        return sum(run.count for run in held), now_ms + ttl_ms

    async def end(self, namespace: Namespace, keys: ChunkKeys) -> int:
        """End the tenant's retentions on any of the keys; how many there were."""
        ended = await self._index.unpin_all(keys.distinct(), _name(namespace))
        if self._retained is not None and self._policy(namespace.tenant).stored_bytes_max:
            await self._retained.end(namespace.tenant, list(keys))
        return ended

    async def _reserve(self, namespace: Namespace, keys: ChunkKeys, until_ms: int, now_ms: int) -> None:
        """Count the indexed part of a prefix against the tenant's limit. Raises `QuotaExceeded`."""
        limit = self._policy(namespace.tenant).stored_bytes_max if namespace.tenant else 0
        if not limit or self._retained is None:
            return
        chunks = (await self._index.match(keys)).count
        if not chunks:
            return
        prefix, size = list(keys.run(0, chunks)), chunks * namespace.layout.chunk_bytes
        retained = await self._retained.reserve(namespace.tenant, prefix, size, until_ms, now_ms, limit)
        if retained < 0:
            raise QuotaExceeded(f"{-retained} bytes would be retained, {limit} may be stored", field="ttl_ms")


def _name(namespace: Namespace) -> bytes:
    """The name of a tenant's pins, 16 bytes. It cannot be guessed without the tenant's salt."""
    return hashlib.sha256(b"quire retention" + namespace.tenant_salt).digest()[:16]
