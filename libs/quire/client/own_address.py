"""Proving to a cluster that asks for tokens that this process's address on the data plane is its own."""

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
_TRIES: Final = 2


class OwnAddress:
    """Proves it when it is first needed, and again after half of the time for which a proof is good."""

    def __init__(self, transport: Transport, stub: Any, timeout_s: float) -> None:
        self._transport = transport
        self._stub = stub
        self._timeout_s = timeout_s
        self._halves: asyncio.Queue[bytes] = asyncio.Queue(16)
        self._memory: Buffer | None = None
        self._again_s = -math.inf
        self._proving = asyncio.Lock()

    def on_nonce(self, half: bytes) -> None:
        """A node has sent it; strangers may send others."""
        if not self._halves.full():
            self._halves.put_nowait(half)

    async def prove(self) -> None:
        """Have the transport's `proof`. Raises `PeerLost` where no nonce arrives, `AddressUnproven`, `NotAllowed`."""
        async with self._proving:
            if asyncio.get_running_loop().time() < self._again_s:
                return
            for left in reversed(range(_TRIES)):
                try:
                    good_s = await self._prove()
                    break
                except AddressUnproven:  # by the nonce of a try before, which came late
                    if not left:
                        raise
            self._again_s = asyncio.get_running_loop().time() + good_s / 2

    async def _prove(self) -> float:
        """For how long that is good, seconds."""
        if self._memory is None:  # kept: a node may write there late
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
