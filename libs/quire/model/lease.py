"""Signed leases: the promise of a look-up, in a form that a gateway can check alone.

A lease names the ranges of the matched chunks with the nodes that deliver them, and their keys by a digest. The
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
_OF_SAMPLE: Final = 6
_OF_KEYS, _OF_CLIENTS_KEYS = 5, 4
"""With a digest of the keys, as the release before writes and reads them; the second one without a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A promise that chunks stay readable until `expires_ms` (Unix epoch). `tip` is the last chunk's key.

    `ranges` cover all of them in order; `keys_digest` is `ChunkKeys.digest` of their keys, empty after a look-up by a
    sample of the keys; `addresses`: of the nodes' gRPC servers, by node. `tenant`: whose request it
    is, and what that tenant gets of the links. `namespace`: first 16 bytes of the digest of the namespace that the keys
    were derived under; empty where they are the client's own. All of it is signed, so that no client names anything
    else.
    """

    lease_id: bytes
    tip: bytes
    tip_bucket: bytes
    expires_ms: int
    ranges: tuple[ChunkRange, ...]
    keys_digest: bytes = b""
    addresses: dict[str, str] = field(default_factory=dict)
    tenant: TenantPolicy = field(default_factory=TenantPolicy)
    namespace: bytes = b""

    def check_fresh(self, now_ms: int) -> None:
        """Check the time. Raises `LeaseExpired`."""
        if now_ms >= self.expires_ms:
            raise LeaseExpired(f"expired {now_ms - self.expires_ms} ms ago; look up again", field="lease")

    def check_keys(self, keys: ChunkKeys) -> None:
        """Check that the lease is over these keys. Raises `LeaseForged`.

        After a look-up by a sample only the last key is known, which commits to those before.
        """
        count = self.ranges[-1].stop if self.ranges else 0
        is_same = len(keys) == count and hmac.compare_digest(self.tip, keys.at(count - 1))
        if not is_same or (self.keys_digest and not hmac.compare_digest(self.keys_digest, keys.digest())):
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
        fields = [*pinned, ranges, lease.keys_digest, lease.addresses, tenant]
        if not lease.keys_digest:
            body = cbor2.dumps([_OF_SAMPLE, *fields, lease.namespace])
        else:
            body = cbor2.dumps([_OF_KEYS, *fields, lease.namespace] if lease.namespace else [_OF_CLIENTS_KEYS, *fields])
        return _mac(self._secrets[0], body) + body

    def open(self, token: bytes) -> Lease:
        """The lease inside of `token`, expired or not. Raises `LeaseForged`."""
        body = token[_MAC_BYTES:]
        if not any(hmac.compare_digest(_mac(secret, body), token[:_MAC_BYTES]) for secret in self._secrets):
            raise LeaseForged("this cluster did not sign it", field="lease")
        version, *fields = cbor2.loads(body)
        if version not in (_OF_SAMPLE, _OF_KEYS, _OF_CLIENTS_KEYS):
            raise LeaseForged(f"version {version}", field="lease")
        lease_id, tip, tip_bucket, expires_ms, ranges, keys_digest, addresses, tenant, *scope = fields
        return Lease(
            lease_id=lease_id,
            tip=tip,
            tip_bucket=tip_bucket,
            expires_ms=expires_ms,
            ranges=tuple(ChunkRange(*row) for row in ranges),
            keys_digest=keys_digest,
            addresses=addresses,
            tenant=TenantPolicy(*tenant),
            namespace=scope[0] if scope else b"",
        )


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.new(secret, b"quire lease 1" + body, hashlib.sha256).digest()
