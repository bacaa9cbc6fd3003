"""Quotas of tenants: S3 objects and image records beyond them are refused.

A tenant is named by its access keys, and limited by the digest of its salt, as its chunks are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from quire.model.errors import MetadataUnavailable, QuotaExceeded
from quire.model.hashing import tenant_name
from quire.model.policy import TenantPolicy
from quire.telemetry import logger
from quire_server.redis.keys.access import salt_of
from quire_server.redis.reservations import RESERVATION_MS, Reservation


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
    async def renew(self, reservation: Reservation) -> None: ...
    async def end(self, reservation: Reservation) -> None: ...


class Quotas:
    """`policy`: returns the policy of a tenant, by its digest."""

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
        self._ending: set[asyncio.Task[None]] = set()

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
            self._spawn(self._abandon(adding))
            raise
        renewing = asyncio.create_task(self._keep_renewed(reservation))
        try:
            await self._check_room(reservation, more_bytes, limit)
            yield
        finally:
            renewing.cancel()
            await asyncio.shield(self._spawn(self._end(reservation)))

    async def _check_room(self, reservation: Reservation, more_bytes: int, limit: int) -> None:
        """Raise `QuotaExceeded` if there is no room.

        A write that ends between the two readings counts twice, so both are read again until no write has ended.
        Between its commit and its end, a round trip to Redis, a write counts twice all the same.
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

    async def _keep_renewed(self, reservation: Reservation) -> None:
        while True:
            await asyncio.sleep(RESERVATION_MS / 3000)
            try:
                await self._reservations.renew(reservation)
            except MetadataUnavailable as error:  # the next renewal restores it
                logger().warning("could not renew a tenant's reservation", tenant=reservation.tenant, error=str(error))

    async def _abandon(self, adding: asyncio.Future[Reservation]) -> None:
        """End a reservation whose request has ended while it was being added."""
        with contextlib.suppress(MetadataUnavailable):
            await self._end(await adding)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _end(self, reservation: Reservation) -> None:
        try:
            await self._reservations.end(reservation)
        except MetadataUnavailable as error:  # it ends by itself
            logger().warning("could not end a tenant's reservation", tenant=reservation.tenant, error=str(error))

    async def kept(self, digests: Iterable[str]) -> dict[str, int]:
        """Bytes of S3 objects and image records of tenants, by the digests of their salts."""
        totals = dict.fromkeys(digests, 0)
        if totals:
            places = await self._objects.everywhere()
            for name in {tenant for tenant, _ in places}.union(await self._images.tenants()) - {""}:
                for digest in self._digests_of(name):
                    if digest in totals:
                        totals[digest] += await self._kept(name)
        return totals

    async def _kept(self, tenant: str) -> int:
        return await self._objects.stored_bytes(tenant) + await self._images.stored_bytes(tenant)

    def _digests_of(self, tenant: str) -> list[str]:
        """Return the digests by each of the cluster's secrets."""
        if tenant not in self._digests:
            self._digests[tenant] = [tenant_name(salt_of(tenant, secret)) for secret in self._secrets]
        return self._digests[tenant]
