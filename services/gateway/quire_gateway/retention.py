"""Prefixes that are kept by request: nothing evicts them before their time, whoever needs space.

A retention is a pin in the index, as a lease is, but one that neither a session's end nor its client's ends. A tenant
has one on a chunk at most: retaining again replaces its time.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.index import Match, Pin
from quire.model.keys import ChunkKeys
from quire_server.clock import Clock


class RetentionIndex(Protocol):
    """What retentions need of the index; see `quire_server.redis.PrefixIndex`."""

    async def match(self, keys: ChunkKeys, pin: Pin | None = None) -> Match: ...
    async def unpin_all(self, keys: ChunkKeys, lease_id: bytes) -> int: ...


class Retention:
    """Every method is one request. `longest_s`: for how long one may be asked for."""

    def __init__(self, index: RetentionIndex, clock: Clock, longest_s: int) -> None:
        self._index = index
        self._clock = clock
        self._longest_ms = longest_s * 1000

    async def retain(self, namespace: Namespace, keys: ChunkKeys, ttl_ms: int) -> tuple[int, int]:
        """Keep the longest indexed prefix; how many chunks, and until when (ms since the Unix epoch).

        Raises `InvalidRequest` for a time that is too long, and for keys that are no prefix.
        """
        if not 0 < ttl_ms <= self._longest_ms:
            raise InvalidRequest(f"{ttl_ms} ms, {self._longest_ms} at most", field="ttl_ms")
        now_ms = self._clock.now_ms()
        pin = Pin(lease_id=_name(namespace), expires_ms=now_ms + ttl_ms, ttl_ms=ttl_ms, now_ms=now_ms)
        match = await self._index.match(keys.distinct(), pin)
        return match.count, now_ms + ttl_ms

    async def end(self, namespace: Namespace, keys: ChunkKeys) -> int:
        """End the tenant's retentions on any of the keys; how many there were."""
        return await self._index.unpin_all(keys.distinct(), _name(namespace))


def _name(namespace: Namespace) -> bytes:
    """Of a tenant's retentions, 16 bytes: known to nobody who does not know its salt."""
    return hashlib.sha256(b"quire retention" + namespace.tenant_salt).digest()[:16]
