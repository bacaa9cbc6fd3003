"""What tenants keep, and how much they may: S3 objects and image records beyond it are refused.

A tenant is named by its access keys, and limited by the digest of its salt, as its chunks are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from quire.model.errors import MetadataUnavailable, QuotaExceeded
from quire.model.hashing import tenant_name
from quire.model.policy import TenantPolicy
from quire.telemetry import logger
from quire_server.redis.access import salt_of
from quire_server.redis.reservations import Reservation


class StoredObjects(Protocol):
    """See `quire_server.redis.Buckets`."""

    async def stored_bytes(self, tenant: str) -> int: ...
    async def everywhere(self) -> list[tuple[str, str]]: ...


class StoredImages(Protocol):
    """See `quire_server.redis.Images`."""

    async def stored_bytes(self, tenant: str) -> int: ...
    async def tenants(self) -> list[str]: ...


class SharedReservations(Protocol):
    """See `quire_server.redis.Reservations`."""

    async def add(self, tenant: str, reserved_bytes: int) -> Reservation: ...
    async def earlier_bytes(self, reservation: Reservation) -> int: ...
    async def end(self, reservation: Reservation) -> None: ...


class Quotas:
    """`policy`: what was set for a tenant, by its digest."""

    def __init__(
        self,
        *,
        policy: Callable[[str], TenantPolicy],
        objects: StoredObjects,
        images: StoredImages,
        reservations: SharedReservations,
        secrets: Sequence[bytes],
    ) -> None:
        self._policy = policy
        self._objects = objects
        self._images = images
        self._reservations = reservations
        self._secrets = secrets
        self._digests: dict[str, list[str]] = {}

    @contextlib.asynccontextmanager
    async def reserve(self, tenant: str, more_bytes: int) -> AsyncIterator[None]:
        """Reserve room while bytes are written, after those stored and those that any process reserved earlier.

        Raises:
            QuotaExceeded: The tenant's limit does not allow as many bytes.
            MetadataUnavailable: Redis does not answer.
        """
        limits = [self._policy(digest).stored_bytes_max for digest in self._digests_of(tenant)] if tenant else []
        limit = next(filter(None, limits), 0)
        if not limit:
            yield
            return
        adding = asyncio.ensure_future(self._reservations.add(tenant, more_bytes))
        try:
            reservation = await asyncio.shield(adding)
        except asyncio.CancelledError:
            await self._end(await adding)
            raise
        try:
            await self._check_room(reservation, more_bytes, limit)
            yield
        finally:
            await asyncio.shield(self._end(reservation))

    async def _check_room(self, reservation: Reservation, more_bytes: int, limit: int) -> None:
        """Raise `QuotaExceeded` if there is no room.

        A write that ends between the two readings counts twice, so both are read again until no write has ended.
        """
        earlier_bytes = reservation.earlier_bytes
        while True:
            stored_bytes = await self._kept(reservation.tenant)
            if stored_bytes + earlier_bytes + more_bytes <= limit:
                return
            writing_bytes = await self._reservations.earlier_bytes(reservation)
            if writing_bytes == earlier_bytes:
                raise QuotaExceeded(
                    f"{stored_bytes} bytes are stored and {writing_bytes} are being written, {limit} may be; "
                    f"{more_bytes} more were to come"
                )
            earlier_bytes = writing_bytes

    async def _end(self, reservation: Reservation) -> None:
        try:
            await self._reservations.end(reservation)
        except MetadataUnavailable as error:  # it ends by itself
            logger().warning("a tenant's reservation could not be ended", tenant=reservation.tenant, error=str(error))

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
