"""What tenants keep, and how much they may: S3 objects and image records beyond it are refused.

A tenant is named by its access keys, and limited by the digest of its salt, as its chunks are.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from quire.model.errors import QuotaExceeded
from quire.model.hashing import tenant_name
from quire.model.policy import TenantPolicy
from quire_server.redis.access import salt_of


class StoredObjects(Protocol):
    """See `quire_server.redis.Buckets`."""

    async def stored_bytes(self, tenant: str) -> int: ...
    async def everywhere(self) -> list[tuple[str, str]]: ...


class StoredImages(Protocol):
    """See `quire_server.redis.Images`."""

    async def stored_bytes(self, tenant: str) -> int: ...
    async def tenants(self) -> list[str]: ...


class Quotas:
    """`policy`: what was set for a tenant, by its digest."""

    def __init__(
        self,
        *,
        policy: Callable[[str], TenantPolicy],
        objects: StoredObjects,
        images: StoredImages,
        secrets: Sequence[bytes],
    ) -> None:
        self._policy = policy
        self._objects = objects
        self._images = images
        self._secrets = secrets
        self._digests: dict[str, list[str]] = {}
        self._reserved: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def reserve(self, tenant: str, more_bytes: int) -> AsyncIterator[None]:
        """Reserve room while bytes are written. Raises `QuotaExceeded`.

        Reservations of this process count. Those of other gateways do not until their bytes are stored.
        """
        limits = [self._policy(digest).stored_bytes_max for digest in self._digests_of(tenant)] if tenant else []
        limit = next(filter(None, limits), 0)
        if not limit:
            yield
            return
        ended_bytes = self._ended[tenant]
        stored_bytes = await self._kept(tenant)
        # Bytes whose reservation ended while this was read may be missing in it.
        written_bytes = self._reserved[tenant] + self._ended[tenant] - ended_bytes
        if stored_bytes + written_bytes + more_bytes > limit:
            raise QuotaExceeded(
                f"{stored_bytes} bytes are stored and {written_bytes} are being written, {limit} may be; "
                f"{more_bytes} more were to come"
            )
        self._reserved[tenant] += more_bytes
        try:
            yield
        finally:
            self._reserved[tenant] -= more_bytes
            self._ended[tenant] += more_bytes

    async def kept(self, digests: Iterable[str]) -> dict[str, int]:
        """Bytes of S3 objects and image records of tenants, by the digests of their salts."""
        wanted = dict.fromkeys(digests, 0)
        if wanted:
            places = await self._objects.everywhere()
            for name in {tenant for tenant, _ in places}.union(await self._images.tenants()) - {""}:
                for digest in self._digests_of(name):
                    if digest in wanted:
                        wanted[digest] += await self._kept(name)
        return wanted

    async def _kept(self, tenant: str) -> int:
        return await self._objects.stored_bytes(tenant) + await self._images.stored_bytes(tenant)

    def _digests_of(self, tenant: str) -> list[str]:
        """By each of the cluster's secrets."""
        if tenant not in self._digests:
            self._digests[tenant] = [tenant_name(salt_of(tenant, secret)) for secret in self._secrets]
        return self._digests[tenant]
