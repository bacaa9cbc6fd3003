"""The orchestrator and the storage nodes over gRPC."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from quire.client.memory.quarantine import Ended, may_be_in_use
from quire.model.descriptor import RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.health import Check
from quire.model.images import ExpectedImage, ImageEntry, Rendering
from quire.model.index import OBJECT_TIER
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node, NodeAddress
from quire.model.outcome import NodeOutcome
from quire.model.permit import PermitSigner
from quire.model.records import ChunkRecord
from quire.model.transfers import DeliverOrder, IngestOrder, PrefetchOrder
from quire.telemetry import logger
from quire.wire import convert, convert_images
from quire.wire.channels import ChannelPool, call, stream
from quire.wire.convert_health import checks_from
from quire.wire.convert_records import ask_about, records_to
from quire.wire.convert_transfers import deliver_order_to, ingest_order_to, prefetch_order_to
from quire.wire.v1 import decoder_pb2, images_pb2, orchestrator_pb2, storage_pb2
from quire.wire.v1.decoder_pb2_grpc import DecoderServiceStub
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire.wire.v1.storage_pb2_grpc import StorageServiceStub
from quire_gateway.config import GatewayConfig
from quire_gateway.ports import Allocated, Decoded, EncodedPicture, ImageRoute, LayerArrived
from quire_server.access.permits import member_permit, permit
from quire_server.clock import Clock

_ABANDON_TIMEOUT_S: Final = 5.0
_WARM_TIMEOUT_S: Final = 5.0
_NONCE_TIMEOUT_S: Final = 25.0
_STOP_TIMEOUT_S: Final = 2.0
"""After it, the client of an aborted transfer waits for the node's `Quiesced` on the data plane."""


class GrpcAllocator:
    """The `Allocator` port."""

    def __init__(self, config: GatewayConfig, channels: ChannelPool) -> None:
        self._config = config
        self._stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(config.orchestrator_address))

    async def allocate(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        first: int,
        durability: Durability,
        on_existing: OnExisting,
        unchained: bool,
    ) -> Allocated:
        request = orchestrator_pb2.AllocateRequest(
            namespace=convert.namespace_to(namespace),
            chunk_keys=keys.packed,
            first_chunk=first,
            durability=convert.durability_to(durability),
            on_existing=convert.on_existing_to(on_existing),
            unchained=unchained,
        )
        response = await call(self._stub.Allocate, request, timeout_s=self._config.control_timeout_s)
        ranges, nodes = convert.ranges_from(response.ranges), convert.addresses_from(response.nodes)
        return Allocated(ranges, nodes, response.known_chunks)


class GrpcStorageNodes:
    """The `StorageNodes` port."""

    def __init__(self, config: GatewayConfig, channels: ChannelPool, clock: Clock) -> None:
        self._config = config
        self._channels = channels
        self._clock = clock
        self._permits = PermitSigner(*config.secrets)

    async def deliver(
        self, address: str, order: DeliverOrder, lent_ms: int
    ) -> AsyncIterator[LayerArrived | NodeOutcome]:
        request = deliver_order_to(order)
        self._permit(request, order.tenant.tenant, lent_ms)
        method = self._stub(address).Deliver
        async for response in stream(method, request, timeout_s=self._config.transfer_timeout_s):
            if response.WhichOneof("event") == "layer":
                yield LayerArrived(response.layer.node_id, response.layer.layer)
            else:
                yield convert.outcome_from(response.outcome)

    async def ingest(self, node: NodeAddress, order: IngestOrder, lent_ms: int) -> NodeOutcome:
        request = ingest_order_to(order, node.protocol_version)
        self._permit(request, order.tenant, lent_ms)
        response = await call(
            self._stub(node.grpc_address).Ingest, request, timeout_s=self._config.transfer_timeout_s, again=False
        )
        return convert.outcome_from(response.outcome)

    async def stop(self, address: str, transfer_id: bytes, node_index: int) -> None:
        refuse_ms = round(self._config.transfer_timeout_s * 1000)
        request = storage_pb2.StopRequest(transfer_id=transfer_id, node_index=node_index, refuse_ms=refuse_ms)
        member_permit(self._permits, request, self._clock.now_ms())
        await call(self._stub(address).Stop, request, timeout_s=_STOP_TIMEOUT_S)

    async def send_nonce(self, address: str, target: RdmaTarget, nonce: bytes, tenant: str) -> None:
        request = storage_pb2.SendNonceRequest(target=convert.target_to(target), nonce=nonce)
        permit(self._permits, request, tenant, self._clock.now_ms() + round(1000 * _NONCE_TIMEOUT_S))
        await call(self._stub(address).SendNonce, request, timeout_s=_NONCE_TIMEOUT_S, again=False)

    async def prefetch(self, address: str, order: PrefetchOrder) -> int:
        request = prefetch_order_to(order)
        member_permit(self._permits, request, self._clock.now_ms())
        response = await call(self._stub(address).Prefetch, request, timeout_s=self._config.transfer_timeout_s)
        return sum(response.in_memory)

    def _permit(self, request: Any, tenant: str, lent_ms: int) -> None:
        """Permit a request: nodes may touch the client's memory no longer than the client has lent it."""
        most_ms = round(self._config.transfer_timeout_s * 1000)
        permit(self._permits, request, tenant, self._clock.now_ms() + min(lent_ms or most_ms, most_ms))

    def _stub(self, address: str) -> StorageServiceStub:
        stub: StorageServiceStub = self._channels.stub(StorageServiceStub, address)
        return stub


