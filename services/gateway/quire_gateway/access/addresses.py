"""Ownership of worker addresses, checked before a node or this gateway uses memory there for a tenant.

Tenants prove their addresses (`quire.model.address_proof`). Neither the response to a step nor its latency depends on
whether the address was reached, so that `ProveAddress` is no port scanner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from quire.model.address_proof import AddressProofs, ProofStep
from quire.model.descriptor import RdmaTarget
from quire.model.errors import (
    AddressUnproven,
    NodeUnavailable,
    NoStorageNode,
    NotImplementedHere,
    QuireError,
    TargetInvalid,
    TooManyRequests,
)
from quire.model.nodes import Node
from quire.telemetry import background, logger
from quire.transport import ucx_address
from quire_gateway.access.admission import Principal
from quire_server import tasks
from quire_server.clock import Clock
from quire_server.core.shares import SharedBound

PROOF_MS: Final = 3_600_000
_CHALLENGE_MS: Final = 60_000
_AT_ONCE: Final = 128
_NODES_TRIED: Final = 3
_RETRY_S: Final = 1.0


class NonceNodes(Protocol):
    """Storage nodes by their gRPC address."""

    async def send_nonce(self, address: str, target: RdmaTarget, nonce: bytes, tenant: str) -> None:
        """Send 16 bytes as a message to the target's worker; of 32, the first half is written into the target."""


class WorkerAddresses:
    """Challenges tenants, and verifies their proofs."""

    def __init__(
        self,
        *,
        required: bool,
        secrets: Iterable[bytes],
        nodes: Callable[[], Mapping[str, Node]],
        sender: NonceNodes,
        clock: Clock,
    ) -> None:
        """Set up without state.

        Args:
            required: Whether tenants must prove their addresses.
            secrets: The cluster's secrets; the first one signs.
            nodes: Returns the live storage nodes by name.
            sender: Sends the nonces.
            clock: Expiry of challenges and proofs.
        """
        self._required = required
        self._proofs = AddressProofs(*secrets)
        self._nodes = nodes
        self._sender = sender
        self._clock = clock
        self._room = SharedBound(_AT_ONCE)
        self._sending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await tasks.end(self._sending)

    def check(self, principal: Principal, target: RdmaTarget) -> None:
        """Refuse memory that is not proved to be in the caller's process.

        A target that is reachable as shared memory only needs no proof: the owner hands out its regions by names that
        cannot be guessed.

        Raises:
            AddressUnproven: The proof is missing, expired or of another tenant; or the address is a storage node's.
            TargetInvalid: This is no worker address.
        """
        address = self._strangers(target) if principal.salts else b""
        if address and self._required:
            self._proofs.check(target.proof, principal.tenant, address, self._clock.now_ms())

    async def prove(
        self, principal: Principal, target: RdmaTarget, challenge: bytes, nonce: bytes
    ) -> tuple[bytes, bytes]:
        """Take one step of a proof.

        Args:
            principal: The caller.
            target: Memory at the address, 16 bytes or more.
            challenge: The challenge of the step before; empty at first.
            nonce: The nonce that the caller has received.

        Returns:
            The next challenge and the proof, one of which is empty. Both are empty if no proof is required.

        Raises:
            AddressUnproven: The nonce is wrong, or the address is a storage node's.
            TargetInvalid: This is no worker address.
            NoStorageNode: No live node can send a nonce.
            TooManyRequests: Too many addresses of this tenant are being proved.
        """
        address = self._strangers(target) if self._required and principal.salts else b""
        if not address:
            return b"", b""
        if not challenge:
            return self._send(ProofStep.MESSAGE, principal.tenant, address, target), b""
        now_ms = self._clock.now_ms()
        if self._proofs.answered(challenge, principal.tenant, address, nonce, now_ms) is ProofStep.MESSAGE:
            return self._send(ProofStep.MEMORY, principal.tenant, address, target), b""
        return b"", self._proofs.proof(principal.tenant, address, now_ms + PROOF_MS)

    def _send(self, step: ProofStep, tenant: str, address: bytes, target: RdmaTarget) -> bytes:
        """Start to send a nonce; return its challenge."""
        nodes = list(self._nodes().values())
        if not nodes:
            raise NoStorageNode("no storage node could try the address")
        if not self._room.take(tenant):
            raise TooManyRequests("other addresses of this tenant are being proved", retry_after_s=_RETRY_S)
        nonce, candidates = os.urandom(step.nonce_bytes), random.sample(nodes, min(_NODES_TRIED, len(nodes)))
        sending = asyncio.create_task(self._sent(candidates, tenant, target, nonce), context=background())
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return self._proofs.challenge(step, tenant, address, nonce, self._clock.now_ms() + _CHALLENGE_MS)

    def _strangers(self, target: RdmaTarget) -> bytes:
        """Return the UCX part of the address. Raises `AddressUnproven` for the address of a storage node."""
        address = ucx_address(target.worker_address)
        if address and address in _ucx_addresses(self._nodes().values()):
            raise AddressUnproven("a storage node's own address", field="target.worker_address")
        return address

    async def _sent(self, nodes: Sequence[Node], tenant: str, target: RdmaTarget, nonce: bytes) -> None:
        """Have one of the nodes send it: the next one if a node is away, or of a release that cannot."""
        try:
            for node in nodes:
                try:
                    await self._sender.send_nonce(node.grpc_address, target, nonce, tenant)
                    return
                except (NodeUnavailable, NotImplementedHere) as error:
                    logger().info("a node sent no nonce", tenant=tenant, node=node.node_id, error=str(error))
        except QuireError as error:
            logger().info("an address was not proved", tenant=tenant, error=str(error))
        finally:
            self._room.give_back(tenant)


def _ucx_addresses(nodes: Iterable[Node]) -> Iterator[bytes]:
    for node in nodes:
        with contextlib.suppress(TargetInvalid):  # of a node that has another data plane
            yield ucx_address(node.worker_address)
