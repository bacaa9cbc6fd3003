"""The public gRPC door: decode, call, answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from quire import PROTOCOL_VERSION
from quire.client import ImageClient, QuireClient
from quire.client.exchange import Exchange
from quire.clock import SystemClock
from quire.keys import ChunkKeys
from quire.metadata import AccessKeys, Buckets, connect
from quire.nodes import Node, Role
from quire.outcome import NodeOutcome
from quire.rpc import convert
from quire.rpc.channels import ChannelPool, call
from quire.rpc.server import Server
from quire.rpc.service import run_service, serve_member
from quire.v1 import gateway_pb2 as pb
from quire.v1 import images_pb2, orchestrator_pb2
from quire.v1.gateway_pb2_grpc import GatewayServiceServicer, add_GatewayServiceServicer_to_server
from quire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire_gateway.adapters.blobs import ObstoreBlobs, ObstoreChunks
from quire_gateway.adapters.cluster import (
    GrpcAllocator,
    GrpcCatalogue,
    GrpcChunkIndex,
    GrpcDecoders,
    GrpcRouter,
    GrpcStorageNodes,
)
from quire_gateway.config import PREFIX, GatewayConfig
from quire_gateway.http import HttpDoor
from quire_gateway.images import ImageGateway
from quire_gateway.latents import LatentGateway
from quire_gateway.leases import Leases
from quire_gateway.ports import LayerArrived
from quire_gateway.runtime import FetchCall, FetchSummary, Gateway, Placement, StoreCall, StoreSummary
from quire_gateway.s3.access import CHUNKS_BUCKET, LATENTS_BUCKET, Authenticator
from quire_gateway.s3.door import S3Door
from quire_gateway.s3.house import WHOLE_BODIES, House
from quire_gateway.s3.rdma import RdmaRequests
from quire_gateway.s3.spaces import Space
from quire_gateway.s3.special import ChunkSpace, LatentSpace


class GatewayServicer(GatewayServiceServicer):
    """Short requests go on to the orchestrator as they are; transfers are the gateway's own."""

    def __init__(
        self,
        config: GatewayConfig,
        gateway: Gateway,
        images: ImageGateway,
        latents: LatentGateway,
        channels: ChannelPool,
    ) -> None:
        self._timeout_s = config.control_timeout_s
        self._gateway = gateway
        self._images = images
        self._latents = latents
        self._orchestrator: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(config.orchestrator_address))

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        response: pb.LookupResponse = await self._forward(self._orchestrator.Lookup, request)
        return response

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        response: pb.ReleaseResponse = await self._forward(self._orchestrator.Release, request)
        return response

    async def Evict(self, request: pb.EvictRequest, context: Any) -> pb.EvictResponse:
        response: pb.EvictResponse = await self._forward(self._orchestrator.Evict, request)
        return response

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Any) -> pb.SetPolicyResponse:
        response: pb.SetPolicyResponse = await self._forward(self._orchestrator.SetPolicy, request)
        return response

    async def SetTenant(self, request: pb.SetTenantRequest, context: Any) -> pb.SetTenantResponse:
        response: pb.SetTenantResponse = await self._forward(self._orchestrator.SetTenant, request)
        return response

    async def SetTheta(self, request: pb.SetThetaRequest, context: Any) -> pb.SetThetaResponse:
        response: pb.SetThetaResponse = await self._forward(self._orchestrator.SetTheta, request)
        return response

    async def PutLatent(self, request: images_pb2.PutLatentRequest, context: Any) -> images_pb2.PutLatentResponse:
        entry, durability = convert.image_from(request.entry), convert.durability_from(request.durability)
        replaced = await self._latents.put(entry, convert.target_from(request.source), durability)
        return images_pb2.PutLatentResponse(replaced=replaced)

    async def GetLatent(self, request: images_pb2.GetLatentRequest, context: Any) -> images_pb2.GetLatentResponse:
        entry = await self._latents.get(request.image_id, convert.target_from(request.target))
        return images_pb2.GetLatentResponse(entry=convert.image_to(entry))

    async def HeadImage(self, request: images_pb2.HeadImageRequest, context: Any) -> images_pb2.HeadImageResponse:
        response: images_pb2.HeadImageResponse = await self._forward(self._orchestrator.HeadImage, request)
        return response

    async def DeleteImage(self, request: images_pb2.DeleteImageRequest, context: Any) -> images_pb2.DeleteImageResponse:
        response: images_pb2.DeleteImageResponse = await self._forward(self._orchestrator.DeleteImage, request)
        return response

    async def ListImages(self, request: images_pb2.ListImagesRequest, context: Any) -> images_pb2.ListImagesResponse:
        response: images_pb2.ListImagesResponse = await self._forward(self._orchestrator.ListImages, request)
        return response

    async def GetImage(self, request: images_pb2.GetImageRequest, context: Any) -> images_pb2.GetImageResponse:
        rendering = convert.rendering_from(request.rendering)
        target = convert.target_from(request.target) if request.if_none_match != "*" else None
        served = await self._images.get(request.image_id, rendering, target, request.if_none_match)
        return images_pb2.GetImageResponse(
            entry=convert.image_to(served.entry),
            length=served.length,
            etag=served.etag,
            source=served.source,
            decoder=served.decoder,
            stages_us=served.stages_us,
        )

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        listed = await self._forward(self._orchestrator.ListNodes, orchestrator_pb2.ListNodesRequest())
        return pb.StatusResponse(nodes=listed.nodes)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.FetchResponse]:
        fetch = FetchCall(
            request.lease,
            convert.transfer_id_from(request.delivery_id, "delivery_id"),
            convert.descriptor_from(request.descriptor),
            [convert.segment_from(segment) for segment in request.segments],
            request.compute_window_us,
            request.layers_in_stream,
        )
        async with contextlib.aclosing(self._gateway.fetch(fetch)) as events:  # type: ignore[type-var]
            async for event in events:
                match event:
                    case LayerArrived(node_id, layer):
                        yield pb.FetchResponse(layer=pb.LayerArrived(layer=layer, node_id=node_id))
                    case NodeOutcome():
                        yield pb.FetchResponse(node=convert.outcome_to(event))
                    case FetchSummary(delivered, usable, moved):
                        yield pb.FetchResponse(
                            summary=pb.FetchSummary(delivered=delivered, usable_chunks=usable, bytes=moved)
                        )

    async def Store(self, request: pb.StoreRequest, context: Any) -> AsyncIterator[pb.StoreResponse]:
        store = StoreCall(
            convert.namespace_from(request.namespace),
            ChunkKeys(request.chunk_keys),
            request.first_chunk,
            convert.transfer_id_from(request.store_id, "store_id"),
            convert.target_from(request.source),
            convert.durability_from(request.durability),
            convert.on_existing_from(request.on_existing),
            request.source_complete,
        )
        async with contextlib.aclosing(self._gateway.store(store)) as events:  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Placement(segments, known):
                        placed = [convert.segment_to(segment) for segment in segments]
                        yield pb.StoreResponse(placement=pb.StorePlacement(segments=placed, known_chunks=known))
                    case NodeOutcome():
                        yield pb.StoreResponse(node=convert.outcome_to(event))
                    case StoreSummary(stored, known, moved):
                        yield pb.StoreResponse(
                            summary=pb.StoreSummary(stored_chunks=stored, known_chunks=known, bytes=moved)
                        )

    async def _forward(self, method: Any, request: Any) -> Any:
        return await call(method, request, timeout_s=self._timeout_s)


