"""The scheduler's gRPC frontend: decode, call, answer."""

from __future__ import annotations

import os
from typing import Any

from quire import PROTOCOL_VERSION
from quire.model.nodes import Node
from quire.wire.v1 import scheduler_pb2 as pb
from quire.wire.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from quire_scheduler.adapters.shelf import RedisCurveShelf
from quire_scheduler.config import PREFIX, SchedulerConfig
from quire_scheduler.core.epochs import EpochGrant
from quire_scheduler.core.policy import Demand, Observation
from quire_scheduler.curve_store import CurveStore
from quire_scheduler.leadership import Leadership
from quire_scheduler.runtime import Scheduler
from quire_server.clock import ClusterClock, SystemClock
from quire_server.grpc_server import Server
from quire_server.redis import RedisLeaderLease, RedisProbe, StoredValue, connect
from quire_server.service import member_channels, member_tls, run_service, serve_member


class SchedulerServicer(SchedulerServiceServicer):
    """Maps messages to `Scheduler` and back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def Admit(self, request: pb.AdmitRequest, context: Any) -> pb.AdmitResponse:
        demand = Demand(
            request.delivery,
            request.bytes_per_layer,
            compute_window_s=request.compute_window_us / 1e6 or None,
            layers_left=request.layers_left,
            tenant=request.tenant,
            weight=request.weight or 1.0,
            cap_bytes_per_s=request.cap_bytes_per_s,
            priority=request.priority,
        )
        return pb.AdmitResponse(grant=_message(self._scheduler.admit(request.link, demand, request.held_bytes_per_s)))

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:
        grants = self._scheduler.renew({entry.delivery: entry.layers_left for entry in request.deliveries})
        return pb.RenewResponse(grants=[_message(grant) for grant in grants])

    async def Finish(self, request: pb.FinishRequest, context: Any) -> pb.FinishResponse:
        self._scheduler.finish(request.delivery)
        return pb.FinishResponse()

    async def Observe(self, request: pb.ObserveRequest, context: Any) -> pb.ObserveResponse:
        observation = Observation(
            request.tenant,
            request.bytes_per_layer,
            request.compute_window_us / 1e6,
            request.layers,
            request.rate_bytes_per_s,
            request.stall_us / 1e6,
        )
        self._scheduler.observe(request.link, observation)
        return pb.ObserveResponse()


def _message(grant: EpochGrant) -> pb.Grant:
    return pb.Grant(
        delivery=grant.delivery,
        rate_bytes_per_s=grant.rate_bytes_per_s,
        epoch=grant.epoch,
        epoch_left_ms=max(1, int(grant.left_s * 1000)),
        credit_bytes_per_s=grant.credit_bytes_per_s,
        short=grant.short,
    )


async def serve(config: SchedulerConfig) -> None:
    """Run until SIGTERM."""
    tls = member_tls(config)
    clock = ClusterClock(SystemClock())
    redis = connect(config.redis_url) if config.redis_url else None
    lease = RedisLeaderLease(redis, "scheduler") if redis is not None else None
    address, incarnation = config.advertise or config.listen, os.urandom(8).hex()
    leadership = Leadership(f"{config.node_id} {incarnation} at {address}", lease, config.lease_ms, clock)
    scheduler = Scheduler(config, clock, leadership)
    server = Server(
        config.listen,
        ["quire.v1.SchedulerService"],
        requests_max=config.requests_max,
        tls=tls,
        secrets=config.secrets,
        accept_unproven=config.accept_unproven,
    )
    add_SchedulerServiceServicer_to_server(SchedulerServicer(scheduler), server.grpc)
    channels = member_channels(config, "scheduler")

    def describe() -> Node:
        return Node(
            node_id=config.node_id,
            about=scheduler.info,
            grpc_address=address,
            incarnation=incarnation,
            protocol_version=PROTOCOL_VERSION,
            stats=scheduler.stats,
            notes={"policy": config.policy},
        )

    await leadership.start()
    memory = (
        CurveStore(scheduler, leadership, RedisCurveShelf(StoredValue(redis, "curves")), clock)
        if redis is not None
        else None
    )
    probe = RedisProbe(redis) if redis is not None else None
    if memory is not None and probe is not None:
        await memory.start()
        probe.start()
    try:
        await serve_member(server, channels, config, describe, clock=clock)
    finally:
        if memory is not None:
            await memory.close()
        await leadership.close()
        if probe is not None:
            await probe.close()
        if redis is not None:
            await redis.aclose()


def main() -> None:
    run_service("scheduler", SchedulerConfig, PREFIX, serve)


if __name__ == "__main__":
    main()
