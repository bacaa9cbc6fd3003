"""Proof of ownership of a worker address: nonces sent over the data plane are returned over gRPC.

Over TCP a remote key is not checked: a client that names the worker of another process could have nodes read and write
the memory of that process. No node uses memory of a tenant before the tenant has proved its address, in two steps. The
first nonce is a message, which is harmless at a wrong address. The second one is delivered as a layer is, written into
memory with a message behind it: a worker address may name several devices, and writes need not take the device of the
messages.

Challenges and proofs are signed with the cluster's secret. Every gateway accepts them, and none stores them.
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


class ProofStep(Enum):
    """How a nonce is sent: as a message; or one half into the client's memory and the other as a message behind it."""

    MESSAGE = "message"
    MEMORY = "memory"

    @property
    def nonce_bytes(self) -> int:
        """Length of the nonce."""
        return HALF_BYTES if self is ProofStep.MESSAGE else 2 * HALF_BYTES


class AddressProofs:
    """Signs and verifies challenges and proofs.

    Args of all methods: `address` is the UCX part of a worker address, `now_ms` and `expires_ms` are milliseconds since
    the Unix epoch.
    """

    def __init__(self, *secrets: bytes) -> None:
        """`secrets`: the cluster's, the first of which signs."""
        self._secrets = secrets

    def challenge(self, step: ProofStep, tenant: str, address: bytes, nonce: bytes, expires_ms: int) -> bytes:
        """Return the challenge that the client returns with the nonce, before `expires_ms`."""
        return self._sign([step.value, tenant, _digest(address), _digest(nonce), expires_ms])

    def answered(self, challenge: bytes, tenant: str, address: bytes, nonce: bytes, now_ms: int) -> ProofStep:
        """Return the step that the nonce completes.

        Raises:
            AddressUnproven: This nonce was not sent to this address for this tenant.
        """
        step, *claims = self._open(challenge, now_ms) or [""]
        if claims != [tenant, _digest(address), _digest(nonce)]:
            raise AddressUnproven("this nonce was not sent to that address", field="nonce")
        return ProofStep(step)

    def proof(self, tenant: str, address: bytes, expires_ms: int) -> bytes:
        """Return the proof that the client adds to each target at this address, before `expires_ms`."""
        return self._sign([_PROOF, tenant, _digest(address), expires_ms])

    def check(self, proof: bytes, tenant: str, address: bytes, now_ms: int) -> None:
        """Verify a proof.

        Raises:
            AddressUnproven: It is forged, expired, or of another tenant or address.
        """
        if self._open(proof, now_ms) != [_PROOF, tenant, _digest(address)]:
            raise AddressUnproven("not proved to be this client's (`ProveAddress`)", field="target.worker_address")

    def _sign(self, claims: list[Any]) -> bytes:
        body: bytes = cbor2.dumps(claims)
        return _mac(self._secrets[0], body) + body

    def _open(self, signed: bytes, now_ms: int) -> list[Any]:
        """Return the signed claims without the expiry; none if it has expired or the signature is wrong."""
        mac, body = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not any(hmac.compare_digest(_mac(secret, body), mac) for secret in self._secrets):
            return []
        *claims, expires_ms = cbor2.loads(body)
        return claims if now_ms < expires_ms else []


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, b"quire address" + body, "sha256")
