"""Permits: the gateway's signature that a transfer is the one that its client requested.

A lease says which chunks may be read; a permit binds one node's part of a transfer to a tenant, to a time and to
everything that its request says: these chunks, this piece of client memory (worker, address, length, remote key), this
layout and level. The gateway signs it with the cluster's secret; the storage node verifies it, and nothing else, before
a byte moves. So reaching a storage node is not enough to have it deliver or ingest, and a transfer cannot be turned to
other memory on its way. Members sign transfers into their own memory, and their requests to each other: to drop, to
copy, to describe, to raise, to warm up. Such a request does the same if it comes twice.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from quire.model.errors import LeaseExpired, LeaseForged

TRANSFER_S_MAX: Final = 1500.0
"""No permit is good for longer. Nodes stop a transfer at its permit's end: clients take memory back by that."""

_MAC_BYTES: Final = 32
_EXPIRY: Final = struct.Struct("<q")


class PermitSigner:
    """Signs with the first of the cluster's secrets, and verifies with any: there are two during a rotation."""

    def __init__(self, *secrets: bytes) -> None:
        self._secrets = secrets

    def sign(self, tenant: str, request: bytes, expires_ms: int) -> bytes:
        """`request`: all that the transfer's request says, as bytes that are the same at both ends."""
        expiry, name = _EXPIRY.pack(expires_ms), tenant.encode()
        return self._mac(self._secrets[0], name, request, expiry) + expiry + name

    def verify(self, permit: bytes, request: bytes, now_ms: int) -> tuple[str, int]:
        """The tenant whose transfer it is, and when the permit expires. Raises `LeaseForged`, `LeaseExpired`."""
        expiry = permit[_MAC_BYTES : _MAC_BYTES + _EXPIRY.size]
        tenant = permit[_MAC_BYTES + _EXPIRY.size :]
        if len(expiry) < _EXPIRY.size or not any(
            hmac.compare_digest(self._mac(secret, tenant, request, expiry), permit[:_MAC_BYTES])
            for secret in self._secrets
        ):
            raise LeaseForged("no member of this cluster has signed this request", field="permit")
        expires_ms = int(_EXPIRY.unpack(expiry)[0])
        if now_ms >= expires_ms:
            raise LeaseExpired("the transfer was permitted too long ago", field="permit")
        return tenant.decode(errors="replace"), expires_ms

    def _mac(self, secret: bytes, tenant: bytes, request: bytes, expiry: bytes) -> bytes:
        mac = hmac.new(secret, b"quire permit 3", hashlib.sha256)
        for part in (tenant, expiry, hashlib.sha256(request).digest()):
            mac.update(len(part).to_bytes(8, "little") + part)
        return mac.digest()
