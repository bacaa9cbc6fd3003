"""Signed leases: the promise of a look-up, in a form that a gateway can check alone.

A lease names the ranges of the matched chunks with the nodes that deliver them, and the key of the last one. The
gateway signs (HMAC-SHA256 with the cluster's secret), and any gateway opens it and permits each node its part. In
Redis the lease pins the last matched chunk alone: the index is prefix-closed, so everything before it stays too.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

import cbor2

from quire.model.errors import LeaseExpired, LeaseForged
from quire.model.keys import ChunkKeys
from quire.model.policy import TenantPolicy
from quire.model.ranges import ChunkRange

_MAC_BYTES: Final = 32
_VERSION: Final = 6
_WITH_DIGEST: Final = (4, 5)
"""Of the release before: with a digest of the keys; the first of them without a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A promise that chunks stay readable until `expires_ms` (Unix epoch). `tip` is the last chunk's key.

    `ranges` cover all of them in order; `addresses`: of the nodes' gRPC servers, by node. `tenant`: whose request it
    is, and what that tenant gets of the links. `namespace`: first 16 bytes of the digest of the namespace that the keys
    were derived under; empty where they are the client's own. All of it is signed, so that no client names anything
    else.
    """

    lease_id: bytes
    tip: bytes
    tip_bucket: bytes
    expires_ms: int
    ranges: tuple[ChunkRange, ...]
    addresses: dict[str, str] = field(default_factory=dict)
    tenant: TenantPolicy = field(default_factory=TenantPolicy)
    namespace: bytes = b""

    def check_fresh(self, now_ms: int) -> None:
        """Check the time. Raises `LeaseExpired`."""
        if now_ms >= self.expires_ms:
            raise LeaseExpired(f"expired {now_ms - self.expires_ms} ms ago; look up again", field="lease")

    def check_keys(self, keys: ChunkKeys) -> None:
        """Check that the lease is over these keys, the last of which commits to those before. Raises `LeaseForged`."""
        count = self.ranges[-1].stop if self.ranges else 0
        if len(keys) != count or not hmac.compare_digest(self.tip, keys.at(count - 1)):
            raise LeaseForged("it is over other keys", field="lease")


class LeaseSigner:
    """Signs with the cluster's secret, the first of these, and opens with any."""

    def __init__(self, *secrets: bytes) -> None:
        self._secrets = secrets

    def sign(self, lease: Lease) -> bytes:
        """Return the signed token of a lease."""
        ranges = [[run.node_id, run.first, run.count] for run in lease.ranges]
        tenant = [lease.tenant.tenant, lease.tenant.weight, lease.tenant.cap_bytes_per_s]
        pinned = [lease.lease_id, lease.tip, lease.tip_bucket, lease.expires_ms]
        body = cbor2.dumps([_VERSION, *pinned, ranges, lease.addresses, tenant, lease.namespace])
        return _mac(self._secrets[0], body) + body

    def open(self, token: bytes) -> Lease:
        """The lease inside of `token`, expired or not. Raises `LeaseForged`."""
        body = token[_MAC_BYTES:]
        if not any(hmac.compare_digest(_mac(secret, body), token[:_MAC_BYTES]) for secret in self._secrets):
            raise LeaseForged("this cluster did not sign it", field="lease")
        version, *fields = cbor2.loads(body)
        if version in _WITH_DIGEST:
            del fields[5]
        elif version != _VERSION:
            raise LeaseForged(f"version {version}", field="lease")
        lease_id, tip, tip_bucket, expires_ms, ranges, addresses, tenant, *scope = fields
        return Lease(
            lease_id=lease_id,
            tip=tip,
            tip_bucket=tip_bucket,
            expires_ms=expires_ms,
            ranges=tuple(ChunkRange(*row) for row in ranges),
            addresses=addresses,
            tenant=TenantPolicy(*tenant),
            namespace=scope[0] if scope else b"",
        )


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.new(secret, b"quire lease 1" + body, hashlib.sha256).digest()
