"""Transfers that are given up or cannot begin: the buffer comes back at once where no node was told of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from quire.client import AdminClient, AsyncClient, Buffer, Client, ImageClient, StoreSession
from quire.client import client as client_module
from quire.client import store as store_module
from quire.model.errors import ConfigInvalid, DeadlineExceeded, PeerLost, TooManyRequests, Unavailable
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.transport import Quiesced
from quire.transport.memory import MemoryPeer, MemoryTransport
from quire.wire.v1 import common_pb2
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1.gateway_pb2_grpc import GatewayServiceServicer, add_GatewayServiceServicer_to_server
from quire_server.grpc_server import Server

NAMESPACE = Namespace("m", "1", KvLayout(2, 16, 1, 32, Dtype.FP16))
KEYS = ChunkKeys(bytes(range(64)))


class _Gateway(GatewayServiceServicer):
    """Places every store on a node at `address`, if that is not empty, and then says no more."""

    address = b""
    refuse = False

    async def Status(self, request: Any, context: Any) -> pb.StatusResponse:
        return pb.StatusResponse()

    async def Store(self, request: Any, context: Any) -> AsyncIterator[pb.StoreResponse]:
        if self.refuse:
            raise TooManyRequests("not now")
        if self.address:
            node = common_pb2.NodeAddress(node_id="storage-0", worker_address=self.address)
            ranges = [common_pb2.ChunkRange(node_id="storage-0", first_chunk=0, chunk_count=2)]
            yield pb.StoreResponse(placement=pb.StorePlacement(nodes=[node], ranges=ranges))
        await asyncio.Event().wait()


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[_Gateway, str]]:
    servicer = _Gateway()  # type: ignore[abstract]
    server = Server("127.0.0.1:0", ["quire.v1.GatewayService"])
    add_GatewayServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    yield servicer, f"127.0.0.1:{server.port}"
    await server.stop(0)


async def test_a_store_on_a_node_that_cannot_be_reached_gives_the_buffer_back(gateway: tuple[_Gateway, str]) -> None:
    servicer, address = gateway
    servicer.address = b"nowhere"

    class Cut(MemoryTransport):
        def connect(self, address: bytes) -> Any:
            raise PeerLost("unreachable")

    async with AsyncClient(address, transport=Cut(), session=False) as client:
        buffer = client.allocate(NAMESPACE.layout.payload_bytes(2))
        with pytest.raises(PeerLost):
            await client.store(NAMESPACE, KEYS, 0, buffer)
        assert not buffer.is_busy and not client._transfers


async def test_a_complete_store_that_was_not_placed_keeps_the_buffer(gateway: tuple[_Gateway, str]) -> None:
    """Nodes read it without being told of layers: one may be at it, whatever the gateway has not said."""
    _, address = gateway
    async with AsyncClient(address, transport=MemoryTransport(), session=False) as client:
        buffer = client.allocate(NAMESPACE.layout.payload_bytes(2))
        storing = asyncio.create_task(client.store(NAMESPACE, KEYS, 0, buffer, complete=True))
        async with asyncio.timeout(10):
            while not client._transfers:
                await asyncio.sleep(0.01)
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        (session,) = client._transfers.values()
        assert isinstance(session, StoreSession)
        with pytest.raises(DeadlineExceeded):
            await session.quiesced(0.1)
        assert buffer.is_busy
        client._transfers.clear()  # close() would wait for it


async def test_a_complete_store_that_was_turned_down_gives_the_buffer_back(gateway: tuple[_Gateway, str]) -> None:
    servicer, address = gateway
    servicer.refuse = True
    async with AsyncClient(address, transport=MemoryTransport(), session=False) as client:
        buffer = client.allocate(NAMESPACE.layout.payload_bytes(2))
        with pytest.raises(TooManyRequests):
            await client.store(NAMESPACE, KEYS, 0, buffer, complete=True)
        assert not buffer.is_busy and not client._transfers


async def test_a_store_that_is_not_waited_for_any_more_is_cancelled(gateway: tuple[_Gateway, str]) -> None:
    _, address = gateway
    async with AsyncClient(address, transport=MemoryTransport(), session=False) as client:
        buffer = client.allocate(NAMESPACE.layout.payload_bytes(2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.store(NAMESPACE, KEYS, 0, buffer), 0.2)
        async with asyncio.timeout(10):
            while client._transfers:
                await asyncio.sleep(0.01)
        assert not buffer.is_busy


@dataclass
class _Placed:
    """A store that was placed on a node that says nothing; its buffer, and the node."""

    session: StoreSession
    buffer: Buffer
    node: MemoryTransport


@contextlib.asynccontextmanager
async def _place(gateway: tuple[_Gateway, str], *, complete: bool = False) -> AsyncIterator[_Placed]:
    servicer, address = gateway
    node = MemoryTransport()
    await node.start()
    servicer.address = node.address
    async with AsyncClient(address, transport=MemoryTransport(), session=False) as client:
        buffer = client.allocate(NAMESPACE.layout.payload_bytes(2))
        yield _Placed(await client.store(NAMESPACE, KEYS, 0, buffer, complete=complete), buffer, node)
    await node.close()


@pytest.fixture
async def placed(gateway: tuple[_Gateway, str]) -> AsyncIterator[_Placed]:
    async with _place(gateway) as placed:
        yield placed


async def test_a_store_whose_node_was_never_reached_ends_soon(placed: _Placed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway says nothing: the node lives, and waits for a layer that it cannot be told of. It may still read what
    it hears of in another way, until it says that it has stopped.
    """
    monkeypatch.setattr(store_module, "_TOLD_S", 0.1)
    monkeypatch.setattr(MemoryPeer, "reached", False)
    placed.session.layer_ready(0)
    await placed.node.close()
    async with asyncio.timeout(10):
        with pytest.raises(PeerLost, match="storage-0 could not be made"):
            await placed.session.commit()
    assert placed.buffer.is_busy
    placed.session.on_message(Quiesced(b"", 0, 0, b""))
    assert not placed.buffer.is_busy


