"""A storage node's gRPC frontend: decode, call, answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from quire import PROTOCOL_VERSION
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest, NodeUnavailable
from quire.model.keys import ChunkKeys
from quire.model.nodes import Location, Node
from quire.model.outcome import NodeOutcome
from quire.model.permit import PermitSigner
from quire.telemetry import logger
from quire.transport import data_plane
from quire.wire import convert
from quire.wire.convert_transfers import deliver_order_from, ingest_order_from, prefetch_order_from
from quire.wire.v1 import gateway_pb2
from quire.wire.v1 import storage_pb2 as pb
from quire.wire.v1.storage_pb2_grpc import StorageServiceServicer, add_StorageServiceServicer_to_server
from quire_server import tasks
from quire_server.access.permits import PermitChecker
from quire_server.clock import Clock, ClusterClock, SystemClock
from quire_server.grpc_server import Server
from quire_server.membership.membership_log import KnownNodes
from quire_server.service import member_channels, member_tls, run_service, serve_member
from quire_server.telemetry.metrics import redundancy
from quire_storage.adapters.block_io import choose_block_io
from quire_storage.adapters.cluster import GrpcClusterIndex, GrpcPeers, GrpcRateSource
from quire_storage.adapters.drives import FileDrives
from quire_storage.adapters.nonces import NonceSender
from quire_storage.adapters.objects import ObstoreTier
from quire_storage.allocator import map_large_blocks
from quire_storage.cluster.redundancy import open_when_redundant
from quire_storage.config import PREFIX, StorageConfig
from quire_storage.node import StorageNode
from quire_storage.ports import Nonces, Ports


class StorageServicer(StorageServiceServicer):
    """Maps messages to `StorageNode` and back."""

    def __init__(
        self,
        node: StorageNode,
        node_id: str,
        permits: PermitChecker,
        clock: Clock,
        nonces: Nonces,
        incarnation: str = "",
    ) -> None:
        self._node = node
        self._nonces = nonces
        self._clock = clock
        self._node_id = node_id
        self._incarnation = incarnation
        self._permits = permits

    async def Deliver(self, request: pb.DeliverRequest, context: Any) -> AsyncIterator[pb.DeliverResponse]:
        tenant, permitted_s = self._permits.check_transfer(request)
        order = deliver_order_from(request, tenant, self._clock.monotonic_s() + permitted_s)
        async with contextlib.aclosing(self._node.deliveries.deliver(order)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, NodeOutcome):
                    yield pb.DeliverResponse(outcome=convert.outcome_to(event))
                else:
                    arrived = gateway_pb2.LayerArrived(layer=event, node_id=self._node_id)
                    yield pb.DeliverResponse(layer=arrived)

    async def Ingest(self, request: pb.IngestRequest, context: Any) -> pb.IngestResponse:
        tenant, permitted_s = self._permits.check_transfer(request)
        order = ingest_order_from(request, tenant, self._clock.monotonic_s() + permitted_s)
        return pb.IngestResponse(outcome=convert.outcome_to(await self._node.requests.ingest(order)))

    async def Stop(self, request: pb.StopRequest, context: Any) -> pb.StopResponse:
        self._permits.check(request, again=True)
        transfer_id = convert.transfer_id_from(request.transfer_id, "transfer_id")
        await self._node.requests.stop(transfer_id, request.node_index, request.refuse_ms / 1000)
        return pb.StopResponse()

    async def Drop(self, request: pb.DropRequest, context: Any) -> pb.DropResponse:
        self._permits.check(request, again=True)
        keys = list(ChunkKeys(request.chunk_keys))
        if len(keys) != len(request.generations):
            raise InvalidRequest(f"{len(request.generations)} for {len(keys)} keys", field="generations")
        meant = request.node_id, request.incarnation
        if request.node_id and meant != (self._node_id, self._incarnation):  # the release before names none
            raise NodeUnavailable(f"incarnation {request.incarnation} of {request.node_id} has ended")
        generations = dict(zip(keys, request.generations, strict=True))
        return pb.DropResponse(dropped_chunks=await self._node.requests.drop(generations))

    async def DeleteObjects(self, request: pb.DeleteObjectsRequest, context: Any) -> pb.DeleteObjectsResponse:
        self._permits.check(request, again=True)
        await self._node.requests.delete_objects(ChunkKeys(request.chunk_keys), request.until_ms)
        return pb.DeleteObjectsResponse()

    async def CompareIndex(self, request: pb.CompareIndexRequest, context: Any) -> pb.CompareIndexResponse:
        self._permits.check(request, again=True)
        return pb.CompareIndexResponse(current=self._node.requests.is_current(request.index_epoch, request.changes))

    async def Raise(self, request: pb.RaiseRequest, context: Any) -> pb.RaiseResponse:
        self._permits.check(request, again=True)
        durability = convert.durability_from(request.durability)
        return pb.RaiseResponse(
            raised=bytes(await self._node.requests.raise_level(ChunkKeys(request.chunk_keys), durability))
        )

    async def GiveUp(self, request: pb.GiveUpRequest, context: Any) -> pb.GiveUpResponse:
        self._permits.check(request, again=True)
        return pb.GiveUpResponse(gone=bytes(await self._node.requests.give_up(ChunkKeys(request.chunk_keys))))

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        self._permits.check(request, again=True)
        return pb.DescribeResponse(headers=self._node.requests.describe(ChunkKeys(request.chunk_keys)))

    async def Prefetch(self, request: pb.PrefetchChunksRequest, context: Any) -> pb.PrefetchChunksResponse:
        self._permits.check(request, again=True)
        promoted = await self._node.prefetches.prefetch(prefetch_order_from(request, self._node_id))
        return pb.PrefetchChunksResponse(in_memory=bytes(promoted))

    async def SendNonce(self, request: pb.SendNonceRequest, context: Any) -> pb.SendNonceResponse:
        tenant = self._permits.check(request, again=True)
        await self._nonces.send(convert.target_from(request.target), request.nonce, tenant)
        return pb.SendNonceResponse()

    async def Replicate(self, request: pb.ReplicateRequest, context: Any) -> pb.ReplicateResponse:
        self._permits.check(request, again=True)
        source, keys = convert.node_from(request.source), ChunkKeys(request.chunk_keys)
        generations = list(request.generations) or [0] * len(keys)
        if len(generations) != len(keys):
            raise InvalidRequest(f"{len(generations)} for {len(keys)} keys", field="generations")
        named = dict(zip(keys, generations, strict=True))
        level = convert.durability_from(request.level) if request.level else Durability.REPLICATED
        marks = await self._node.requests.replicate(source, named, level, hot=request.hot)
        return pb.ReplicateResponse(kept=bytes(marks))


async def serve(config: StorageConfig) -> None:
    """Run until SIGTERM."""
    tls = member_tls(config)
    channels, incarnation = member_channels(config, "storage"), os.urandom(8).hex()
    clock, permits = ClusterClock(SystemClock()), PermitSigner(*config.secrets)
    transport = data_plane(config.shared_memory, config.shared_memory_users, ucx_tls=config.ucx_tls)
    address, roster = config.orchestrator_address, KnownNodes()
    ports = Ports(
        index=GrpcClusterIndex(channels, address),
        rates=GrpcRateSource(channels, config.scheduler_addresses, config.link),
        peers=GrpcPeers(channels, address, roster, permits, clock),
        objects=ObstoreTier(config.object_url, config.object_timeout_s) if config.object_url else None,
        drives=partial(FileDrives, direct=config.direct, preallocate=config.preallocate),
        block_io=choose_block_io,
        clock=clock,
    )

    def describe() -> Node:
        return Node(
            node_id=config.node_id,
            about=node.info,
            grpc_address=config.advertise or config.listen,
            incarnation=incarnation,
            protocol_version=PROTOCOL_VERSION,
            location=Location(socket.gethostname(), config.zone),
            stats=node.stats,
            notes=node.notes,
            running=node.deliveries.longest_running(),
        )

    node, nonces = StorageNode(config, transport, ports, describe), NonceSender(config.ucx_tls)
    server = Server(
        config.listen,
        ["quire.v1.StorageService"],
        requests_max=config.requests_max,
        tls=tls,
        secrets=config.secrets,
        accept_unproven=config.accept_unproven,
    )
    add_StorageServiceServicer_to_server(
        StorageServicer(node, config.node_id, PermitChecker(permits, clock), clock, nonces, incarnation), server.grpc
    )
    await node.start()
    gc.freeze()  # the garbage collector does not walk what was recovered
    logger().info("data plane", transport=transport.description)

    redundancy.why = "not compared with the index yet"
    opening = open_when_redundant(redundancy, config.node_id, ports.peers, node, clock)
    rolling = asyncio.create_task(opening)
    await serve_member(server, channels, config, describe, node.on_news, clock=clock, roster=roster)
    await tasks.end([rolling])
    nonces.close()
    await node.close()


def main() -> None:
    map_large_blocks()
    run_service("storage", StorageConfig, PREFIX, serve)


if __name__ == "__main__":
    main()
