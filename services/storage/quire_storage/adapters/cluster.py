"""The orchestrator and the scheduler over gRPC."""

from __future__ import annotations

from collections.abc import Sequence

from quire.metadata.index import ChunkRecord
from quire.rpc import convert
from quire.rpc.channels import ChannelPool, call
from quire.v1 import gateway_pb2, orchestrator_pb2, scheduler_pb2
from quire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire_storage.ports import Grant

_INDEX_TIMEOUT_S = 10.0
_RATE_TIMEOUT_S = 0.25


class GrpcClusterIndex:
    """The `ClusterIndex` port."""

    def __init__(self, channels: ChannelPool, address: str) -> None:
        self._stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(address))

    async def commit(self, node_id: str, records: Sequence[ChunkRecord]) -> list[bool]:
        request = orchestrator_pb2.CommitRequest(node_id=node_id, chunks=map(convert.record_to, records))
        response = await call(self._stub.Commit, request, timeout_s=_INDEX_TIMEOUT_S)
        return [bool(mark) for mark in response.indexed]

    async def withdraw(self, node_id: str, records: Sequence[ChunkRecord]) -> None:
        request = orchestrator_pb2.WithdrawRequest(node_id=node_id, chunks=map(convert.record_to, records))
        await call(self._stub.Withdraw, request, timeout_s=_INDEX_TIMEOUT_S)

    async def release(self, lease: bytes) -> None:
        await call(self._stub.Release, gateway_pb2.ReleaseRequest(lease=lease), timeout_s=_INDEX_TIMEOUT_S)


class GrpcRateSource:
    """The `RateSource` port."""

    def __init__(self, channels: ChannelPool, address: str, link: str) -> None:
        self._stub: SchedulerServiceStub = SchedulerServiceStub(channels.get(address))
        self._link = link

    async def admit(self, delivery: str, bytes_per_layer: int, compute_window_us: int, layers_left: int) -> Grant:
        request = scheduler_pb2.AdmitRequest(
            delivery=delivery,
            link=self._link,
            bytes_per_layer=bytes_per_layer,
            compute_window_us=compute_window_us,
            layers_left=layers_left,
        )
        response = await call(self._stub.Admit, request, timeout_s=_RATE_TIMEOUT_S)
        return _grant(response.grant)

    async def renew(self, layers_left: dict[str, int]) -> list[Grant]:
        progress = [scheduler_pb2.Progress(delivery=name, layers_left=left) for name, left in layers_left.items()]
        response = await call(
            self._stub.Renew, scheduler_pb2.RenewRequest(deliveries=progress), timeout_s=_RATE_TIMEOUT_S
        )
        return [_grant(grant) for grant in response.grants]

    async def finish(self, delivery: str, bytes_moved: int, duration_s: float) -> None:
        request = scheduler_pb2.FinishRequest(delivery=delivery, bytes=bytes_moved, duration_us=int(duration_s * 1e6))
        await call(self._stub.Finish, request, timeout_s=_RATE_TIMEOUT_S)


def _grant(message: scheduler_pb2.Grant) -> Grant:
    return Grant(message.delivery, message.rate_bytes_per_s, message.epoch_left_ms / 1000)
