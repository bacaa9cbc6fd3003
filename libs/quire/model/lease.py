"""Signed leases: what a look-up promises, in a form that a storage node can check without asking anybody.

A lease names each run of chunks with the node that holds it and a digest of its keys. The orchestrator signs
(HMAC-SHA256 with the cluster's secret); storage nodes verify before the first byte moves. In Redis the lease pins the
last matched chunk alone: the index is prefix-closed, so everything before it is held by it.
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

_MAC_BYTES: Final = 32
_VERSION: Final = 3


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """Chunks first … first+count-1 of the look-up, at one node; `digest` is `ChunkKeys.digest` of their keys.

    `address`: the node's, for gRPC. Signed with the rest, so that a client names no other one.
    """

    node_id: str
    first_chunk: int
    chunk_count: int
    digest: bytes
    address: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise that the runs stay readable until `expires_ms` (Unix epoch). `tip` is the last chunk's key.

    `tenant`: whose request it is, and what that tenant gets of the links: signed, so that no
    client names another.
    """

    lease_id: bytes
    tip: bytes
    tip_segment: bytes
    expires_ms: int
    runs: tuple[LeasedRun, ...]
    tenant: TenantPolicy = field(default_factory=TenantPolicy)

    def check_fresh(self, now_ms: int) -> None:
        """Raises `LeaseExpired`."""
        if now_ms >= self.expires_ms:
            raise LeaseExpired(f"expired {now_ms - self.expires_ms} ms ago; look up again", field="lease")

    def covers(self, node_id: str, first_chunk: int, keys: ChunkKeys) -> bool:
        """Whether exactly this run at this node is leased."""
        digest = keys.digest()
        return any(
            run.node_id == node_id
            and run.first_chunk == first_chunk
            and run.chunk_count == len(keys)
            and hmac.compare_digest(run.digest, digest)
            for run in self.runs
        )


class LeaseSigner:
    """Signs and opens with the cluster's secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, lease: Lease) -> bytes:
        runs = [[run.node_id, run.first_chunk, run.chunk_count, run.digest, run.address] for run in lease.runs]
        tenant = [lease.tenant.tenant, lease.tenant.weight, lease.tenant.cap_bytes_per_s]
        body = cbor2.dumps([_VERSION, lease.lease_id, lease.tip, lease.tip_segment, lease.expires_ms, runs, tenant])
        return self._mac(body) + body

    def open(self, token: bytes) -> Lease:
        """The lease inside of `token`, expired or not. Raises `LeaseForged`."""
        body = token[_MAC_BYTES:]
        if not hmac.compare_digest(self._mac(body), token[:_MAC_BYTES]):
            raise LeaseForged("this cluster did not sign it", field="lease")
        version, *fields = cbor2.loads(body)
        if version != _VERSION:
            raise LeaseForged(f"version {version}", field="lease")
        lease_id, tip, tip_segment, expires_ms, runs, tenant = fields
        leased = tuple(LeasedRun(*run) for run in runs)
        return Lease(lease_id, tip, tip_segment, expires_ms, leased, TenantPolicy(*tenant))

    def _mac(self, body: bytes) -> bytes:
        return hmac.new(self._secret, b"quire lease 1" + body, hashlib.sha256).digest()