class GrpcRouter:
    """The `Router` port."""

    def __init__(self, config: GatewayConfig, channels: ChannelPool) -> None:
        self._timeout_s = config.control_timeout_s
        self._stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(config.orchestrator_address))

    async def route(self, entry: ImageEntry, lease_ttl_ms: int, failed: Sequence[str]) -> ImageRoute:
        request = images_pb2.RouteImageRequest(
            entry=convert_images.image_to(entry), lease_ttl_ms=lease_ttl_ms, failed=failed
        )
        answer = await call(self._stub.RouteImage, request, timeout_s=self._timeout_s)
        return ImageRoute(
            ticket=answer.ticket,
            runner=answer.runner,
            runner_address=answer.runner_address,
            owner=answer.owner,
            owner_address=answer.owner_address,
            entry=entry,
            build=answer.build,
            record=convert_images.leased_record_from(answer.record),
        )

    async def finish(self, route: ImageRoute, *, failed: bool) -> None:
        request = images_pb2.FinishImageRequest(ticket=route.ticket, failed=failed, lease=route.record.lease)
        await call(self._stub.FinishImage, request, timeout_s=self._timeout_s)


class GrpcMembers:
    """The `MemberDirectory` port."""

    def __init__(self, config: GatewayConfig, channels: ChannelPool) -> None:
        self._timeout_s = config.control_timeout_s
        self._stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(config.orchestrator_address))

    async def nodes(self) -> list[Node]:
        answer = await call(self._stub.ListNodes, orchestrator_pb2.ListNodesRequest(), timeout_s=self._timeout_s)
        return [convert.node_from(node) for node in answer.nodes]

    async def checked(self) -> tuple[list[Node], list[Check]]:
        """Return the members, also storage nodes that are away, and the checks that the cluster fails."""
        request = orchestrator_pb2.ListNodesRequest(with_away=True, with_checks=True)
        answer = await call(self._stub.ListNodes, request, timeout_s=self._timeout_s)
        return [convert.node_from(node) for node in answer.nodes], checks_from(answer)


class GrpcCatalogue:
    """The `RemoteCatalogue` port."""

    def __init__(self, config: GatewayConfig, channels: ChannelPool) -> None:
        self._timeout_s = config.control_timeout_s
        self._stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(config.orchestrator_address))

    async def put(self, tenant: str, entry: ImageEntry, expected: ExpectedImage, ttl_ms: int) -> bool:
        request = images_pb2.PutImageRequest(
            entry=convert_images.image_to(entry),
            tenant=tenant,
            expected=convert_images.expected_to(expected),
            ttl_ms=ttl_ms,
        )
        return bool((await call(self._stub.PutImage, request, timeout_s=self._timeout_s)).replaced)

    async def head(self, tenant: str, image_id: str) -> ImageEntry:
        request = images_pb2.HeadImageRequest(image_id=image_id, tenant=tenant)
        return convert_images.image_from((await call(self._stub.HeadImage, request, timeout_s=self._timeout_s)).entry)

    async def delete(self, tenant: str, image_id: str) -> bool:
        request = images_pb2.DeleteImageRequest(image_id=image_id, tenant=tenant)
        return bool((await call(self._stub.DeleteImage, request, timeout_s=self._timeout_s)).deleted)

    async def list(self, tenant: str, prefix: str, after: str, limit: int) -> tuple[list[ImageEntry], str]:
        request = images_pb2.ListImagesRequest(prefix=prefix, after=after, limit=limit, tenant=tenant)
        page = await call(self._stub.ListImages, request, timeout_s=self._timeout_s)
        return [convert_images.image_from(entry) for entry in page.entries], page.next_after


