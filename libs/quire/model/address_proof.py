"""Proof that a worker address is its client's own: nonces went there over the data plane, and came back over gRPC.

Over TCP a remote key protects nothing: who names another process's worker could have nodes read and write its memory.
So no node uses memory that a tenant names before the tenant has proved its address, in two steps. The first nonce is a
message, which harms nobody. Who shows it gets the second one as a layer comes, written into memory with a message
behind it: an address may have several devices, and what is written need not go where messages go.

Challenges and proofs are signed with the cluster's secret: any gateway takes them, and none keeps anything.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import Enum
from typing import Any, Final

import cbor2

from quire.model.errors import AddressUnproven

HALF_BYTES: Final = 16
_MAC_BYTES: Final = 32
_PROOF: Final = "proof"


class Step(Enum):
    """How a nonce goes to the client: as a message; or half of it into its memory, and half as a message behind it."""

    MESSAGE = "message"
    MEMORY = "memory"

    @property
    def nonce_bytes(self) -> int:
        return HALF_BYTES if self is Step.MESSAGE else 2 * HALF_BYTES


class AddressProofs:
    """`secrets`: the cluster's, the first of which signs. `address`: the part of a worker's address that UCX uses."""

    def __init__(self, *secrets: bytes) -> None:
        self._secrets = secrets

    def challenge(self, step: Step, tenant: str, address: bytes, nonce: bytes, expires_ms: int) -> bytes:
        """What the client shows with the nonce, until then."""
        return self._sign([step.value, tenant, _digest(address), _digest(nonce), expires_ms])

    def answered(self, challenge: bytes, tenant: str, address: bytes, nonce: bytes, now_ms: int) -> Step:
        """Which step is done. Raises `AddressUnproven` unless this nonce was sent to this address for this tenant."""
        step, *said = self._open(challenge, now_ms) or [""]
        if said != [tenant, _digest(address), _digest(nonce)]:
            raise AddressUnproven("this nonce was not sent to that address", field="nonce")
        return Step(step)

    def proof(self, tenant: str, address: bytes, expires_ms: int) -> bytes:
        """What the client shows with each target at this address, until then."""
        return self._sign([_PROOF, tenant, _digest(address), expires_ms])

    def check(self, proof: bytes, tenant: str, address: bytes, now_ms: int) -> None:
        """Raises `AddressUnproven`."""
        if self._open(proof, now_ms) != [_PROOF, tenant, _digest(address)]:
            raise AddressUnproven("not proved to be this client's (`ProveAddress`)", field="target.worker_address")

    def _sign(self, said: list[Any]) -> bytes:
        body: bytes = cbor2.dumps(said)
        return _mac(self._secrets[0], body) + body

    def _open(self, signed: bytes, now_ms: int) -> list[Any]:
        """What was said but for the expiry; nothing where it is over, or nobody's."""
        mac, body = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not any(hmac.compare_digest(_mac(secret, body), mac) for secret in self._secrets):
            return []
        *said, expires_ms = cbor2.loads(body)
        return said if now_ms < expires_ms else []


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, b"quire address" + body, "sha256")