async def test_a_layer_that_cannot_be_told_ends_the_store(placed: _Placed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_TOLD_S", 0.1)
    placed.session.layer_ready(0)
    await placed.node.close()
    placed.session.layer_ready(1)
    async with asyncio.timeout(10):
        with pytest.raises(PeerLost, match="storage-0 broke"):
            await placed.session.commit()
    assert not placed.buffer.is_busy


@pytest.mark.parametrize("complete", [True, False])
async def test_a_node_that_was_told_everything_is_waited_for(
    gateway: tuple[_Gateway, str], monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """Where the layers were there from the start, or all of them were told before the connection broke."""
    monkeypatch.setattr(store_module, "_TOLD_S", 0.05)
    monkeypatch.setattr(MemoryPeer, "reached", not complete)
    async with _place(gateway, complete=complete) as placed:
        session = placed.session
        for layer in range(NAMESPACE.layout.num_layers):
            session.layer_ready(layer)
        finishing = asyncio.create_task(session.commit())
        await placed.node.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(finishing), 0.3)
        session.on_message(Quiesced(b"", 0, 0, b""))
        await session.cancel(5.0)
        with pytest.raises(PeerLost, match="cancelled"):
            await finishing


async def test_a_store_is_acknowledged_by_the_reports_of_its_nodes(gateway: tuple[_Gateway, str]) -> None:
    """The gateway has not said anything yet. Of a store that is not whole only its summary says why."""
    async with _place(gateway, complete=True) as placed:
        acknowledging = asyncio.create_task(placed.session.acknowledged())
        placed.session.on_message(Quiesced(b"", 0, 2))
        async with asyncio.timeout(5):
            await acknowledging
        assert not placed.buffer.is_busy
    async with _place(gateway, complete=True) as placed:
        acknowledging = asyncio.create_task(placed.session.acknowledged())
        placed.session.on_message(Quiesced(b"", 0, 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(acknowledging), 0.2)
        await placed.session.cancel(5.0)
        with pytest.raises(PeerLost, match="cancelled"):
            await acknowledging


async def test_waiting_for_a_cancelled_store_says_so(placed: _Placed) -> None:
    """The one that waits is told; its own task is not cancelled. Before a layer was announced the buffer is free."""
    session = placed.session
    waiting = asyncio.create_task(session.commit())
    await asyncio.sleep(0)
    await session.cancel(5.0)
    with pytest.raises(PeerLost, match="cancelled"):
        await waiting
    assert not placed.buffer.is_busy
    session.layer_ready(0)
    assert not session._announced, "nothing is told to a node after the end"


async def test_a_store_whose_layer_was_announced_stays_lent(placed: _Placed) -> None:
    """A node may be reading it: only its word, or its death, gives the buffer back."""
    placed.session.layer_ready(0)
    with pytest.raises(DeadlineExceeded):
        await placed.session.cancel(0.1)
    assert placed.buffer.is_busy
    await placed.node.close()
    await placed.session.quiesced(5.0)
    assert not placed.buffer.is_busy


async def test_memory_in_quarantine_outlives_its_client(
    gateway: tuple[_Gateway, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that fell silent may still write there, whatever became of the one who asked it."""

    async def silent(*_: Any, **__: Any) -> None:
        raise Unavailable("silence")

    _, address = gateway
    async with AsyncClient(address, transport=MemoryTransport(), session=False) as client:
        images = ImageClient(client)
        monkeypatch.setattr("quire.client.images.call", silent)
        with pytest.raises(Unavailable), images._lent(4096) as buffer:
            await images._once(None, None, buffer)
        kept = weakref.ref(buffer)
    del images, client, buffer
    gc.collect()
    assert kept() in client_module._abandoned


async def test_an_error_before_the_request_lends_nothing(gateway: tuple[_Gateway, str]) -> None:
    """Nobody has the address: a caller's mistakes did not stop all images for three minutes."""
    _, address = gateway
    async with AsyncClient(address, transport=MemoryTransport(), session=False) as client:
        with pytest.raises(ZeroDivisionError), ImageClient(client)._lent(4096):
            raise ZeroDivisionError
        assert client.quarantine.buffers == []


async def _raise(error: Exception) -> None:
    raise error


def test_a_blocking_call_ends_with_an_error_of_quire() -> None:
    client = Client("127.0.0.1:1", transport=MemoryTransport(), timeout_s=30)
    with client:
        with pytest.raises(TimeoutError, match="its own"):
            client.run(_raise(TimeoutError("its own")))
        client._timeout_s = 0.05
        with pytest.raises(DeadlineExceeded):
            client.run(asyncio.sleep(60))
        assert client.run(asyncio.sleep(0.3, "longer than the client's own time"), 30.0)
        client._timeout_s = 30
    client.close()
    assert not client._thread.is_alive()


def test_a_client_that_cannot_start_leaves_no_thread() -> None:
    class Broken(MemoryTransport):
        async def start(self) -> None:
            raise ConfigInvalid("no UCX")

    before = threading.active_count()
    with pytest.raises(ConfigInvalid), Client("127.0.0.1:1", transport=Broken()):
        pass
    assert threading.active_count() == before


def test_an_admin_client_can_be_made_outside_of_a_loop() -> None:
    admin = AdminClient("127.0.0.1:1", "s" * 32, timeout_s=30)

    async def use() -> None:
        async with admin:
            await admin.set_theta(1)

    with pytest.raises(Unavailable):
        asyncio.run(use())
