"""The proof of this process's worker address, for clusters with tokens (`quire.model.address_proof`)."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

from quire.client.memory.buffers import Buffer
from quire.client.memory.route_check import NO_WAY
from quire.model.address_proof import HALF_BYTES, ProofStep
from quire.model.errors import (
    AddressUnproven,
    InvalidRequest,
    NotImplementedHere,
    PeerLost,
    QuireError,
    TooManyRequests,
)
from quire.telemetry import background, logger
from quire.transport import Transport
from quire.wire import convert
from quire.wire.channels import call
from quire.wire.v1 import gateway_pb2 as pb

_NONCE_S: Final = 15.0
_UNASKED_S: Final = 10.0
"""Time after which a cluster that has asked for no proof is asked again."""
_RENEWAL_PAUSE_S: Final = 5.0
_FAILURE_S: Final = 2.0
"""For so long an attempt that has failed stands for those that would follow at once."""


class OwnAddress:
    """Proves the address at the first transfer, and renews the proof in the background after half of its lifetime."""

    def __init__(self, transport: Transport, stub: Any, timeout_s: float) -> None:
        self._transport = transport
        self._stub = stub
        self._timeout_s = timeout_s
        self._halves: asyncio.Queue[bytes] = asyncio.Queue(16)
        self._memory: Buffer | None = None
        self._proved = b""  # the address
        self._renew_s = self._good_until_s = self._failed_until_s = -math.inf
        self._attempt: asyncio.Task[None] | None = None
        self._last_refusal: QuireError | None = None
        self._closed = False

    def on_nonce(self, half: bytes) -> None:
        """Accept a nonce from the data plane. The gateway will refuse it if no node of the cluster has sent it."""
        if not self._halves.full():
            self._halves.put_nowait(half)

    def close(self) -> None:
        """End the running attempt, and begin no other."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()

    async def prove(self) -> None:
        """Make sure that the transport has a valid `proof`. Callers share an attempt, and its failure for a moment.

        Raises:
            PeerLost: No nonce arrives.
            AddressUnproven: The gateway refuses the nonces.
            NotAllowed: The key may not name memory.
            TooManyRequests: The gateway has no room for the proof.
        """
        while True:
            now_s, same = asyncio.get_running_loop().time(), self._transport.address == self._proved
            if same and now_s < self._renew_s:
                return
            if self._closed:
                raise PeerLost("the client was closed")
            attempt = self._attempt
            if attempt is None or (attempt.done() and now_s >= self._failed_until_s):
                attempt = self._attempt = asyncio.create_task(self._try(), context=background())
                attempt.add_done_callback(_seen)
            if same and now_s < self._good_until_s:
                self._renew_s = now_s + _RENEWAL_PAUSE_S
                return
            await asyncio.wait([attempt])
            if attempt.cancelled():
                raise PeerLost("the client was closed")
            attempt.result()  # or its error

    async def _try(self) -> None:
        loop = asyncio.get_running_loop()
        address = self._transport.address
        try:
            async with asyncio.timeout(_NONCE_S):
                lifetime_s, renew_s = await self._with_patience()
        except TimeoutError:
            self._failed_until_s = loop.time() + _FAILURE_S
            if self._last_refusal is not None:
                raise self._last_refusal from None
            why = f"no nonce came from the cluster within {_NONCE_S:g} s: no way to this process"
            raise PeerLost(f"{why}; {NO_WAY}") from None
        except QuireError:
            self._failed_until_s = loop.time() + _FAILURE_S
            raise
        self._proved, self._good_until_s = address, loop.time() + lifetime_s
        self._renew_s = loop.time() + renew_s

    async def _with_patience(self) -> tuple[float, float]:
        """Repeat an attempt that had no room, or took the late nonce of another one for its own."""
        self._last_refusal = None
        while True:
            try:
                return await self._prove()
            except TooManyRequests as error:
                self._last_refusal = error
                await asyncio.sleep(error.retry_after_s or 1.0)
            except AddressUnproven as error:
                if error.field != "nonce":
                    raise
                self._last_refusal = error
                logger().info("the gateway refused a nonce; requesting another one", error=str(error))
                await asyncio.sleep(0.1)

    async def _prove(self) -> tuple[float, float]:
        """Return the proof's lifetime, and when to renew it, in seconds."""
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
            return 2 * _UNASKED_S, _UNASKED_S  # a gateway of the release before
        if not answer.challenge:
            return 2 * _UNASKED_S, _UNASKED_S
        for step in ProofStep:
            half = await self._halves.get()
            nonce = half if step is ProofStep.MESSAGE else bytes(view[:HALF_BYTES]) + half
            answer = await self._ask(pb.ProveAddressRequest(target=target, challenge=answer.challenge, nonce=nonce))
        self._transport.proof = answer.proof
        return answer.good_ms / 1000, answer.good_ms / 2000

    async def _ask(self, request: pb.ProveAddressRequest) -> pb.ProveAddressResponse:
        answer: pb.ProveAddressResponse = await call(self._stub.ProveAddress, request, timeout_s=self._timeout_s)
        return answer


def _seen(attempt: asyncio.Task[None]) -> None:
    """A renewal that fails is not awaited by anybody."""
    if not attempt.cancelled() and (error := attempt.exception()) is not None:
        logger().warning("this process's address could not be proved", error=str(error))
