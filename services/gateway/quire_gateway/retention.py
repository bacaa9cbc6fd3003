"""Prefixes that are not evicted before a time that a client has set.

A retention is a pin in the index, as a lease is. The end of a session does not end it. A tenant has at most one on a
chunk: retaining the same prefix again replaces the time. One of a longer prefix is another retention.
"""

from __future__ import annotations

import hashlib
from itertools import takewhile
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
        """Keep the longest indexed prefix; how many chunks of it can be read, and until when (ms since the Unix epoch).

        Raises `InvalidRequest` for a time that is too long, and for keys that are no prefix.
        """
        if not 0 < ttl_ms <= self._longest_ms:
            raise InvalidRequest(f"{ttl_ms} ms, {self._longest_ms} at most", field="ttl_ms")
        now_ms = await self._clock.known_ms()
        pin = Pin(lease_id=_name(namespace), expires_ms=now_ms + ttl_ms, ttl_ms=ttl_ms, now_ms=now_ms)
        match = await self._index.match(keys.distinct(), pin)
        held = takewhile(lambda run: run.nodes, match.runs)
        return sum(run.count for run in held), now_ms + ttl_ms

    async def end(self, namespace: Namespace, keys: ChunkKeys) -> int:
        """End the tenant's retentions on any of the keys; how many there were."""
        return await self._index.unpin_all(keys.distinct(), _name(namespace))


def _name(namespace: Namespace) -> bytes:
    """The name of a tenant's pins, 16 bytes. It cannot be guessed without the tenant's salt."""
    return hashlib.sha256(b"quire retention" + namespace.tenant_salt).digest()[:16]
