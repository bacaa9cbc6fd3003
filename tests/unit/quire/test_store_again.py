"""A gateway that goes away before it has placed a store costs nothing; afterwards the store has failed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from quire.client import AsyncClient
from quire.model.errors import NodeUnavailable, PoolFull
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.transport.memory import MemoryTransport
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1.gateway_pb2_grpc import GatewayServiceServicer, add_GatewayServiceServicer_to_server
from quire_server.grpc_server import Server

NAMESPACE = Namespace("m", "1", KvLayout(2, 16, 1, 32, Dtype.FP16))


class _Gateway(GatewayServiceServicer):
    """Goes away for so many stores, before or after it has placed the chunks."""

    def __init__(self, goes_away: int, *, placed: bool = False, refuses: bool = False) -> None:
        self._goes_away = goes_away
        self._placed = placed
        self._refuses = refuses
        self.store_ids: list[bytes] = []

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        return pb.StatusResponse()

    async def Store(self, request: pb.StoreRequest, context: Any) -> AsyncIterator[pb.StoreResponse]:
        self.store_ids.append(request.store_id)
        if self._refuses:
            raise PoolFull("no space")
        if len(self.store_ids) <= self._goes_away and not self._placed:
            await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        yield pb.StoreResponse(placement=pb.StorePlacement(known_chunks=2))
        if len(self.store_ids) <= self._goes_away:
            await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        yield pb.StoreResponse(summary=pb.StoreSummary(known_chunks=2))


def _gateway(goes_away: int, *, placed: bool = False, refuses: bool = False) -> _Gateway:
    return _Gateway(goes_away, placed=placed, refuses=refuses)  # type: ignore[abstract]


async def _store(gateway: _Gateway) -> None:
    server = Server("127.0.0.1:0", ["quire.v1.GatewayService"])
    add_GatewayServiceServicer_to_server(gateway, server.grpc)
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}", transport=MemoryTransport(), session=False) as client:
            buffer = client.allocate(NAMESPACE.layout.payload_bytes(2))
            session = await client.store(NAMESPACE, ChunkKeys(bytes(range(64))), 0, buffer)
            for layer in range(2):
                session.layer_ready(layer)
            assert (await session.commit()).known_chunks == 2
            assert not buffer.is_busy
    finally:
        await server.stop(0)


async def test_before_the_placement_it_is_asked_again() -> None:
    gateway = _gateway(1)
    await _store(gateway)
    assert len(set(gateway.store_ids)) == 2, "another store: a node that has heard of the first one mixes nothing up"


async def test_once_more_only_and_not_after_an_answer() -> None:
    for gateway, error, asked in (
        (_gateway(2), NodeUnavailable, 2),
        (_gateway(1, placed=True), NodeUnavailable, 1),
        (_gateway(0, refuses=True), PoolFull, 1),
    ):
        with pytest.raises(error):
            await _store(gateway)
        assert len(gateway.store_ids) == asked
