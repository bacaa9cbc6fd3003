"""The caller of a request, and its rights: signature, tenant, grants."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import Final

from quire_gateway.access.keyring import KeyRing
from quire_gateway.core.aws_chunked import Signing
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.sigv4 import Request, read_claim, verify
from quire_server.clock import Clock
from quire_server.redis.keys.access import CHUNKS_BUCKET, SYSTEM_TENANT, AccessKey, AccessLevel

LATENTS_BUCKET: Final = "quire-latents"
RESERVED: Final = (CHUNKS_BUCKET, LATENTS_BUCKET)
_NOBODY: Final = secrets.token_hex(20)


@dataclass(frozen=True, slots=True)
class S3Caller:
    """Signer of a request, with the key; without `signing`, anyone who reads a public bucket (`public`)."""

    key: AccessKey
    signing: Signing | None
    payload_hash: str

    def tenant_of(self, bucket: str) -> str:
        """The tenant whose bucket the name means for this caller: its own, unless one was granted.

        Other tenants' buckets are not looked at, so that neither an answer nor its time reveals them.
        """
        return tenant_of(self.key, bucket)

    def check(self, tenant: str, bucket: str, key: str, level: AccessLevel) -> None:
        """Check a right. Raises `S3Error` AccessDenied. `key`: of an object, or the prefix of a listing."""
        if level is not AccessLevel.READ and self.key.read_only:
            raise S3Error("AccessDenied", "Access Denied")
        if tenant == self.key.tenant:
            return
        for grant in self.key.grants:
            is_granted = (grant.tenant, grant.bucket) == (tenant, bucket) and key.startswith(grant.prefix)
            if is_granted and grant.level >= level and grant.scoped:
                return
        raise S3Error("AccessDenied", "Access Denied")


def tenant_of(key: AccessKey, bucket: str) -> str:
    """Return the tenant whose bucket the name means for the owner of a key."""
    granted = [grant.tenant for grant in key.grants if grant.bucket == bucket]
    if bucket in RESERVED:
        return SYSTEM_TENANT
    return granted[0] if granted else key.tenant


class Authenticator:
    """Finds the caller of a request."""

    def __init__(self, keys: KeyRing, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock

    async def claimed_key(self, request: Request) -> AccessKey | None:
        """Return the key that a signed URL names, whether or not it was signed with it; None without one."""
        claim = read_claim(request)
        return await self._keys.get(claim.access_key) if claim is not None else None

    async def caller(self, request: Request) -> S3Caller:
        """Return the caller. Raises `S3Error`. An unknown key takes as long as a known one."""
        claim = read_claim(request)
        if claim is None:
            raise S3Error("AccessDenied", "Access Denied")
        key = await self._keys.get(claim.access_key)
        *older, last = reversed(self._keys.secrets(key)) if key is not None else [_NOBODY]
        signing_key = None
        for secret in older:  # one that is about to be replaced, or replaces the other
            with contextlib.suppress(S3Error):
                signing_key = verify(request, claim, secret, self._clock.now_ms() / 1e3)
        try:
            signing_key = signing_key or verify(request, claim, last, self._clock.now_ms() / 1e3)
        except S3Error as error:
            if key is None and error.code == "SignatureDoesNotMatch":
                raise S3Error("InvalidAccessKeyId", "The AWS access key Id you provided does not exist") from None
            raise
        if key is None:
            raise S3Error("InvalidAccessKeyId", "The AWS access key Id you provided does not exist")
        return S3Caller(key, Signing(signing_key, claim), claim.payload_hash)
