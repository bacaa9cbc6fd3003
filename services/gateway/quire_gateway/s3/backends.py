"""Backends by bucket name and caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

from quire.model.errors import QuireError
from quire.telemetry import logger
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3 import lifecycle
from quire_gateway.s3.access import RESERVED, S3Caller
from quire_gateway.s3.backend import Backend, ObjectBackend
from quire_gateway.s3.ports import Blobs, Buckets, S3Quotas
from quire_server.clock import Clock
from quire_server.redis.keys.access import SYSTEM_TENANT, AccessLevel

_SWEEP_MAX: Final = 500
_HOURLY_S: Final = 3600.0


class Backends:
    """Backends of all buckets. `reserved`: by name, the factory of a reserved bucket's backend for a tenant.

    `quotas`: None for no limits. `upload_s`: age in seconds at which an unfinished multipart upload is aborted; 0 for
    never.
    """

    def __init__(
        self,
        *,
        buckets: Buckets,
        blobs: Blobs,
        reserved: Mapping[str, Callable[[str], Backend]],
        clock: Clock,
        quotas: S3Quotas | None = None,
        upload_s: float = 0.0,
    ) -> None:
        self._upload_s = upload_s
        self._hourly_due_s = 0.0
        self.buckets = buckets
        self._blobs = blobs
        self.reserved = reserved
        self.clock = clock
        self._quotas = quotas

    def backend(self, caller: S3Caller, bucket: str, key: str, level: AccessLevel) -> Backend:
        """Return the backend of a bucket, for a key, or for a prefix of keys.

        Raises `S3Error` AccessDenied, NoSuchBucket.
        """
        if bucket in RESERVED:
            caller.check(SYSTEM_TENANT, bucket, key, level)
            reserved = self.reserved.get(bucket)
            if reserved is None:
                raise S3Error("NoSuchBucket", "The specified bucket does not exist")
            return reserved(caller.key.tenant)
        return self.object_backend(caller, bucket, key, level)

    def known(self, caller: S3Caller, bucket: str) -> Backend:
        """Return the backend of a bucket; the caller's rights in it are checked key by key."""
        if bucket in RESERVED and bucket in self.reserved:
            return self.reserved[bucket](caller.key.tenant)
        return self._backend(caller.tenant_of(bucket), bucket)

    def object_backend(self, caller: S3Caller, bucket: str, key: str, level: AccessLevel) -> ObjectBackend:
        """Return the backend of an ordinary bucket; whether it exists shows when it is used. Raises `S3Error`."""
        if bucket in RESERVED:
            raise S3Error("NotImplemented", f"{bucket} takes and gives whole objects only")
        tenant = caller.tenant_of(bucket)
        caller.check(tenant, bucket, key, level)
        return self._backend(tenant, bucket)

    def room(self, tenant: str, more_bytes: int) -> AbstractAsyncContextManager[None]:
        """Reserve room within a tenant's limit. Raises `QuotaExceeded`."""
        if self._quotas is None or not more_bytes:
            return contextlib.nullcontext()
        return self._quotas.reserve(tenant, more_bytes)

    async def sweep(self) -> int:
        """Remove blobs without references and return their number. An error at one bucket does not stop the others.

        Once an hour stale uploads are aborted, and the lifecycle rules of buckets are applied.
        """
        count, now_s = 0, self.clock.now_ms() / 1e3
        is_hour = now_s >= self._hourly_due_s
        if is_hour:
            self._hourly_due_s = now_s + _HOURLY_S
        for tenant, bucket in await self.buckets.everywhere():
            try:
                count += await self._sweep_one(tenant, bucket)
                if is_hour:
                    await self._expire(tenant, bucket, now_s)
            except (QuireError, S3Error) as error:
                logger().warning("a bucket could not be swept", tenant=tenant, bucket=bucket, error=str(error))
            except Exception as error:  # of one bucket; the others have theirs
                logger().error("a bucket could not be swept", tenant=tenant, bucket=bucket, exc_info=error)
        return count

    async def _expire(self, tenant: str, bucket: str, now_s: float) -> None:
        if self._upload_s > 0:
            await self._abort_stale(tenant, bucket, now_s - self._upload_s)
        document = (await self.buckets.settings(tenant, bucket)).get(lifecycle.SETTING)
        if document:
            rules, _ = lifecycle.read_lifecycle(document)
            count = await lifecycle.apply(self._backend(tenant, bucket), rules, now_s)
            logger().info("lifecycle rules were applied", tenant=tenant, bucket=bucket, expired=count)

    async def _abort_stale(self, tenant: str, bucket: str, before_s: float) -> None:
        """Abort uploads that were begun before a time, as S3's AbortIncompleteMultipartUpload does."""
        for upload_id in await self.buckets.stale_uploads(tenant, bucket, before_s):
            await self.buckets.abort(tenant, bucket, upload_id, self.clock.now_ms())

    async def _sweep_one(self, tenant: str, bucket: str) -> int:
        count = 0
        while names := await self.buckets.garbage(tenant, bucket, self.clock.now_ms(), _SWEEP_MAX):
            for name in names:
                await self._blobs.delete(name)
            await self.buckets.removed(tenant, bucket, names)
            count += len(names)
        await self.buckets.forget_place(tenant, bucket)
        return count

    def _backend(self, tenant: str, bucket: str) -> ObjectBackend:
        return ObjectBackend(
            tenant, bucket, buckets=self.buckets, blobs=self._blobs, clock=self.clock, quotas=self._quotas
        )
