"""Policies of namespaces: one hash in Redis."""

from __future__ import annotations

from typing import cast

import cbor2
import redis.asyncio as redis

from quire.metadata.connection import metadata_errors
from quire.policy import NamespacePolicy

_KEY = "quire:policies"


class Policies:
    """Set by operators, read by storage nodes."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    async def set(self, policy: NamespacePolicy) -> None:
        """Replace the namespace's policy; one without limits is forgotten."""
        async with metadata_errors():
            if policy.ttl_s or policy.quota_bytes:
                await self._client.hset(_KEY, policy.namespace, cbor2.dumps([policy.ttl_s, policy.quota_bytes]))
            else:
                await self._client.hdel(_KEY, policy.namespace)

    async def all(self) -> list[NamespacePolicy]:
        async with metadata_errors():
            entries = cast(dict[bytes, bytes], await self._client.hgetall(_KEY))
        return [NamespacePolicy(name, *cbor2.loads(raw)) for name, raw in sorted(entries.items())]
