"""The proof of a client's address: shared, renewed in time, and never a reason to fail while it is good."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from quire.client.memory import own_address as module
from quire.client.memory.own_address import OwnAddress
from quire.model.errors import AddressUnproven, PeerLost, QuireError, TooManyRequests
from quire.transport.memory import MemoryTransport
from quire.wire.v1 import gateway_pb2 as pb


class _Gateway:
    """Asks for both nonces. `sends`: whether they arrive; `refuses`: what it raises first."""

    def __init__(self) -> None:
        self.transport = MemoryTransport()
        self.own = OwnAddress(self.transport, self, 5.0)
        self.asked = 0
        self.sends = True
        self.required = True
        self.refuses: list[QuireError] = []
        self.good_ms = 60_000
        self._nonce = b""

    async def ProveAddress(self, request: pb.ProveAddressRequest, **options: Any) -> pb.ProveAddressResponse:
        self.asked += 1
        if self.refuses:
            raise self.refuses.pop(0)
        if not self.required:
            return pb.ProveAddressResponse()
        if request.challenge and request.nonce != self._nonce:
            raise AddressUnproven("this nonce was not sent", field="nonce")
        if request.challenge == b"memory":
            return pb.ProveAddressResponse(proof=os.urandom(8), good_ms=self.good_ms)
        half, written = os.urandom(16), os.urandom(16)
        if self.sends:
            asyncio.get_running_loop().call_soon(self.own.on_nonce, half)
        if not request.challenge:
            self._nonce = half
            return pb.ProveAddressResponse(challenge=b"message")
        assert self.own._memory is not None and self.own._memory.view is not None
        self.own._memory.view[:] = list(written)
        self._nonce = written + half
        return pb.ProveAddressResponse(challenge=b"memory")


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> _Gateway:
    async def call(method: Callable[..., Any], request: Any, *, timeout_s: float) -> Any:
        return await method(request)

    monkeypatch.setattr(module, "call", call)
    return _Gateway()


async def test_transfers_share_a_proof(gateway: _Gateway) -> None:
    await asyncio.gather(*(gateway.own.prove() for _ in range(8)))
    assert gateway.asked == 3 and len(gateway.transport.proof) == 8
    await gateway.own.prove()
    assert gateway.asked == 3


async def test_it_is_renewed_in_the_background(gateway: _Gateway) -> None:
    """A renewal that fails costs no transfer while the proof is good."""
    await gateway.own.prove()
    first = gateway.transport.proof
    gateway.own._renew_s, gateway.sends = 0.0, False
    async with asyncio.timeout(1):
        await gateway.own.prove()
    assert gateway.transport.proof == first
    assert gateway.own._attempt is not None
    gateway.own._attempt.cancel()
    await asyncio.sleep(0)
    gateway.own._renew_s, gateway.sends = 0.0, True
    await gateway.own.prove()
    async with asyncio.timeout(5):
        while gateway.transport.proof == first:
            await asyncio.sleep(0.01)


async def test_a_failure_is_shared_for_a_moment(gateway: _Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four transfers do not wait one after the other."""
    monkeypatch.setattr(module, "_NONCE_S", 0.2)
    gateway.sends = False
    ends = await asyncio.gather(*(gateway.own.prove() for _ in range(4)), return_exceptions=True)
    with pytest.raises(PeerLost):
        await gateway.own.prove()
    assert all(isinstance(end, PeerLost) for end in ends) and gateway.asked == 1
    gateway.sends, gateway.own._failed_until_s = True, 0.0
    await gateway.own.prove()
    assert gateway.transport.proof


async def test_a_cluster_that_begins_to_ask_is_answered(gateway: _Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when QUIRE_GATEWAY_ACCEPT_UNPROVEN is taken away, or a gateway is renewed."""
    monkeypatch.setattr(module, "_UNASKED_S", 0.05)
    gateway.required = False
    await gateway.own.prove()
    assert not gateway.transport.proof
    gateway.required = True
    await asyncio.sleep(0.1)
    await gateway.own.prove()
    assert gateway.transport.proof


async def test_another_address_is_proved_anew(gateway: _Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    await gateway.own.prove()
    first = gateway.transport.proof
    monkeypatch.setattr(type(gateway.transport), "address", property(lambda _: b"another"))
    await gateway.own.prove()
    assert gateway.transport.proof != first


async def test_late_nonces_and_full_gateways_are_tried_again(gateway: _Gateway) -> None:
    full = TooManyRequests("others first", retry_after_s=0.05)
    gateway.refuses = [full, full]
    gateway.own.on_nonce(b"of an attempt be")
    await gateway.own.prove()
    gateway.refuses = [AddressUnproven("not sent", field="nonce")]
    gateway.own._renew_s = gateway.own._good_until_s = 0.0
    await gateway.own.prove()
    gateway.refuses = [AddressUnproven("a storage node's own", field="target.worker_address")]
    gateway.own._renew_s = gateway.own._good_until_s = 0.0
    with pytest.raises(AddressUnproven, match="storage node"):
        await gateway.own.prove()


async def test_a_closed_client_begins_no_attempt(gateway: _Gateway) -> None:
    gateway.own.close()
    with pytest.raises(PeerLost, match="closed"):
        await gateway.own.prove()
    assert not gateway.asked


async def test_a_gateway_without_room_is_named(gateway: _Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a way that is missing."""
    monkeypatch.setattr(module, "_NONCE_S", 0.1)
    gateway.refuses = [TooManyRequests("others first", retry_after_s=0.02) for _ in range(50)]
    with pytest.raises(TooManyRequests, match="others first"):
        await gateway.own.prove()
