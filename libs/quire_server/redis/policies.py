"""Settings of operators: policies of namespaces and tenants, and the threshold Θ; and each tenant's namespaces."""

from __future__ import annotations

import asyncio
from typing import cast

import cbor2
import redis.asyncio as redis

from quire.model.policy import NamespacePolicy, TenantPolicy, Theta
from quire_server.redis.connection import metadata_errors

_KEY = "quire:policies"
_TENANTS_KEY = "quire:tenants"
_NAMESPACES_KEY = "quire:tenants:namespaces:"
_THETA_KEY = "quire:theta"
_OBJECT_THETA_KEY = "quire:theta:objects"


class StoredPolicies:
    """Set by operators, carried out by the services."""

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

    async def set_tenant(self, policy: TenantPolicy) -> None:
        """Replace a tenant's policy."""
        async with metadata_errors():
            record = cbor2.dumps([policy.weight, policy.cap_bytes_per_s, policy.stored_bytes_max])
            await self._client.hset(_TENANTS_KEY, policy.tenant, record)

    async def tenants(self) -> dict[str, TenantPolicy]:
        """Return the policies, by tenant."""
        async with metadata_errors():
            entries = cast(dict[bytes, bytes], await self._client.hgetall(_TENANTS_KEY))
        return {name.decode(): TenantPolicy(name.decode(), *cbor2.loads(raw)) for name, raw in entries.items()}

    async def add_namespace(self, tenant: str, namespace: bytes) -> None:
        """A tenant stores in a namespace, named by its tag."""
        async with metadata_errors():
            await self._client.sadd(_NAMESPACES_KEY + tenant, namespace)

    async def namespaces_of(self, tenant: str) -> frozenset[bytes]:
        """Tags of the namespaces that a tenant has stored in."""
        async with metadata_errors():
            return frozenset(cast(set[bytes], await self._client.smembers(_NAMESPACES_KEY + tenant)))

    async def set_theta(self, theta_bytes: int, *, object_tier: bool) -> None:
        """Set one of the thresholds Θ of every storage node; 0 gives it back to their own settings."""
        async with metadata_errors():
            await self._client.set(_OBJECT_THETA_KEY if object_tier else _THETA_KEY, theta_bytes)

    async def theta(self) -> Theta:
        """Return the thresholds Θ that operators set for every node."""
        async with metadata_errors():
            of_nodes, of_objects = await asyncio.gather(
                self._client.get(_THETA_KEY), self._client.get(_OBJECT_THETA_KEY)
            )
            return Theta(int(cast(bytes | None, of_nodes) or 0), int(cast(bytes | None, of_objects) or 0))