def _s3_door(
    config: GatewayConfig, redis: Any, channels: ChannelPool, gateway: Gateway, leases: Leases, client: QuireClient
) -> S3Door:
    clock = SystemClock()
    authenticator = Authenticator(AccessKeys(redis, config.cluster_secret.encode()), clock)
    chunks = ObstoreChunks(config.object_url, config.object_timeout_s)
    whole_bodies = asyncio.Semaphore(WHOLE_BODIES)
    special: dict[str, Space] = {
        CHUNKS_BUCKET: ChunkSpace(chunks, GrpcChunkIndex(config, channels), whole_bodies),
        LATENTS_BUCKET: LatentSpace(ImageClient(client)),
    }
    blobs = ObstoreBlobs(config.object_url, config.object_timeout_s)
    house = House(Buckets(redis), blobs, special, clock, whole_bodies)
    rdma = RdmaRequests(house, gateway, leases, Exchange(client.transport))
    return S3Door(config, authenticator, house, rdma)


async def serve(config: GatewayConfig) -> None:
    """Run until SIGTERM."""
    channels, incarnation = ChannelPool(), os.urandom(8).hex()
    gateway = Gateway(config, GrpcAllocator(config, channels), GrpcStorageNodes(config, channels))
    server = Server(config.listen, ["quire.v1.GatewayService"], requests_max=config.requests_max)
    images = ImageGateway(GrpcRouter(config, channels), GrpcDecoders(config, channels))
    catalogue = GrpcCatalogue(config, channels)
    leases = Leases(catalogue)
    latents = LatentGateway(gateway, catalogue, leases)
    add_GatewayServiceServicer_to_server(GatewayServicer(config, gateway, images, latents, channels), server.grpc)
    # The HTTP doors are clients of this process's own gRPC door, and have its data plane.
    client = QuireClient(config.advertise or config.listen, timeout_s=config.decode_timeout_s * 2)
    await client.start()
    redis = connect(config.redis_url)
    door, s3 = HttpDoor(config, client), _s3_door(config, redis, channels, gateway, leases, client)

    def describe() -> Node:
        return Node(
            config.node_id,
            Role.GATEWAY,
            config.advertise or config.listen,
            b"",
            incarnation,
            PROTOCOL_VERSION,
            figures={"transfers": gateway.transfers},
        )

    await door.start()
    await s3.start()
    await serve_member(server, channels, config.orchestrator_address, describe, config.stop_grace_s)
    await s3.close()
    await door.close()
    await leases.close()
    await client.close()
    await redis.aclose()


def main() -> None:
    run_service("gateway", GatewayConfig, PREFIX, serve)


if __name__ == "__main__":
    main()
