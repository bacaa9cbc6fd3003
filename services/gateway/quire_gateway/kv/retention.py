"""Prefixes that are not evicted before a time that a client has set.

A retention is a pin in the index, as a lease is. The end of a session does not end it. It belongs to a holder of the
tenant, for example a conversation: a prefix is kept until the last holder's retention ends. A holder has at most one on
a chunk: retaining the same prefix again extends the time. One of a longer prefix is another retention.

Retained chunks are not evicted when a tenant exceeds its limit of stored bytes, so they may not exceed it either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Protocol

from quire.model.errors import InvalidRequest, QuotaExceeded
from quire.model.hashing import Namespace
from quire.model.index import Match, Pin
from quire.model.keys import ChunkKeys
from quire.model.policy import TenantPolicy
from quire_server.clock import Clock, end_ms
from quire_server.redis.retained import RetainedPrefix

HOLDER_BYTES_MAX: Final = 256
_NAME_BYTES: Final = 16
_UNLIMITED: Final = 1 << 50


class RetentionIndex(Protocol):
    """Port of retentions to the index; see `quire_server.redis.PrefixIndex`."""

    async def match(self, keys: ChunkKeys, pin: Pin | None = None) -> Match: ...
    async def unpin(self, bucket: bytes, key: bytes, lease_id: bytes) -> bool: ...
    async def unpin_all(self, keys: ChunkKeys, lease_id: bytes) -> int: ...


class Retained(Protocol):
    """The retentions of tenants with limits; see `quire_server.redis.RetainedBytes`."""

    async def reserve(self, prefix: RetainedPrefix, now_ms: int, limit: int) -> tuple[int, dict[bytes, bytes]]: ...
    async def known(self, tenant: str, keys: Sequence[bytes], holder: bytes = b"") -> dict[bytes, bytes]: ...
    async def forget(self, tenant: str, retentions: Mapping[bytes, bytes], holder: bytes = b"") -> None: ...


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

    async def retain(self, namespace: Namespace, keys: ChunkKeys, ttl_ms: int, holder: str = "") -> tuple[int, int]:
        """Keep the longest indexed prefix for a holder.

        Args:
            namespace: Of the prefix.
            keys: Of the prefix.
            ttl_ms: For how long; a retention of this holder that ends later is not shortened.
            holder: Name of the holder; empty for the tenant itself.

        Returns:
            How many chunks of it can be read, and until when at least it is kept (ms since the Unix epoch).

        Raises:
            InvalidRequest: The time or the holder's name is too long, or the keys are unchained.
            QuotaExceeded: The tenant would retain more than it may store, or has too many retentions.
        """
        name = _Holder.of(namespace, holder)
        if not 0 < ttl_ms <= self._longest_ms:
            raise InvalidRequest(f"{ttl_ms} ms, {self._longest_ms} at most", field="ttl_ms")
        now_ms = await self._clock.known_ms()
        until_ms, keys = end_ms(now_ms, ttl_ms), keys.distinct()
        limit = self._limit(namespace, name)
        if limit:
            chunks = (await self._index.match(keys)).count
            if not chunks:
                return 0, until_ms
            keys = keys.run(0, chunks)  # what is stored from now on is not counted, and so not pinned
        inner = dict[bytes, bytes]()
        if limit:
            prefix = RetainedPrefix(
                tenant=namespace.tenant,
                holder=name.counted,
                keys=list(keys),
                size=len(keys) * namespace.layout.chunk_bytes,
                until_ms=until_ms,
            )
            inner = await self._reserve(prefix, now_ms, limit)
        pin = Pin(lease_id=name.pin, expires_ms=until_ms, ttl_ms=ttl_ms, now_ms=now_ms)
        match = await self._index.match(keys, pin)
        shorter = set(keys.run(0, max(0, match.count - 1)))  # the last one may be pinned by this very call
        await self._release(namespace, keys, {tip: about for tip, about in inner.items() if tip in shorter}, name)
        stored_runs = takewhile(lambda run: run.nodes, match.runs)
        return sum(run.count for run in stored_runs), until_ms

    async def end(self, namespace: Namespace, keys: ChunkKeys, holder: str = "") -> int:
        """End a holder's retentions on any of the keys; how many there were. Raises `InvalidRequest`."""
        name, counted = _Holder.of(namespace, holder), 0
        if self._limit(namespace, name):
            assert self._retained is not None, "the tenant has a limit"
            retentions = await self._retained.known(namespace.tenant, list(keys.distinct()), name.counted)
            counted = await self._release(namespace, keys, retentions, name)
        return counted + await self._index.unpin_all(keys.distinct(), name.pin)

    def _limit(self, namespace: Namespace, holder: _Holder) -> int:
        """Return the bytes that the tenant may retain; 0 where they are not counted.

        Retentions of named holders are always counted: their number is bounded.
        """
        if self._retained is None:
            return 0
        limit = self._policy(namespace.tenant).stored_bytes_max if namespace.tenant else 0
        return limit or (_UNLIMITED if holder.counted else 0)

    async def _reserve(self, prefix: RetainedPrefix, now_ms: int, limit: int) -> dict[bytes, bytes]:
        """Count a prefix against the limit; the retentions that it replaces. Raises `QuotaExceeded`."""
        assert self._retained is not None, "the tenant has a limit"
        retained, inner = await self._retained.reserve(prefix, now_ms, limit)
        if retained < 0:
            raise QuotaExceeded("too many retentions, or holders of this prefix", field="holder")
        if retained > limit:
            raise QuotaExceeded(f"{retained} bytes would be retained, {limit} may be stored", field="ttl_ms")
        return inner

    async def _release(
        self, namespace: Namespace, keys: ChunkKeys, retentions: Mapping[bytes, bytes], holder: _Holder
    ) -> int:
        """Unpin retentions that end within a prefix, and count those no more that were pinned and are unchanged."""
        if not retentions or self._retained is None:
            return 0
        places = {key: index for index, key in enumerate(keys)}
        released = {
            tip: about
            for tip, about in retentions.items()
            if await self._index.unpin(keys.bucket_of(places[tip]), tip, holder.pin)
        }
        await self._retained.forget(namespace.tenant, released, holder.counted)
        return len(released)


@dataclass(frozen=True, slots=True)
class _Holder:
    """A holder's names.

    Attributes:
        pin: Of its pins, 16 bytes. It cannot be guessed without the tenant's salt.
        counted: Among the tenant's retentions; empty for the tenant itself.
    """

    pin: bytes
    counted: bytes

    @classmethod
    def of(cls, namespace: Namespace, holder: str) -> _Holder:
        """Return the names of a holder. Raises `InvalidRequest` if its own is too long."""
        if len(holder.encode()) > HOLDER_BYTES_MAX:
            raise InvalidRequest(f"longer than {HOLDER_BYTES_MAX} bytes", field="holder")
        name = hashlib.sha256(b"quire retention" + namespace.tenant_salt).digest()
        if not holder:
            return cls(name[:_NAME_BYTES], b"")
        pin = hashlib.sha256(name + holder.encode()).digest()[:_NAME_BYTES]
        return cls(pin, pin)
