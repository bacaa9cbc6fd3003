"""The public gRPC frontend."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Final

from quire.model.errors import DeadlineExceeded, InvalidRequest, NotAllowed
from quire.model.hashing import tenant_name
from quire.model.images import ImageAttributes, ImageEntry
from quire.model.keys import ChunkKeys, KeySample
from quire.model.lease import LeaseSigner
from quire.model.nodes import Location
from quire.model.outcome import FetchSummary, NodeOutcome, StoreSummary
from quire.model.ranges import ChunkRange
from quire.wire import convert, convert_images
from quire.wire.channels import call
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1 import images_pb2, orchestrator_pb2
from quire.wire.v1.gateway_pb2_grpc import (
    GatewayServiceServicer,
)
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire_gateway.access.addresses import PROOF_MS, WorkerAddresses
from quire_gateway.access.admission import Admission, Need, Principal
from quire_gateway.access.key_derivation import KeyDerivation
from quire_gateway.access.token_hashing import TokenHashing
from quire_gateway.config import GatewayConfig
from quire_gateway.core.preconditions import Tags
from quire_gateway.grpc.pictures import PictureRequests
from quire_gateway.grpc.sessions import Sessions
from quire_gateway.images.latents import LatentGateway
from quire_gateway.images.pictures import PictureUploads
from quire_gateway.images.reads import ImageReads, ImageServed
from quire_gateway.images.service import ImageService
from quire_gateway.kv.following import Followed, Following
from quire_gateway.kv.retention import Retention
from quire_gateway.kv.transfers import FetchCall, KvTransfers, StoreCall, StorePlacement
from quire_gateway.ports import LayerArrived
from quire_server.clock import Clock
from quire_server.core.advice import FetchAdvice
from quire_server.lookups import LookupAnswer, Lookups, Question

_WINDOW_US_MAX: Final = 0xFFFFFFFF
_OTHER_SHARDS_MAX: Final = 255


class GatewayServicer(GatewayServiceServicer):
    """Look-ups and transfers are the gateway's own; other short requests are forwarded to the orchestrator unchanged.

    A session's requests are answered by the same methods.
    """

    def __init__(
        self,
        *,
        config: GatewayConfig,
        gateway: KvTransfers,
        images: ImageReads,
        latents: LatentGateway,
        own: ImageService,
        pictures: PictureUploads,
        admission: Admission,
        lookups: Lookups,
        following: Following,
        orchestrator: OrchestratorServiceStub,
        retention: Retention,
        derivation: KeyDerivation,
        addresses: WorkerAddresses,
        clock: Clock,
    ) -> None:
        self._timeout_s = config.control_timeout_s
        self._gateway = gateway
        self._images = images
        self._latents = latents
        self._own = own
        self._pictures = PictureRequests(own, pictures, config.http_body_max)
        self._admission = admission
        self._lookups = lookups
        self._following = following
        self._orchestrator = orchestrator
        self._retention = retention
        self._derivation = derivation
        self._addresses = addresses
        self._clock = clock
        self._hashing = TokenHashing()
        self._leases = LeaseSigner(*config.secrets)
        self.sessions = Sessions(config=config, methods=self, admission=admission, release=lookups.release, clock=clock)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        async for response in self.sessions.serve(request_iterator, context):
            yield response

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        principal = await self._admission.caller(context)
        with self._admission.admit(principal, Need(salt=request.namespace.tenant_salt)):
            questions = [await self._question(shard, principal) for shard in _by_shard(request)]
            response, *other_shards = map(_found, await self._lookups.lookup_all(questions), questions)
            response.other_shards.extend(other_shards)
            return response

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        principal = await self._admission.caller(context)
        lease = self._leases.open(request.lease)  # one that has expired can be given back
        with self._admission.admit(principal, Need(tenant=lease.tenant.tenant)):
            return pb.ReleaseResponse(released=await self._lookups.release(request.lease))

    async def Evict(self, request: pb.EvictRequest, context: Any) -> pb.EvictResponse:
        principal = await self._admission.caller(context)
        with self._admission.admit(principal, Need(write=True, salt=request.namespace.tenant_salt)):
            namespace, keys = convert.namespace_from(request.namespace), ChunkKeys(request.chunk_keys)
            request.chunk_keys = (await self._derivation.derive(namespace.tag, keys)).packed
            response: pb.EvictResponse = await self._forward(self._orchestrator.Evict, request)
            return response

    async def Demote(self, request: pb.DemoteRequest, context: Any) -> pb.DemoteResponse:
        principal = await self._admission.caller(context)
        with self._admission.admit(principal, Need(write=True, salt=request.namespace.tenant_salt)):
            namespace, keys = convert.namespace_from(request.namespace), ChunkKeys(request.chunk_keys)
            request.chunk_keys = (await self._derivation.derive(namespace.tag, keys)).packed
            response: pb.DemoteResponse = await self._forward(self._orchestrator.Demote, request)
            return response

    async def Assign(self, request: pb.AssignRequest, context: Any) -> pb.AssignResponse:
        principal = await self._admission.caller(context)
        with self._admission.admit(principal, Need(salt=request.namespace.tenant_salt)):
            namespace, keys = convert.namespace_from(request.namespace), ChunkKeys(request.chunk_keys)
            request.chunk_keys = (await self._derivation.derive(namespace.tag, keys)).packed
            response: pb.AssignResponse = await self._forward(self._orchestrator.Assign, request)
            return response

    async def Retain(self, request: pb.RetainRequest, context: Any) -> pb.RetainResponse:
        principal = await self._admission.caller(context)
        with self._admission.admit(principal, Need(write=True, salt=request.namespace.tenant_salt)):
            namespace = convert.namespace_from(request.namespace)
            keys = await self._derivation.derive(namespace.tag, ChunkKeys(request.chunk_keys))
            if not request.ttl_ms:
                return pb.RetainResponse(chunks=await self._retention.end(namespace, keys, request.holder))
            chunks, until_ms = await self._retention.retain(namespace, keys, request.ttl_ms, request.holder)
            return pb.RetainResponse(chunks=chunks, until_ms=until_ms)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Any) -> pb.PrefetchResponse:
        principal = await self._admission.caller(context)
        namespace, keys = convert.namespace_from(request.namespace), ChunkKeys(request.chunk_keys)
        payload = namespace.layout.payload_bytes(len(keys))
        with self._admission.admit(principal, Need(salt=request.namespace.tenant_salt, payload=payload)):
            keys = await self._derivation.derive(namespace.tag, keys)
            match = await self._lookups.lookup(Question(namespace, keys))
            promoted = await self._gateway.prefetch(match, namespace, keys, request.within_ms / 1000)
            return pb.PrefetchResponse(matched_chunks=match.matched_chunks, chunks_in_memory=promoted)

    async def PutLatent(self, request: images_pb2.PutLatentRequest, context: Any) -> images_pb2.PutLatentResponse:
        principal = await self._admission.caller(context)
        source = convert.target_from(request.source)
        self._addresses.check(principal, source)
        need = Need(write=True, payload=request.record_bytes, memory=source.length)
        with self._admission.admit(principal, need):
            entry = await self._own.take_record(
                principal.tenant,
                request.image_id,
                source,
                request.record_bytes,
                durability=convert.durability_from(request.durability),
                expected=convert_images.expected_from(request.expected),
                attributes=ImageAttributes(request.ttl_ms, tuple(request.metadata.items()), request.provenance),
                allow_unknown_vae=request.allow_unknown_vae,
            )
        return images_pb2.PutLatentResponse(entry=_for_client(entry))

    async def PutPicture(self, request: images_pb2.PutPictureRequest, context: Any) -> images_pb2.PutPictureResponse:
        principal = await self._admission.caller(context)
        source = convert.target_from(request.source)
        self._addresses.check(principal, source)
        with self._admission.admit(principal, Need(write=True, payload=request.picture_bytes, memory=source.length)):
            entry, encoded = await self._pictures.put(principal.tenant, request, source)
        return images_pb2.PutPictureResponse(
            entry=_for_client(entry),
            psnr_db=encoded.psnr_db,
            error_max=encoded.error_max,
            first_of_several=encoded.first_of_several,
        )

    async def GetLatent(self, request: images_pb2.GetLatentRequest, context: Any) -> images_pb2.GetLatentResponse:
        principal = await self._admission.caller(context)
        target = convert.target_from(request.target)
        self._addresses.check(principal, target)
        with self._admission.admit(principal, Need(payload=target.length, memory=target.length)):
            entry = await self._latents.get(principal.tenant, request.image_id, target)
        return images_pb2.GetLatentResponse(entry=_for_client(entry))

    async def HeadImage(self, request: images_pb2.HeadImageRequest, context: Any) -> images_pb2.HeadImageResponse:
        principal = await self._admission.caller(context)
        request.tenant = principal.tenant
        with self._admission.admit(principal, Need()):
            response: images_pb2.HeadImageResponse = await self._forward(self._orchestrator.HeadImage, request)
            response.entry.ClearField("record_name")
            return response

    async def DeleteImage(self, request: images_pb2.DeleteImageRequest, context: Any) -> images_pb2.DeleteImageResponse:
        principal = await self._admission.caller(context)
        request.tenant = principal.tenant
        with self._admission.admit(principal, Need(write=True)):
            response: images_pb2.DeleteImageResponse = await self._forward(self._orchestrator.DeleteImage, request)
            return response

    async def ListImages(self, request: images_pb2.ListImagesRequest, context: Any) -> images_pb2.ListImagesResponse:
        principal = await self._admission.caller(context)
        request.tenant = principal.tenant
        with self._admission.admit(principal, Need()):
            response: images_pb2.ListImagesResponse = await self._forward(self._orchestrator.ListImages, request)
            for entry in response.entries:
                entry.ClearField("record_name")
            return response

    async def GetImage(self, request: images_pb2.GetImageRequest, context: Any) -> images_pb2.GetImageResponse:
        principal = await self._admission.caller(context)
        rendering = convert_images.rendering_from(request.rendering)
        target = convert.target_from(request.target) if request.if_none_match != "*" else None
        if target is not None:
            self._addresses.check(principal, target)
        length, tags = target.length if target is not None else 0, Tags.parse(request.if_none_match)
        with self._admission.admit(principal, Need(payload=length, memory=length)):
            image = await self._images.describe(principal.tenant, request.image_id, rendering)
            served = ImageServed(image.entry, image.etag)
            if target is not None and not tags.weakly(image.etag):
                served = await self._images.render(principal.tenant, image, target)
        return images_pb2.GetImageResponse(
            entry=_for_client(served.entry),
            length=served.length,
            etag=served.etag,
            source=served.source,
            decoder=served.decoder,
            stages_us=served.stages_us,
        )

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        principal = await self._admission.caller(context)
        with self._admission.admit(principal, Need()):
            listing = orchestrator_pb2.ListNodesRequest(with_away=request.with_away, with_checks=True)
            listed = await self._forward(self._orchestrator.ListNodes, listing)
            if principal.tenant:  # what the others have is none of its business
                for node in listed.nodes:
                    node.ClearField("tenant_stats")
                    node.ClearField("running")
            return pb.StatusResponse(nodes=listed.nodes, checks=listed.checks, checked=listed.checked)

    async def ProveAddress(self, request: pb.ProveAddressRequest, context: Any) -> pb.ProveAddressResponse:
        principal = await self._admission.caller(context)
        target = convert.target_from(request.target)
        with self._admission.admit(principal, Need(memory=target.length)):
            challenge, proof = await self._addresses.prove(principal, target, request.challenge, request.nonce)
        return pb.ProveAddressResponse(challenge=challenge, proof=proof, good_ms=PROOF_MS if proof else 0)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.FetchResponse]:
        principal = await self._admission.caller(context)
        lease, keys = self._leases.open(request.lease), ChunkKeys(request.descriptor.chunk_keys)
        if lease.namespace:
            keys = await self._derivation.derive(lease.namespace, keys)
        fetch = FetchCall(
            found=lease,
            delivery_id=convert.transfer_id_from(request.delivery_id, "delivery_id"),
            descriptor=convert.descriptor_from(request.descriptor, keys),
            urgency=convert.urgency_from(request),
            layers_in_stream=request.layers_in_stream,
            transfer_ms=request.transfer_ms,
            namespace=lease.namespace,
        )
        lease.check_fresh(self._clock.now_ms())
        lease.check_keys(fetch.descriptor.keys)
        self._addresses.check(principal, fetch.descriptor.target)
        payload = fetch.descriptor.payload_bytes
        with self._admission.admit(principal, Need(tenant=lease.tenant.tenant, payload=payload, memory=payload)):
            async with contextlib.aclosing(self._gateway.fetch(fetch)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield _fetched(event)

    async def Retrieve(self, request: pb.RetrieveRequest, context: Any) -> AsyncIterator[pb.RetrieveResponse]:
        """Send the match before any node is called: without it a client knows of no node."""
        principal = await self._admission.caller(context)
        self._admission.check(principal, Need(salt=request.lookup.namespace.tenant_salt))
        if request.lookup.other_shards:
            raise InvalidRequest("a delivery is of one shard", field="lookup.other_shards")
        question = await self._question(request.lookup, principal)
        if question.sample is not None:
            raise InvalidRequest("a delivery needs all keys", field="lookup.sample")
        requested = convert.descriptor_from(request.descriptor, question.keys)
        urgency = convert.urgency_from(request)
        self._addresses.check(principal, requested.target)
        if question.unchained and requested.chunks < len(requested.keys):
            raise InvalidRequest("unchained chunks are all delivered", field="descriptor.first_chunk")
        delivery_id = convert.transfer_id_from(request.delivery_id, "delivery_id")
        payload, salt = requested.payload_bytes, request.lookup.namespace.tenant_salt
        began_s, follow_s = self._clock.monotonic_s(), request.follow_ms / 1000
        if follow_s:  # it holds nothing of the tenant's that the awaited stores may need
            part_s = request.follow_part_ms / 1000 or math.inf
            await self._following.until_they_arrive(question, follow_s, first=requested.first_chunk, part_s=part_s)
        with self._admission.admit(principal, Need(salt=salt, payload=payload, memory=payload)):
            followed = await (self._following.lookup(question) if follow_s else self._readable(question))
            match = followed.readable
            take = match.advice.chunks if match.advice is not None else followed.chunks
            yield pb.RetrieveResponse(found=_found(match, question, followed.arriving))
            if take <= requested.first_chunk:
                return
            descriptor = requested.pick(match.there) if question.unchained else requested.among(followed.chunks, take)
            advised_us = _window_us(match.advice) if match.advice is not None else 0
            fetch = FetchCall(
                found=match,
                delivery_id=delivery_id,
                descriptor=descriptor,
                urgency=urgency if urgency.is_known else replace(urgency, compute_window_us=advised_us),
                layers_in_stream=request.layers_in_stream,
                unchained=question.unchained,
                transfer_ms=_remaining_ms(request.transfer_ms, self._clock.monotonic_s() - began_s),
                namespace=question.scope,
                arriving=followed.arriving,
                follow_s=max(0.0, follow_s - (self._clock.monotonic_s() - began_s)),
            )
            async with contextlib.aclosing(self._gateway.fetch(fetch)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield pb.RetrieveResponse(delivery=_fetched(event))

    async def _readable(self, question: Question) -> Followed:
        return Followed(await self._lookups.lookup(question), ())

    async def Store(self, request: pb.StoreRequest, context: Any) -> AsyncIterator[pb.StoreResponse]:
        principal = await self._admission.caller(context)
        namespace = convert.namespace_from(request.namespace)
        store = StoreCall(
            namespace=namespace,
            keys=await self._derivation.derive(namespace.tag, ChunkKeys(request.chunk_keys)),
            first=request.first_chunk,
            store_id=convert.transfer_id_from(request.store_id, "store_id"),
            source=convert.target_from(request.source),
            durability=convert.durability_from(request.durability),
            on_existing=convert.on_existing_from(request.on_existing),
            source_complete=request.source_complete,
            tenant=tenant_name(request.namespace.tenant_salt),
            unchained=request.unchained,
            transfer_ms=request.transfer_ms,
        )
        self._addresses.check(principal, store.source)
        payload = store.namespace.layout.payload_bytes(max(0, len(store.keys) - store.first))
        need = Need(write=True, salt=request.namespace.tenant_salt, payload=payload, memory=payload)
        with self._admission.admit(principal, need):
            async with contextlib.aclosing(self._gateway.store(store)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield _stored(event)

    async def _question(self, request: pb.LookupRequest, principal: Principal) -> Question:
        namespace = convert.namespace_from(request.namespace)
        if bool(request.tokens) + bool(request.chunk_keys) + request.HasField("sample") > 1:
            raise InvalidRequest("give keys, tokens, or a sample of keys", field="chunk_keys")
        if request.tokens:
            keys = await self._hashing.keys(namespace, request.tokens, principal.tenant or namespace.tenant)
        else:
            keys = ChunkKeys(request.sample.keys or request.chunk_keys)
        keys, sample = await self._derivation.derive(namespace.tag, keys), None
        if request.HasField("sample"):
            sample = KeySample(request.sample.count, request.sample.whole_bucket, keys.packed)
            keys = ChunkKeys(b"")
        return Question(
            namespace=namespace,
            keys=keys,
            lease_ttl_ms=request.lease_ttl_ms,
            client=Location(request.host, request.zone),
            prompt_tokens=request.prompt_tokens,
            device=request.device,
            unchained=request.unchained,
            scope=self._derivation.scope(namespace.tag),
            sample=sample,
        )

    async def _forward(self, method: Any, request: Any) -> Any:
        return await call(method, request, timeout_s=self._timeout_s)


def _for_client(entry: ImageEntry) -> images_pb2.ImageEntry:
    """An image's entry for a client: without the record's name in the chunk store."""
    message = convert_images.image_to(entry)
    message.ClearField("record_name")
    return message


def _by_shard(request: pb.LookupRequest) -> list[pb.LookupRequest]:
    """Return a request for each shard. Raises `InvalidRequest`, `NotAllowed`."""
    count = len(request.other_shards)
    if count > _OTHER_SHARDS_MAX:
        raise InvalidRequest(f"{count} other shards, {_OTHER_SHARDS_MAX} at most", field="other_shards")
    if count and (request.tokens or request.prompt_tokens):
        raise InvalidRequest("look-ups of several shards are by keys, without advice", field="other_shards")
    if any(shard.namespace.tenant_salt != request.namespace.tenant_salt for shard in request.other_shards):
        raise NotAllowed("another tenant's shard")
    requests = [request]
    for shard in request.other_shards:
        shard_request = pb.LookupRequest(namespace=shard.namespace, chunk_keys=shard.chunk_keys)
        if shard.HasField("sample"):
            shard_request.sample.CopyFrom(shard.sample)
        shard_request.lease_ttl_ms, shard_request.unchained = request.lease_ttl_ms, request.unchained
        shard_request.host, shard_request.zone = request.host, request.zone
        requests.append(shard_request)
    return requests


def _remaining_ms(transfer_ms: int, waited_s: float) -> int:
    """Return the remaining time for which a client lends its memory; 0 for as long as this gateway permits.

    Raises `DeadlineExceeded` if it is over.
    """
    left_ms = transfer_ms - math.ceil(waited_s * 1000)
    if transfer_ms and left_ms <= 0:
        raise DeadlineExceeded("the client's memory was lent for a shorter time than its chunks were waited for")
    return left_ms if transfer_ms else 0


def _found(match: LookupAnswer, question: Question, arriving: Sequence[ChunkRange] = ()) -> pb.LookupResponse:
    present = set(match.there)
    arriving_chunks = sum(run.count for run in arriving)
    return pb.LookupResponse(
        found=bytes(at in present for at in range(len(question.keys))) if question.unchained else b"",
        matched_chunks=match.matched_chunks + arriving_chunks,
        arriving_chunks=arriving_chunks,
        lease=match.token,
        lease_expires_ms=match.lease.expires_ms if match.lease is not None else 0,
        ranges=convert.ranges_to([*match.ranges, *arriving]),
        nodes=convert.addresses_to(match.nodes, grpc=False),
        index_us=match.index_us,
        advice=_advice(match.advice) if match.advice is not None else None,
        object_ranges=convert.ranges_to(match.objects.ranges),
        object_speeds={name: convert.object_speed_to(speed) for name, speed in match.objects.speeds.items()},
        wanted_bucket=match.wanted_bucket,
    )


def _advice(advice: FetchAdvice) -> pb.Advice:
    return pb.Advice(
        take_chunks=advice.chunks,
        compute_window_us=_window_us(advice),
        rate_bytes_per_s=advice.rate_bytes_per_s,
        ttft_us=round(advice.ttft_s * 1e6),
        ttft_all_us=round(advice.ttft_all_s * 1e6),
        ttft_none_us=round(advice.ttft_none_s * 1e6),
    )


def _window_us(advice: FetchAdvice) -> int:
    return min(_WINDOW_US_MAX, round(advice.window_s * 1e6))


def _fetched(event: LayerArrived | NodeOutcome | FetchSummary) -> pb.FetchResponse:
    match event:
        case LayerArrived(node_id, layer):
            return pb.FetchResponse(layer=pb.LayerArrived(layer=layer, node_id=node_id))
        case NodeOutcome():
            return pb.FetchResponse(node=convert.outcome_to(event))
        case FetchSummary(usable, moved_bytes, _, delivered):
            return pb.FetchResponse(
                summary=pb.FetchSummary(delivered=delivered, usable_chunks=usable, bytes=moved_bytes)
            )


def _stored(event: StorePlacement | NodeOutcome | StoreSummary) -> pb.StoreResponse:
    match event:
        case StorePlacement(ranges, nodes, known):
            placement = pb.StorePlacement(
                ranges=convert.ranges_to(ranges),
                nodes=convert.addresses_to(nodes, grpc=False),
                known_chunks=known,
            )
            return pb.StoreResponse(placement=placement)
        case NodeOutcome():
            return pb.StoreResponse(node=convert.outcome_to(event))
        case StoreSummary(stored, known, moved_bytes):
            return pb.StoreResponse(
                summary=pb.StoreSummary(stored_chunks=stored, known_chunks=known, bytes=moved_bytes)
            )
