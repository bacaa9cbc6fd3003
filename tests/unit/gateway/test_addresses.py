"""Whose a worker's address is: asked of tenants, with the fault put back where it is not."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace

import pytest

from quire.model.descriptor import RdmaTarget
from quire.model.errors import AddressUnproven, NoStorageNode, PeerLost, TargetInvalid, TooManyRequests
from quire.model.nodes import Node, StorageInfo
from quire.testing.clock import FakeClock
from quire_gateway.access.addresses import PROOF_MS, WorkerAddresses
from quire_gateway.access.admission import Principal

ALICE, ANYBODY = Principal(tenant="alice", salts=(b"a" * 16,)), Principal()


def _address(ucx: bytes, shared: bytes = b"") -> bytes:
    return struct.pack("<3sH", b"QN1", len(ucx)) + ucx + shared


def _target(ucx: bytes, shared: bytes = b"") -> RdmaTarget:
    return RdmaTarget(_address(ucx, shared), 4096, 64, b"k")


class _Nodes:
    """Notes the nonces that are sent; they arrive, or nothing is reached."""

    def __init__(self, *, lost: bool = False) -> None:
        self.nonces: list[bytes] = []
        self.lost = lost
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def send_nonce(self, address: str, target: RdmaTarget, nonce: bytes, tenant: str) -> None:
        self.nonces.append(nonce)
        await self.go_on.wait()
        if self.lost:
            raise PeerLost("nothing there")


def _addresses(nodes: _Nodes, *, required: bool = True, storage: int = 1) -> WorkerAddresses:
    about = StorageInfo(worker_address=_address(b"node"))
    live = {f"s{at}": Node(node_id=f"s{at}", about=about, grpc_address="a") for at in range(storage)}
    return WorkerAddresses(required=required, secrets=[b"s" * 32], nodes=lambda: live, sender=nodes, clock=FakeClock())


async def _proved(addresses: WorkerAddresses, nodes: _Nodes, target: RdmaTarget) -> RdmaTarget:
    challenge, nonce, proof = b"", b"", b""
    while not proof:
        challenge, proof = await addresses.prove(ALICE, target, challenge, nonce)
        await asyncio.sleep(0)
        nonce = nodes.nonces[-1]
    return replace(target, proof=proof)


async def test_two_nonces_and_a_proof() -> None:
    nodes = _Nodes()
    addresses = _addresses(nodes)
    target = await _proved(addresses, nodes, _target(b"mine"))
    assert [len(nonce) for nonce in nodes.nonces] == [16, 32], "nothing is written before the first one is shown"
    addresses.check(ALICE, target)
    addresses.check(ALICE, replace(target, address=1 << 40, worker_address=_address(b"mine", b"and shared memory")))
    for other in (
        replace(target, worker_address=_address(b"others")),
        replace(target, worker_address=_address(b"node")),
        replace(target, proof=b""),
    ):
        with pytest.raises(AddressUnproven):
            addresses.check(ALICE, other)
    with pytest.raises(AddressUnproven):
        addresses.check(Principal(tenant="mallory", salts=(b"m" * 16,)), target)
    with pytest.raises(TargetInvalid):
        addresses.check(ALICE, replace(target, worker_address=b"odd"))


async def test_a_proof_has_its_time() -> None:
    nodes, clock = _Nodes(), FakeClock()
    addresses = WorkerAddresses(
        required=True,
        secrets=[b"s" * 32],
        nodes=lambda: {"s": Node(node_id="s", about=StorageInfo(worker_address=_address(b"node")), grpc_address="a")},
        sender=nodes,
        clock=clock,
    )
    target = await _proved(addresses, nodes, _target(b"mine"))
    await clock.advance(PROOF_MS / 1000 + 1)
    with pytest.raises(AddressUnproven):
        addresses.check(ALICE, target)


async def test_who_is_not_asked() -> None:
    """Members, and all where it is not required, which puts the fault back; memory that is shared."""
    addresses = _addresses(_Nodes())
    addresses.check(ANYBODY, _target(b"node"))
    addresses.check(Principal(), _target(b"node"))
    addresses.check(ALICE, _target(b"", b"shared"))
    lenient = _addresses(_Nodes(), required=False)
    lenient.check(ALICE, _target(b"others"))
    with pytest.raises(AddressUnproven, match="storage node"):
        lenient.check(ALICE, _target(b"node"))
    assert await lenient.prove(ALICE, _target(b"mine"), b"", b"") == (b"", b"")


async def test_an_answer_tells_nothing_of_what_is_there() -> None:
    """No port is found by asking: the answer does not wait for the nonce, and is the same where nothing is."""
    nodes = _Nodes(lost=True)
    nodes.go_on.clear()
    addresses = _addresses(nodes)
    challenge, proof = await addresses.prove(ALICE, _target(b"closed port"), b"", b"")
    assert challenge and not proof
    nodes.go_on.set()
    await addresses.close()


async def test_one_tenant_leaves_room_to_others() -> None:
    nodes = _Nodes()
    nodes.go_on.clear()
    addresses, refused = _addresses(nodes), 0
    for _ in range(200):
        try:
            await addresses.prove(ALICE, _target(b"mine"), b"", b"")
        except TooManyRequests:
            refused += 1
    assert refused >= 100
    bob = Principal(tenant="bob", salts=(b"b" * 16,))
    assert (await addresses.prove(bob, _target(b"his"), b"", b""))[0]
    await addresses.close()
    with pytest.raises(NoStorageNode):
        await _addresses(nodes, storage=0).prove(ALICE, _target(b"mine"), b"", b"")
