"""Two tenants of a cluster with tokens: Alice, and Mallory, who tries to reach Alice's data."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from quire.client import AsyncClient, ImageClient
from quire.model.hashing import Namespace
from quire.transport import OFF, data_plane
from quire_server.redis import AccessKeys, connect
from quire_server.redis.keys.access import AccessGrant, AccessLevel
from quire_tools.local import LocalCluster
from tests.e2e.helpers import LAYOUT

TOKENS = {"QUIRE_GATEWAY_AUTH": "tokens"}


@dataclass(frozen=True)
class Tenant:
    client: AsyncClient
    images: ImageClient
    namespace: Namespace
    """One with the tenant's salt."""
    s3_key: tuple[str, str]


@contextlib.asynccontextmanager
async def two_tenants(
    cluster: LocalCluster, *, adapters: tuple[str, ...] = (), shared_memory: bool = True
) -> AsyncIterator[tuple[Tenant, Tenant]]:
    """Alice and Mallory, whose keys allow RDMA, and chunks of their own namespace with `adapters` as S3 objects."""
    async with contextlib.AsyncExitStack() as stack:
        redis = connect(cluster.redis_url)
        stack.push_async_callback(redis.aclose)
        keys = AccessKeys(redis, cluster.secret.encode())

        async def tenant(name: str) -> Tenant:
            namespace = Namespace("m", "1", LAYOUT, keys.salt(name))
            tags = [replace(namespace, adapter=adapter).tag for adapter in adapters]
            grants = tuple(AccessGrant("quire", "quire-kv", f"{tag.hex()}/", AccessLevel.ADMIN) for tag in tags)
            key = await keys.create(name, grants, rdma=True)
            secret = keys.secret(key)
            transport = None if shared_memory else data_plane(OFF)
            client = AsyncClient(cluster.gateway_address, token=f"{key.name}:{secret}", transport=transport)
            await stack.enter_async_context(client)
            return Tenant(client, ImageClient(client), namespace, (key.name, secret))

        yield await tenant("alice"), await tenant("mallory")
