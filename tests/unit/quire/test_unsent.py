"""What of a request may have reached its server, where no answer came."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from quire.model.errors import Unavailable
from quire.wire.channels import ChannelPool, call
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1.gateway_pb2_grpc import (
    GatewayServiceServicer,
    GatewayServiceStub,
    add_GatewayServiceServicer_to_server,
)
from quire_server.grpc_server import Server


class _Gateway(GatewayServiceServicer):
    """Begins, and does not end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def Status(self, request: Any, context: Any) -> pb.StatusResponse:
        self.begun.set()
        await asyncio.Event().wait()
        return pb.StatusResponse()


async def test_a_call_that_had_no_connection_was_not_sent() -> None:
    """gRPC tells by its words alone. One that was under way when its server went may have been begun."""
    servicer = _Gateway()  # type: ignore[abstract]
    server = Server("127.0.0.1:0", ["quire.v1.GatewayService"])
    add_GatewayServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    port = server.port
    channels = ChannelPool()
    stub: GatewayServiceStub = GatewayServiceStub(channels.get(f"127.0.0.1:{port}"))
    asked = asyncio.create_task(call(stub.Status, pb.StatusRequest(), timeout_s=20, again=False))
    await asyncio.wait_for(servicer.begun.wait(), 10)
    await server.stop(0)
    with pytest.raises(Unavailable) as under_way:
        await asked
    with pytest.raises(Unavailable) as refused:
        await call(stub.Status, pb.StatusRequest(), timeout_s=20, again=False)
    assert (under_way.value.unsent, refused.value.unsent) == (False, True)
    await channels.close()


async def test_a_call_that_was_tried_again_may_have_been_sent() -> None:
    sent: list[int] = []

    async def method(request: Any, *, timeout: float, metadata: Any) -> None:
        sent.append(len(sent))
        details = "failed to connect to all addresses" if len(sent) > 1 else "Socket closed"
        raise AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details)

    with pytest.raises(Unavailable) as failed:
        await call(method, pb.StatusRequest(), timeout_s=5)
    assert len(sent) == 2
    assert not failed.value.unsent
