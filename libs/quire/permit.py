"""Permits: the gateway's word that a transfer is what its client asked for.

A lease says which chunks may be read; a permit binds one transfer to a tenant, to these keys, to this piece of client
memory (worker, address, length, remote key) and to a time. The gateway signs it with the cluster's secret; the storage
node verifies it against the request before a byte moves. So nobody who merely reaches a storage node can have it read
or write memory, and nobody in between can turn a transfer to other memory.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from quire.descriptor import RdmaTarget
from quire.errors import LeaseExpired, LeaseForged
from quire.keys import ChunkKeys

_MAC_BYTES: Final = 32
_EXPIRY: Final = struct.Struct("<q")


class PermitSigner:
    """Signs and verifies with the cluster's secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, tenant: str, transfer_id: bytes, keys: ChunkKeys, target: RdmaTarget, expires_ms: int) -> bytes:
        expiry = _EXPIRY.pack(expires_ms)
        name = tenant.encode()
        return self._mac(name, transfer_id, keys, target, expiry) + expiry + name

    def verify(self, permit: bytes, transfer_id: bytes, keys: ChunkKeys, target: RdmaTarget, now_ms: int) -> str:
        """The tenant whose transfer it is. Raises `LeaseForged`, `LeaseExpired`."""
        expiry = permit[_MAC_BYTES : _MAC_BYTES + _EXPIRY.size]
        tenant = permit[_MAC_BYTES + _EXPIRY.size :]
        if len(expiry) < _EXPIRY.size or not hmac.compare_digest(
            self._mac(tenant, transfer_id, keys, target, expiry), permit[:_MAC_BYTES]
        ):
            raise LeaseForged("no gateway of this cluster has signed this transfer", field="permit")
        if now_ms >= _EXPIRY.unpack(expiry)[0]:
            raise LeaseExpired("the transfer was permitted too long ago", field="permit")
        return tenant.decode(errors="replace")

    def _mac(self, tenant: bytes, transfer_id: bytes, keys: ChunkKeys, target: RdmaTarget, expiry: bytes) -> bytes:
        parts = (
            b"quire permit 1",
            tenant,
            transfer_id,
            keys.digest(),
            target.worker_address,
            target.address.to_bytes(8, "little"),
            target.length.to_bytes(8, "little"),
            target.remote_key,
            expiry,
        )
        mac = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in parts:
            mac.update(len(part).to_bytes(8, "little") + part)
        return mac.digest()
