"""Access keys for the frontends: their tenants and rights.

The secret of a key is not kept anywhere: it follows from the cluster's secret, the key's name and its generation. The
part of a key in Redis is not enough to sign with.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, cast

import cbor2
import redis.asyncio as redis

from quire.model.errors import InvalidRequest
from quire_server.redis.connection import metadata_errors

SYSTEM_TENANT: Final = "quire"
"""Owns the buckets of chunks and latents."""

CHUNKS_BUCKET: Final = "quire-kv"
_SCOPED: Final = re.compile("[0-9a-f]{32}/")
_KEY: Final = "quire:s3:access"
_SECRET_CHARS: Final = 40


class AccessLevel(IntEnum):
    """Level of access; each includes the ones below it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class AccessGrant:
    """Right of a key on the objects of a tenant's bucket whose keys begin with `prefix`."""

    tenant: str
    bucket: str
    prefix: str
    level: AccessLevel

    @property
    def scoped(self) -> bool:
        """Whether the prefix names one namespace (`NAMESPACE/…`), if the grant is on `quire/quire-kv`."""
        return (self.tenant, self.bucket) != (SYSTEM_TENANT, CHUNKS_BUCKET) or bool(_SCOPED.match(self.prefix))

    def check(self) -> None:
        """Refuse grants on all of `quire/quire-kv`.

        Raises:
            InvalidRequest: The prefix names no namespace.
        """
        if not self.scoped:
            why = f"{self.prefix!r} names no namespace: {SYSTEM_TENANT}/{CHUNKS_BUCKET}/NAMESPACE/, its 32 digits"
            raise InvalidRequest(f"{why} as `quire keys namespace` prints them", field="grant")


@dataclass(frozen=True, slots=True)
class AccessKey:
    """A tenant's key. It may do everything with its tenant's own buckets, and use its grants on those of others.

    `rdma`: it may name memory that bytes go to or come from; see docs/operations/security.md.
    """

    name: str
    tenant: str
    grants: tuple[AccessGrant, ...] = ()
    generation: int = 1
    read_only: bool = False
    rdma: bool = False
    expires_ms: int = 0

    def expired(self, now_ms: int) -> bool:
        """Whether the key is no longer valid at a time (milliseconds since the Unix epoch)."""
        return bool(self.expires_ms) and now_ms >= self.expires_ms


class AccessKeys:
    """Made by operators, who know the cluster's secret; read by gateways.

    `secrets`: the cluster's, the first of which makes keys' secrets and tenants' salts. Those that another one makes
    are believed, too, while it is there.
    """

    def __init__(self, client: redis.Redis, *secrets: bytes) -> None:
        self._client = client
        self._secrets = secrets

    async def create(
        self,
        tenant: str,
        grants: tuple[AccessGrant, ...] = (),
        *,
        read_only: bool = False,
        rdma: bool = False,
        expires_ms: int = 0,
    ) -> AccessKey:
        """Make and store a key. `expires_ms`: milliseconds since the Unix epoch; 0 for a key without an end.

        Raises:
            InvalidRequest: The tenant's name or a grant is not valid.
        """
        if not tenant or "/" in tenant or not tenant.isprintable():
            raise InvalidRequest(f"{tenant!r} is empty, or has a slash", field="tenant")
        if tenant == SYSTEM_TENANT:
            raise InvalidRequest(f"{tenant!r} is Quire's own name; grant single buckets of it instead", field="tenant")
        for grant in grants:
            grant.check()
        name = "QK" + base64.b32encode(secrets.token_bytes(11)).decode().rstrip("=")
        key = AccessKey(name, tenant, grants, read_only=read_only, rdma=rdma, expires_ms=expires_ms)
        await self._write(key)
        return key

    async def rotate(self, name: str) -> AccessKey | None:
        """Give the key another secret; the previous one ends."""
        key = await self.get(name)
        if key is None:
            return None
        key = replace(key, generation=key.generation + 1)
        await self._write(key)
        return key

    async def grant(self, name: str, grant: AccessGrant) -> AccessKey | None:
        """Add a grant, in the place of one for the same bucket and prefix. Raises `InvalidRequest`."""
        grant.check()
        key = await self.get(name)
        if key is None:
            return None
        same = (grant.tenant, grant.bucket, grant.prefix)
        remaining = [old for old in key.grants if (old.tenant, old.bucket, old.prefix) != same]
        key = replace(key, grants=(*remaining, grant))
        await self._write(key)
        return key

    async def delete(self, name: str) -> bool:
        async with metadata_errors():
            return bool(await self._client.hdel(_KEY, name))

    async def get(self, name: str) -> AccessKey | None:
        async with metadata_errors():
            raw = cast(bytes | None, await self._client.hget(_KEY, name))
        return _unpack(name, raw) if raw else None

    async def all(self) -> list[AccessKey]:
        async with metadata_errors():
            records = cast(dict[bytes, bytes], await self._client.hgetall(_KEY))
        return [_unpack(name.decode(), raw) for name, raw in sorted(records.items())]

    def secret(self, key: AccessKey) -> str:
        """Return the secret that its holder signs with; 40 characters."""
        return self.secrets(key)[0]

    def secrets(self, key: AccessKey) -> list[str]:
        """The same, and those that are believed, too."""
        text = f"quire s3 secret\n{key.name}\n{key.generation}".encode()
        macs = (hmac.digest(secret, text, "sha256") for secret in self._secrets)
        return [base64.b64encode(mac, b"-_").decode()[:_SECRET_CHARS] for mac in macs]

    def salt(self, tenant: str) -> bytes:
        """Return the salt of the tenant's namespaces: no other tenant can name, or guess, its chunks. 16 bytes."""
        return self.salts(tenant)[0]

    def salts(self, tenant: str) -> tuple[bytes, ...]:
        """The same, and those that are believed, too."""
        return tuple(salt_of(tenant, secret) for secret in self._secrets)

    async def _write(self, key: AccessKey) -> None:
        grants = [[grant.tenant, grant.bucket, grant.prefix, int(grant.level)] for grant in key.grants]
        fields = [key.tenant, grants, key.generation, key.read_only, key.rdma]
        raw = cbor2.dumps([*fields, key.expires_ms] if key.expires_ms else fields)  # releases before 0.3 read five
        async with metadata_errors():
            await self._client.hset(_KEY, key.name, raw)


def salt_of(tenant: str, cluster_secret: bytes) -> bytes:
    """Return the salt of the tenant of that name."""
    return hmac.digest(cluster_secret, f"quire tenant salt\n{tenant}".encode(), "sha256")[:16]


def _unpack(name: str, raw: bytes) -> AccessKey:
    tenant, grants, generation, read_only, rdma, *expiry = cbor2.loads(raw)
    granted = tuple(AccessGrant(owner, bucket, prefix, AccessLevel(level)) for owner, bucket, prefix, level in grants)
    return AccessKey(
        name,
        tenant,
        grants=granted,
        generation=generation,
        read_only=read_only,
        rdma=rdma,
        expires_ms=expiry[0] if expiry else 0,
    )
