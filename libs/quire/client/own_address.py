"""The proof of this process's worker address, for clusters with tokens (`quire.model.address_proof`)."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

from quire.client.buffers import Buffer
from quire.client.reachability import NO_WAY
from quire.model.address_proof import HALF_BYTES, Step
from quire.model.errors import AddressUnproven, InvalidRequest, NotImplementedHere, PeerLost
from quire.transport import Transport
from quire.wire import convert
from quire.wire.channels import call
from quire.wire.v1 import gateway_pb2 as pb

_NONCE_S: Final = 12.0


class OwnAddress:
    """Proves the address at the first transfer, and again after half of a proof's lifetime."""

    def __init__(self, transport: Transport, stub: Any, timeout_s: float) -> None:
        self._transport = transport
        self._stub = stub
        self._timeout_s = timeout_s
        self._halves: asyncio.Queue[bytes] = asyncio.Queue(16)
        self._memory: Buffer | None = None
        self._again_s = -math.inf
        self._proving = asyncio.Lock()

    def on_nonce(self, half: bytes) -> None:
        """Accept a nonce from the data plane. The gateway will refuse it if no node of the cluster has sent it."""
        if not self._halves.full():
            self._halves.put_nowait(half)

    async def prove(self) -> None:
        """Set the transport's `proof`, unless the current one is good for a while.

        Raises:
            PeerLost: No nonce arrives.
            AddressUnproven: The gateway refuses the nonces.
            NotAllowed: The key may not name memory.
        """
        async with self._proving:
            if asyncio.get_running_loop().time() < self._again_s:
                return
            try:
                lifetime_s = await self._prove()
            except AddressUnproven:  # a late nonce of an attempt before is taken for the current one
                lifetime_s = await self._prove()
            self._again_s = asyncio.get_running_loop().time() + lifetime_s / 2

    async def _prove(self) -> float:
        """Return the proof's lifetime in seconds."""
        if self._memory is None:  # never freed: a node may write there late
            self._memory = Buffer.allocate(self._transport, HALF_BYTES)
        target, view = convert.target_to(self._memory.target()), self._memory.view
        assert view is not None, "host memory"
        while not self._halves.empty():
            self._halves.get_nowait()
        try:
            answer = await self._ask(pb.ProveAddressRequest(target=target))
        except (NotImplementedHere, InvalidRequest) as error:
            if isinstance(error, InvalidRequest) and error.field != "request":
                raise
            return math.inf  # a gateway of the release before, which asks for none
        if not answer.challenge:
            return math.inf
        for step in Step:
            half = await self._half()
            nonce = half if step is Step.MESSAGE else bytes(view[:HALF_BYTES]) + half
            answer = await self._ask(pb.ProveAddressRequest(target=target, challenge=answer.challenge, nonce=nonce))
        self._transport.proof = answer.proof
        return float(answer.good_ms) / 1000

    async def _half(self) -> bytes:
        try:
            async with asyncio.timeout(_NONCE_S):
                return await self._halves.get()
        except TimeoutError:
            why = f"no nonce came from the cluster within {_NONCE_S:g} s: no way to this process"
            raise PeerLost(f"{why}; {NO_WAY}") from None

    async def _ask(self, request: pb.ProveAddressRequest) -> pb.ProveAddressResponse:
        answer: pb.ProveAddressResponse = await call(self._stub.ProveAddress, request, timeout_s=self._timeout_s)
        return answer