class GrpcChunkIndex:
    """The `ChunkIndex` port."""

    def __init__(self, config: GatewayConfig, channels: ChannelPool) -> None:
        self._timeout_s = config.control_timeout_s
        self._stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(config.orchestrator_address))

    async def expect_object(self, record: ChunkRecord) -> bool:
        request = orchestrator_pb2.ExpectObjectsRequest(records=records_to([record]))
        answer = await ask_about(self._stub.ExpectObjects, request, "marks", timeout_s=self._timeout_s)
        return all(answer.marks)

    async def commit_object(self, record: ChunkRecord) -> bool:
        request = orchestrator_pb2.CommitRequest(node_id=OBJECT_TIER, records=records_to([record]))
        answer = await ask_about(self._stub.Commit, request, "generations", timeout_s=self._timeout_s)
        return bool(answer.generations and answer.generations[0])

    async def lists_object(self, record: ChunkRecord) -> bool:
        request = orchestrator_pb2.LocateRequest(records=records_to([record]))
        answer = await ask_about(self._stub.Locate, request, "holders", timeout_s=self._timeout_s)
        return bool(answer.holders) and OBJECT_TIER in answer.holders[0].split(",")

    async def evict_object(self, record: ChunkRecord) -> bool:
        request = orchestrator_pb2.EvictChunksRequest(node_id="", records=records_to([record]))
        answer = await ask_about(self._stub.EvictChunks, request, "evicted", timeout_s=self._timeout_s)
        return bool(answer.evicted and answer.evicted[0])


class GrpcDecoders:
    """The `Decoders` port."""

    def __init__(self, config: GatewayConfig, channels: ChannelPool) -> None:
        self._timeout_s = config.decode_timeout_s
        self._channels = channels

    async def cached(
        self, tenant: str, address: str, entry: ImageEntry, rendering: Rendering, target: RdmaTarget
    ) -> Decoded:
        request = decoder_pb2.DecodeRequest(
            tenant=tenant,
            request_id=os.urandom(16),
            entry=convert_images.image_to(entry),
            rendering=convert_images.rendering_to(rendering),
            target=convert.target_to(target),
            cached_only=True,
        )
        return await self._ask(address, request)

    async def decode(self, tenant: str, route: ImageRoute, rendering: Rendering, target: RdmaTarget) -> Decoded:
        request = decoder_pb2.DecodeRequest(
            tenant=tenant,
            request_id=os.urandom(16),
            entry=convert_images.image_to(route.entry),
            rendering=convert_images.rendering_to(rendering),
            target=convert.target_to(target),
            owner_address=route.owner_address if route.owner != route.runner else "",
            record=convert_images.leased_record_to(route.record),
        )
        return await self._ask(route.runner_address, request)

    async def encode(
        self,
        address: str,
        source: RdmaTarget,
        length: int,
        weights_sha256: str,
        target: RdmaTarget,
        background_rgb: int,
    ) -> EncodedPicture:
        request = decoder_pb2.EncodeLatentRequest(
            source=convert.target_to(source),
            length=length,
            weights_sha256=weights_sha256,
            target=convert.target_to(target),
            background_rgb=background_rgb,
        )
        stub = self._stub(address)
        answer = await call(stub.EncodeLatent, request, timeout_s=self._timeout_s, again=False)
        return EncodedPicture(answer.record_bytes, answer.psnr_db, answer.error_max, answer.first_of_several)

    async def warm(self, address: str, entry: ImageEntry, source: RdmaTarget, length: int) -> None:
        request = decoder_pb2.WriteBackRequest(
            entry=convert_images.image_to(entry), record=convert.target_to(source), record_length=length, stored=True
        )
        await call(self._stub(address).WriteBack, request, timeout_s=_WARM_TIMEOUT_S, again=False)

    def _stub(self, address: str) -> DecoderServiceStub:
        stub: DecoderServiceStub = self._channels.stub(DecoderServiceStub, address)
        return stub

    async def _ask(self, address: str, request: decoder_pb2.DecodeRequest) -> Decoded:
        stub = self._stub(address)
        calling = asyncio.ensure_future(call(stub.Decode, request, timeout_s=self._timeout_s, again=False))
        try:
            answer = await asyncio.shield(calling)
        except asyncio.CancelledError:
            if await _abandoned(stub, request.request_id, calling):
                raise Ended from None
            raise
        return Decoded(answer.length, answer.source, answer.build, dict(answer.stages_us))


async def _abandoned(stub: DecoderServiceStub, request_id: bytes, calling: asyncio.Future[Any]) -> bool:
    """End a decode that is wanted no more. Whether the decoder has said that it goes on no more."""
    try:
        request = decoder_pb2.AbandonRequest(request_id=request_id)
        await call(stub.Abandon, request, timeout_s=_ABANDON_TIMEOUT_S, again=False)
        await asyncio.wait([calling], timeout=_ABANDON_TIMEOUT_S)
    except QuireError as error:
        logger().warning("a decode goes on that is wanted no more", error=str(error))
    finally:
        if not calling.done():
            calling.cancel()
    if not calling.done() or calling.cancelled():
        return False
    failure = calling.exception()
    return failure is None or not may_be_in_use(failure)
