"""Buckets that anyone may read: `GET /TENANT:BUCKET/KEY` without a signature.

Bucket names belong to tenants, so that a name alone does not say whose bucket is meant; the one with a tenant does. A
bucket is public if its owner has set its canned ACL to `public-read`, and the operator allows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.s3_operations import Operation
from quire_gateway.core.sigv4 import UNSIGNED, read_claim
from quire_gateway.s3.access import RESERVED, S3Caller
from quire_gateway.s3.call import PUBLIC_READ, Call
from quire_gateway.s3.ports import Buckets
from quire_server.redis.keys.access import AccessKey

SETTING: Final = "acl"
ANYONE: Final = "anyone"
"""The key that requests without a signature have in the audit log, once they have been let in."""
_OPERATIONS: Final = frozenset(
    {"GetObject", "HeadObject", "HeadBucket", "GetBucketLocation", "ListObjects", "ListObjectsV2"}
)


class PublicBuckets:
    """Finds the caller of requests without a signature. `allowed`: the operator allows public buckets."""

    def __init__(self, buckets: Buckets, allowed: bool) -> None:
        self._buckets = buckets
        self._allowed = allowed

    async def is_public(self, tenant: str, bucket: str) -> bool:
        """Whether anyone may read a bucket; False too for one that is not there."""
        if not self._allowed or bucket in RESERVED:
            return False
        return await self._buckets.setting(tenant, bucket, SETTING) == PUBLIC_READ.encode()

    async def caller(self, call: Call) -> S3Caller | None:
        """Return the caller of a request that names a tenant; None for a request that does not.

        Such a caller finds the owner's buckets, and reads only. Its requests are not the owner's: see `payer`.

        Raises:
            S3Error: AccessDenied for a bucket that is not public, or not there, which the answer does not tell apart;
                InvalidRequest for a signed request.
        """
        if not call.tenant:
            return None
        if read_claim(call.signed) is not None:
            raise S3Error("InvalidRequest", "TENANT:BUCKET is for requests without a signature; sign for BUCKET")
        if not await self.is_public(call.tenant, call.bucket):
            raise S3Error("AccessDenied", "Access Denied")
        return S3Caller(AccessKey(ANYONE, call.tenant, read_only=True), None, UNSIGNED)

    @staticmethod
    def payer(key: AccessKey) -> AccessKey:
        """Return the key by whose tenant requests are counted: strangers use up no limit of the owner.

        No tenant's name has a slash.
        """
        return replace(key, tenant=f"{ANYONE}/{key.tenant}") if key.name == ANYONE else key

    @staticmethod
    def check(call: Call, operation: Operation, by_rdma: bool) -> None:
        """Check that a stranger only reads.

        Raises:
            S3Error: AccessDenied for anything but to read and list current objects; InvalidRequest for headers that the
                link chooses.
        """
        if not call.tenant:
            return
        if operation.name not in _OPERATIONS or by_rdma or "versionId" in call.query:
            raise S3Error("AccessDenied", "Access Denied")
        if any(name.startswith("response-") for name in call.query):
            raise S3Error("InvalidRequest", "Request specific response headers cannot be used without a signature")
