"""What a storage node tells schedulers, over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.model.errors import QuireError
from quire.model.policy import TenantPolicy
from quire.wire.channels import ChannelPool
from quire.wire.v1 import scheduler_pb2
from quire.wire.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from quire_server.grpc_server import Server
from quire_storage.adapters.cluster import GrpcRateSource
from quire_storage.ports import AdmissionRequest


class _Slow(SchedulerServiceServicer):
    """Answers when half a second is over."""

    def __init__(self) -> None:
        self.finished: list[str] = []

    async def Admit(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(0.5)
        return scheduler_pb2.AdmitResponse()

    async def Finish(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(0.5)
        self.finished.append(request.delivery)
        return scheduler_pb2.FinishResponse()


async def test_a_scheduler_that_is_held_up_hears_what_has_ended_and_holds_no_delivery_up() -> None:
    slow = _Slow()  # type: ignore[abstract]
    server = Server("127.0.0.1:0", ["quire.v1.SchedulerService"])
    add_SchedulerServiceServicer_to_server(slow, server.grpc)
    await server.start()
    channels = ChannelPool()
    try:
        source = GrpcRateSource(channels, [f"127.0.0.1:{server.port}"], "default")
        await source.finish("a")
        assert slow.finished == ["a"]
        request = AdmissionRequest(
            delivery="b", bytes_per_layer=1, compute_window_us=0, layers=1, tenant=TenantPolicy("t")
        )
        with pytest.raises(QuireError):
            await source.admit(request, 1, 0)
    finally:
        await channels.close()
        await server.stop(0)
