"""Whose a worker's address is, before a node or this gateway uses memory there for a tenant.

Tenants prove their addresses (`quire.model.address_proof`). The answer to the first step does not tell whether the
address was reached, nor does its time: nobody finds open ports by asking.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from quire.model.address_proof import AddressProofs, Step
from quire.model.descriptor import RdmaTarget
from quire.model.errors import AddressUnproven, NoStorageNode, QuireError, TooManyRequests
from quire.model.nodes import Node
from quire.telemetry import background, logger
from quire.transport import ucx_address
from quire_gateway.admission import Principal
from quire_gateway.core.shares import SharedBound
from quire_server import tasks
from quire_server.clock import Clock

PROOF_MS: Final = 3_600_000
_CHALLENGE_MS: Final = 60_000
_AT_ONCE: Final = 32
_RETRY_S: Final = 1.0


class NonceNodes(Protocol):
    """Storage nodes by their gRPC address."""

    async def send_nonce(self, address: str, target: RdmaTarget, nonce: bytes) -> None:
        """A message of 16 bytes to the target's worker; of 32, half of it goes into the target first."""


class WorkerAddresses:
    """`required`: whether tenants have to prove theirs. `nodes`: live storage nodes, by name. `secrets`: the cluster's,
    the first of which signs.
    """

    def __init__(
        self,
        *,
        required: bool,
        secrets: Iterable[bytes],
        nodes: Callable[[], Mapping[str, Node]],
        sender: NonceNodes,
        clock: Clock,
    ) -> None:
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
        """Whether the caller may have bytes go to this memory, or come from there.

        Memory that is reached as shared memory only needs no proof: its owner hands it out by names that cannot be
        guessed.

        Raises `AddressUnproven`, `TargetInvalid`.
        """
        address = self._strangers(target) if principal.salts else b""
        if address and self._required:
            self._proofs.check(target.proof, principal.tenant, address, self._clock.now_ms())

    async def prove(
        self, principal: Principal, target: RdmaTarget, challenge: bytes, nonce: bytes
    ) -> tuple[bytes, bytes]:
        """One step: the challenge of the next one, or after the last one the proof. Both empty where none is asked for.

        Raises `AddressUnproven`, `TargetInvalid`, `NoStorageNode`, `TooManyRequests`.
        """
        address = self._strangers(target) if self._required and principal.salts else b""
        if not address:
            return b"", b""
        if not challenge:
            return self._send(Step.MESSAGE, principal.tenant, address, target), b""
        now_ms = self._clock.now_ms()
        if self._proofs.answered(challenge, principal.tenant, address, nonce, now_ms) is Step.MESSAGE:
            return self._send(Step.MEMORY, principal.tenant, address, target), b""
        return b"", self._proofs.proof(principal.tenant, address, now_ms + PROOF_MS)

    def _send(self, step: Step, tenant: str, address: bytes, target: RdmaTarget) -> bytes:
        """Have a nonce sent, which takes its time; the challenge."""
        nodes = list(self._nodes().values())
        if not nodes:
            raise NoStorageNode("no storage node could try the address")
        if not self._room.take(tenant):
            raise TooManyRequests("other addresses of this tenant are being proved", retry_after_s=_RETRY_S)
        node, nonce = random.choice(nodes), os.urandom(step.nonce_bytes)
        sending = asyncio.create_task(self._sent(node, tenant, target, nonce), context=background())
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return self._proofs.challenge(step, tenant, address, nonce, self._clock.now_ms() + _CHALLENGE_MS)

    def _strangers(self, target: RdmaTarget) -> bytes:
        """The address as UCX has it. Raises `AddressUnproven` for a storage node's."""
        address = ucx_address(target.worker_address)
        if address and any(address == ucx_address(node.worker_address) for node in self._nodes().values()):
            raise AddressUnproven("a storage node's own address", field="target.worker_address")
        return address

    async def _sent(self, node: Node, tenant: str, target: RdmaTarget, nonce: bytes) -> None:
        try:
            await self._sender.send_nonce(node.grpc_address, target, nonce)
        except QuireError as error:
            logger().info("an address was not proved", tenant=tenant, node=node.node_id, error=str(error))
        finally:
            self._room.give_back(tenant)
