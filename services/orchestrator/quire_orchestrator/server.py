"""The orchestrator's gRPC frontend: decode, call, answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.model.fingerprints import PRINT_BYTES
from quire.model.hashing import tenant_name
from quire.model.index import OBJECT_TIER, Listing
from quire.model.keys import ChunkKeys
from quire.model.permit import PermitSigner
from quire.wire import convert, convert_assignment, convert_health, convert_images
from quire.wire.convert_records import records_from, reporter_of
from quire.wire.index_messages import drops_from, drops_to, held_from
from quire.wire.policies import policies_to, policy_to
from quire.wire.v1 import common_pb2, gateway_pb2, images_pb2, orchestrator_pb2
from quire.wire.v1.orchestrator_pb2_grpc import (
    OrchestratorServiceServicer,
    add_OrchestratorServiceServicer_to_server,
)
from quire_orchestrator.adapters.storage import GrpcChunkHolder
from quire_orchestrator.config import PREFIX, OrchestratorConfig
from quire_orchestrator.core.routing import build_of
from quire_orchestrator.health import Health
from quire_orchestrator.images import ImageDesk
from quire_orchestrator.ports import TenantQuotas
from quire_orchestrator.runtime import Orchestrator
from quire_server.access.callers import check_own_role
from quire_server.clock import ClusterClock, SystemClock
from quire_server.grpc_server import Server
from quire_server.limits.quotas import Quotas
from quire_server.lookups import LookupAnswer, Question
from quire_server.redis import (
    CacheEvents,
    Images,
    Membership,
    PrefixIndex,
    RedisCapacity,
    RedisProbe,
    Reservations,
    RunningDecodes,
    S3Buckets,
    StoredPolicies,
    connect,
    until_open,
)
from quire_server.redis.keys.access import salt_of
from quire_server.service import member_channels, member_tls, run_service, stop_within_s, until_stopped
from quire_server.telemetry import publish
from quire_server.telemetry.build_info import CertificateLife


class OrchestratorServicer(OrchestratorServiceServicer):
    """Maps messages to the orchestrator's parts and back."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        images: ImageDesk,
        quotas: TenantQuotas,
        secrets: Sequence[bytes],
        health: Health | None = None,
    ) -> None:
        """`health`: None without checks of the cluster."""
        self._health = health
        self._cluster = orchestrator.cluster
        self._lookups = orchestrator.lookups
        self._allocation = orchestrator.allocation
        self._assigning = orchestrator.assigning
        self._evictions = orchestrator.evictions
        self._removals = orchestrator.removals
        self._reports = orchestrator.reports
        self._policies = orchestrator.policies
        self._images = images
        self._quotas = quotas
        self._secrets = secrets

    async def Allocate(
        self, request: orchestrator_pb2.AllocateRequest, context: Any
    ) -> orchestrator_pb2.AllocateResponse:
        namespace = convert.namespace_from(request.namespace)
        await self._policies.stores_in(namespace)
        ranges, nodes, stored = await self._allocation.allocate(
            ChunkKeys(request.chunk_keys),
            request.first_chunk,
            convert.durability_from(request.durability),
            convert.on_existing_from(request.on_existing),
            chunk_bytes=namespace.layout.chunk_bytes,
            unchained=request.unchained,
        )
        self._policies.check_fits(namespace, sum(run.count for run in ranges))
        return orchestrator_pb2.AllocateResponse(
            ranges=convert.ranges_to(ranges), nodes=convert.addresses_to(nodes, grpc=True), known_chunks=stored
        )

    async def Commit(self, request: orchestrator_pb2.CommitRequest, context: Any) -> orchestrator_pb2.CommitResponse:
        chunks, within = records_from(request), list(request.within)
        if within:
            marks = await self._reports.join(request.node_id, chunks, within, only_in_object=False)
            generations = [generation if mark else 0 for generation, mark in zip(within, marks, strict=True)]
        else:
            fresh, wait_ms = request.fresh_generation, request.wait_ms
            generations = await self._reports.commit(request.node_id, chunks, fresh, wait_ms)
        await self._reports.count_change(reporter_of(request))
        return orchestrator_pb2.CommitResponse(generations=generations)

    async def Join(self, request: orchestrator_pb2.JoinRequest, context: Any) -> orchestrator_pb2.JoinResponse:
        chunks, generations = records_from(request), list(request.generations)
        marks = await self._reports.join(request.node_id, chunks, generations, only_in_object=True)
        await self._reports.count_change(request.node_id)
        return orchestrator_pb2.JoinResponse(marks=bytes(marks))

    async def CommitObjects(
        self, request: orchestrator_pb2.CommitObjectsRequest, context: Any
    ) -> orchestrator_pb2.CommitObjectsResponse:
        marks = await self._reports.commit_objects(records_from(request), list(request.generations))
        await self._reports.count_change(reporter_of(request))
        return orchestrator_pb2.CommitObjectsResponse(marks=bytes(mark.value for mark in marks))

    async def ExpectObjects(
        self, request: orchestrator_pb2.ExpectObjectsRequest, context: Any
    ) -> orchestrator_pb2.ExpectObjectsResponse:
        marks, kept_ms = await self._reports.expect_objects(records_from(request))
        return orchestrator_pb2.ExpectObjectsResponse(marks=bytes(marks), kept_ms=kept_ms)

    async def Withdraw(
        self, request: orchestrator_pb2.WithdrawRequest, context: Any
    ) -> orchestrator_pb2.WithdrawResponse:
        chunks = records_from(request)
        unaware = request.node_id == OBJECT_TIER and not request.all_generations
        if unaware or (request.others_min and not request.keepers):  # of a node of the release before: copies stay
            return orchestrator_pb2.WithdrawResponse(withdrawn=bytes(len(chunks)))
        withdrawn = await self._reports.withdraw(
            request.node_id,
            chunks,
            only_in_object=request.only_in_object_tier,
            keepers=request.keepers,
            hidden=request.hidden,
        )
        await self._reports.count_change(reporter_of(request))
        return orchestrator_pb2.WithdrawResponse(withdrawn=bytes(withdrawn))

    async def GetListing(
        self, request: orchestrator_pb2.GetListingRequest, context: Any
    ) -> orchestrator_pb2.GetListingResponse:
        listing = await self._reports.listing(request.node_id)
        return orchestrator_pb2.GetListingResponse(count=listing.count, digest=listing.digest, changes=listing.changes)

    async def ListHoldings(
        self, request: orchestrator_pb2.ListHoldingsRequest, context: Any
    ) -> orchestrator_pb2.ListHoldingsResponse:
        page, cursor = await self._reports.holdings(request.node_id, request.cursor)
        return orchestrator_pb2.ListHoldingsResponse(
            fingerprints=b"".join(holding.fingerprint for holding in page),
            buckets=b"".join(holding.bucket for holding in page),
            generations=[holding.generation for holding in page],
            cursor=cursor,
        )

    async def WithdrawHeld(
        self, request: orchestrator_pb2.WithdrawHeldRequest, context: Any
    ) -> orchestrator_pb2.WithdrawHeldResponse:
        unknown = [0] * (len(request.fingerprints) // PRINT_BYTES)
        await self._reports.withdraw_held(request.node_id, held_from(request.fingerprints, request.buckets, unknown))
        await self._reports.count_change(request.node_id)
        return orchestrator_pb2.WithdrawHeldResponse()

    async def ReportDamage(
        self, request: orchestrator_pb2.ReportDamageRequest, context: Any
    ) -> orchestrator_pb2.ReportDamageResponse:
        await self._reports.damaged(request.node_id)
        return orchestrator_pb2.ReportDamageResponse()

    async def ReportRebuilt(
        self, request: orchestrator_pb2.ReportRebuiltRequest, context: Any
    ) -> orchestrator_pb2.ReportRebuiltResponse:
        await self._reports.rebuilt(request.rebuild)
        return orchestrator_pb2.ReportRebuiltResponse()

    async def Evict(self, request: gateway_pb2.EvictRequest, context: Any) -> gateway_pb2.EvictResponse:
        namespace, keys = convert.namespace_from(request.namespace), ChunkKeys(request.chunk_keys)
        evicted = await self._evictions.evict(namespace.tag, keys, request.keep_chunks)
        return gateway_pb2.EvictResponse(evicted_chunks=evicted)

    async def Demote(self, request: gateway_pb2.DemoteRequest, context: Any) -> gateway_pb2.DemoteResponse:
        namespace, keys = convert.namespace_from(request.namespace), ChunkKeys(request.chunk_keys)
        demoted = await self._evictions.demote(namespace.tag, keys, request.keep_chunks)
        return gateway_pb2.DemoteResponse(demoted_chunks=demoted)

    async def Assign(self, request: gateway_pb2.AssignRequest, context: Any) -> gateway_pb2.AssignResponse:
        namespace, keys = convert.namespace_from(request.namespace), ChunkKeys(request.chunk_keys)
        engines = convert_assignment.engines_from(request)
        return convert_assignment.assignment_to(
            await self._assigning.assign(namespace, keys, request.prompt_tokens, engines)
        )

    async def Heartbeat(
        self, request: orchestrator_pb2.HeartbeatRequest, context: Any
    ) -> orchestrator_pb2.HeartbeatResponse:
        node = convert.node_from(request.node)
        check_own_role(context, node.role.value)
        self._cluster.check(node, request.proof)
        interval_ms, news, changes = await self._cluster.heartbeat(node, request.members_version)
        listing = news.listing or Listing()
        return orchestrator_pb2.HeartbeatResponse(
            interval_ms=interval_ms,
            index_epoch=news.index_epoch,
            theta_bytes=news.theta.held_bytes,
            theta_object_bytes=news.theta.object_bytes,
            listed_chunks=listing.count,
            listed_digest=listing.digest,
            rebuild=news.rebuild,
            changes=listing.changes,
            has_listing=news.listing is not None,
            members=map(convert.node_to, changes.nodes),
            gone=changes.gone,
            all_members=changes.all,
            members_version=changes.version,
            now_ms=self._cluster.now_ms,
            state=convert.state_to(news.state) if news.state is not None else common_pb2.STORAGE_STATE_UNSPECIFIED,
        )

    async def EvictChunks(
        self, request: orchestrator_pb2.EvictChunksRequest, context: Any
    ) -> orchestrator_pb2.EvictChunksResponse:
        chunks = records_from(request)
        marks = await self._evictions.evict_chunks(request.node_id, chunks)
        return orchestrator_pb2.EvictChunksResponse(evicted=bytes(marks))

    async def Locate(self, request: orchestrator_pb2.LocateRequest, context: Any) -> orchestrator_pb2.LocateResponse:
        holders = await self._reports.locate(records_from(request))
        return orchestrator_pb2.LocateResponse(holders=[",".join(names) for names in holders])

    async def GetGenerations(
        self, request: orchestrator_pb2.GetGenerationsRequest, context: Any
    ) -> orchestrator_pb2.GetGenerationsResponse:
        generations = await self._reports.generations(request.node_id, records_from(request))
        rebuilding = request.node_id == OBJECT_TIER and await self._reports.is_rebuilding()
        return orchestrator_pb2.GetGenerationsResponse(generations=generations, rebuilding=rebuilding)

    async def TakeDrops(
        self, request: orchestrator_pb2.TakeDropsRequest, context: Any
    ) -> orchestrator_pb2.TakeDropsResponse:
        page, cursor = await self._evictions.drops(request.node_id, request.cursor)
        return orchestrator_pb2.TakeDropsResponse(drops=drops_to(page), cursor=cursor)

    async def SettleDrops(
        self, request: orchestrator_pb2.SettleDropsRequest, context: Any
    ) -> orchestrator_pb2.SettleDropsResponse:
        await self._evictions.settle_drops(request.node_id, drops_from(request.drops))
        return orchestrator_pb2.SettleDropsResponse()

    async def SetPolicy(self, request: gateway_pb2.SetPolicyRequest, context: Any) -> gateway_pb2.SetPolicyResponse:
        tag = convert.namespace_from(request.namespace).tag
        policy = await self._policies.set_namespace(tag, **_given(request, "ttl_s", "quota_bytes"))
        return gateway_pb2.SetPolicyResponse(policy=policy_to(policy))

    async def SetTenant(self, request: gateway_pb2.SetTenantRequest, context: Any) -> gateway_pb2.SetTenantResponse:
        salts = [salt_of(request.name, secret) for secret in self._secrets] if request.name else [request.tenant_salt]
        changes = _given(request, "weight", "cap_bytes_per_s", "stored_bytes_max")
        policy = await self._policies.set_tenant(tenant_name(salts[0]), **changes)
        fields = {name: getattr(policy, name) for name in ("weight", "cap_bytes_per_s", "stored_bytes_max")}
        for salt in salts[1:]:  # of the cluster's other secret, while one replaces the other
            await self._policies.set_tenant(tenant_name(salt), **fields)
        return gateway_pb2.SetTenantResponse(
            weight=policy.weight, cap_bytes_per_s=policy.cap_bytes_per_s, stored_bytes_max=policy.stored_bytes_max
        )

    async def SetTheta(self, request: gateway_pb2.SetThetaRequest, context: Any) -> gateway_pb2.SetThetaResponse:
        await self._policies.set_theta(request.theta_bytes, object_tier=False)
        return gateway_pb2.SetThetaResponse()

    async def SetObjectTheta(self, request: gateway_pb2.SetThetaRequest, context: Any) -> gateway_pb2.SetThetaResponse:
        await self._policies.set_theta(request.theta_bytes, object_tier=True)
        return gateway_pb2.SetThetaResponse()

    async def ListPolicies(
        self, request: gateway_pb2.ListPoliciesRequest, context: Any
    ) -> gateway_pb2.ListPoliciesResponse:
        return policies_to(await self._policies.all(self._quotas, len(self._cluster.storage_nodes())))

    async def PutImage(self, request: images_pb2.PutImageRequest, context: Any) -> images_pb2.PutImageResponse:
        entry, expected = convert_images.image_from(request.entry), convert_images.expected_from(request.expected)
        replaced = await self._images.put(request.tenant, entry, expected, request.ttl_ms)
        return images_pb2.PutImageResponse(replaced=replaced)

    async def HeadImage(self, request: images_pb2.HeadImageRequest, context: Any) -> images_pb2.HeadImageResponse:
        entry = await self._images.head(request.tenant, request.image_id)
        return images_pb2.HeadImageResponse(entry=convert_images.image_to(entry))

    async def DeleteImage(self, request: images_pb2.DeleteImageRequest, context: Any) -> images_pb2.DeleteImageResponse:
        return images_pb2.DeleteImageResponse(deleted=await self._images.delete(request.tenant, request.image_id))

    async def ListImages(self, request: images_pb2.ListImagesRequest, context: Any) -> images_pb2.ListImagesResponse:
        entries, next_id = await self._images.list(request.tenant, request.prefix, request.after, request.limit)
        return images_pb2.ListImagesResponse(entries=map(convert_images.image_to, entries), next_after=next_id)

    async def RouteImage(self, request: images_pb2.RouteImageRequest, context: Any) -> images_pb2.RouteImageResponse:
        entry = convert_images.image_from(request.entry)
        route = await self._images.route(entry, request.failed)
        if route is None:
            return images_pb2.RouteImageResponse(build=self._images.build)
        match = LookupAnswer()
        if request.lease_ttl_ms:
            question = Question(entry.namespace, entry.keys, request.lease_ttl_ms, route.runner.location)
            try:
                match = await self._lookups.lookup(question)
            except BaseException:
                await self._images.finish(route.ticket, failed=False)
                raise
        return images_pb2.RouteImageResponse(
            ticket=route.ticket,
            runner=route.runner.node_id,
            runner_address=route.runner.grpc_address,
            owner=route.owner.node_id,
            owner_address=route.owner.grpc_address,
            build=build_of(route.runner),
            record=images_pb2.LeasedRecord(lease=match.token, nodes=convert.addresses_to(match.nodes, grpc=False)),
        )

    async def FinishImage(self, request: images_pb2.FinishImageRequest, context: Any) -> images_pb2.FinishImageResponse:
        try:
            await self._images.finish(request.ticket, failed=request.failed)
        finally:
            if request.lease:
                await self._lookups.release(request.lease)
        return images_pb2.FinishImageResponse()

    async def Leave(self, request: orchestrator_pb2.LeaveRequest, context: Any) -> orchestrator_pb2.LeaveResponse:
        await self._cluster.leave(request.node_id, request.incarnation)
        return orchestrator_pb2.LeaveResponse()

    async def ListNodes(
        self, request: orchestrator_pb2.ListNodesRequest, context: Any
    ) -> orchestrator_pb2.ListNodesResponse:
        role = None if request.role == common_pb2.ROLE_UNSPECIFIED else convert.role_from(request.role)
        nodes = await self._cluster.nodes(role, with_away=request.with_away or request.with_checks)
        listed = [convert.node_to(node) for node in nodes if request.with_away or not node.is_away]
        response = orchestrator_pb2.ListNodesResponse(nodes=listed)
        if request.with_checks and self._health is not None:
            response.checked = True
            response.checks.extend(convert_health.checks_to(self._health.checks(nodes)))
        return response

    async def SetDraining(
        self, request: gateway_pb2.SetDrainingRequest, context: Any
    ) -> gateway_pb2.SetDrainingResponse:
        await self._removals.set_draining(request.node_id, draining=request.draining)
        return gateway_pb2.SetDrainingResponse()

    async def Decommission(
        self, request: gateway_pb2.DecommissionRequest, context: Any
    ) -> gateway_pb2.DecommissionResponse:
        await self._removals.decommission(request.node_id, lose_chunks=request.lose_chunks)
        return gateway_pb2.DecommissionResponse()

    async def CheckRemoval(
        self, request: gateway_pb2.CheckRemovalRequest, context: Any
    ) -> gateway_pb2.CheckRemovalResponse:
        return convert.removal_to(await self._removals.check(request.node_id))


def _given(request: Any, *names: str) -> dict[str, Any]:
    """Return the optional fields of a message that are set."""
    return {name: getattr(request, name) for name in names if request.HasField(name)}


async def serve(config: OrchestratorConfig) -> None:
    """Run until SIGTERM."""
    redis = connect(config.redis_url)
    clock = ClusterClock(SystemClock(), Membership(redis).now_ms)
    channels, permits = member_channels(config, "orchestrator"), PermitSigner(*config.secrets)
    orchestrator = Orchestrator(
        config=config,
        index=PrefixIndex(redis),
        members=Membership(redis),
        policies=StoredPolicies(redis),
        holders=GrpcChunkHolder(channels, permits, clock),
        clock=clock,
        events=CacheEvents(redis, config.events_kept) if config.events_kept else None,
    )
    server = Server(
        config.listen,
        ["quire.v1.OrchestratorService"],
        requests_max=config.requests_max,
        tls=member_tls(config),
        secrets=config.secrets,
        accept_unproven=config.accept_unproven,
    )
    catalogue = Images(redis)
    quotas = Quotas(
        policy=orchestrator.policies.of,
        objects=S3Buckets(redis),
        images=catalogue,
        reservations=Reservations(redis),
        secrets=config.secrets,
    )
    images = ImageDesk(
        catalogue=catalogue,
        decodes=RunningDecodes(redis, lasts_ms=round(1000 * config.decode_timeout_s)),
        theta=config.decoder_theta,
        decoders=orchestrator.cluster.decoders,
        evict=orchestrator.evictions.evict_chunk,
        clock=clock,
        quotas=quotas,
    )
    probe, capacity = RedisProbe(redis), RedisCapacity(redis)
    life = CertificateLife(config.certificates)
    health = Health(cluster=orchestrator.cluster, redis=capacity, certificates=life, clock=clock)
    servicer = OrchestratorServicer(orchestrator, images, quotas, config.secrets, health)
    add_OrchestratorServiceServicer_to_server(servicer, server.grpc)
    publish(lambda: {**orchestrator.stats, **health.stats})
    probe.start()
    await until_open(redis, *config.secrets)
    capacity.start()
    await orchestrator.start()
    images.start()
    health.start()
    await server.start()
    await until_stopped(stop_within_s(config.stop_grace_s, config.drain_s), address=config.listen)
    await server.drain(config.drain_s)
    await server.stop(config.stop_grace_s)
    await health.close()
    await images.close()
    await orchestrator.close()
    await capacity.close()
    await probe.close()
    await channels.close()
    await redis.aclose()


def main() -> None:
    run_service("orchestrator", OrchestratorConfig, PREFIX, serve)


if __name__ == "__main__":
    main()
