"""The gateway's process: its parts, and the frontends that call them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from quire import PROTOCOL_VERSION
from quire.client.memory.remote_memory import PeerTransfers
from quire.client.memory.route_check import RouteCheck
from quire.model.errors import Unavailable
from quire.model.images import record_name
from quire.model.nodes import GatewayInfo, Node
from quire.model.profile import Profiles
from quire.telemetry import logger
from quire.transport import OFF, data_plane
from quire.wire.channels import ChannelPool
from quire.wire.tls import Tls
from quire.wire.v1.gateway_pb2_grpc import (
    add_AdminServiceServicer_to_server,
    add_GatewayServiceServicer_to_server,
)
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire_gateway.access.addresses import WorkerAddresses
from quire_gateway.access.admission import Admission
from quire_gateway.access.audit import AuditLog
from quire_gateway.access.key_acts import KeyActs
from quire_gateway.access.key_derivation import DerivedKeys, KeyDerivation, SameKeys
from quire_gateway.access.keyring import KeyRing
from quire_gateway.access.tenant_names import TenantNames
from quire_gateway.adapters.blobs import ObstoreBlobs, ObstoreChunks
from quire_gateway.adapters.cluster import (
    GrpcAllocator,
    GrpcCatalogue,
    GrpcChunkIndex,
    GrpcDecoders,
    GrpcMembers,
    GrpcRouter,
    GrpcStorageNodes,
)
from quire_gateway.adapters.spans import GrpcClusterSpans
from quire_gateway.config import PREFIX, GatewayConfig
from quire_gateway.grpc.admin import AdminServicer
from quire_gateway.grpc.public import GatewayServicer
from quire_gateway.grpc.sessions import Sessions
from quire_gateway.http.frontend import ImagesFrontend
from quire_gateway.images.latents import LatentGateway
from quire_gateway.images.owners import ImageOwners
from quire_gateway.images.pictures import PictureUploads
from quire_gateway.images.reads import ImageReads
from quire_gateway.images.service import ImageService
from quire_gateway.images.vaes import KnownVaes
from quire_gateway.images.warming import Warming
from quire_gateway.kv.following import Announcements, Following
from quire_gateway.kv.leases import Leases
from quire_gateway.kv.retention import Retention
from quire_gateway.kv.single_chunk import SingleChunkReads
from quire_gateway.kv.transfers import KvTransfers
from quire_gateway.kv.watch import EventWatch
from quire_gateway.page import PageFrontend
from quire_gateway.s3.access import LATENTS_BUCKET, Authenticator
from quire_gateway.s3.backend import Backend
from quire_gateway.s3.backends import Backends
from quire_gateway.s3.frontend import S3Frontend
from quire_gateway.s3.rdma import RdmaRequests
from quire_gateway.s3.reserved import WHOLE_BODIES, ChunkBackend, LatentBackend
from quire_server.clock import Clock, ClusterClock, SystemClock
from quire_server.grpc_server import Server
from quire_server.limits.connections import ASIDE_SHARE
from quire_server.limits.quotas import Quotas
from quire_server.limits.turns import FairTurns
from quire_server.lookups import Lookups, LookupSettings
from quire_server.membership.cluster_view import RefreshedView
from quire_server.redis import (
    AccessKeys,
    Acts,
    CacheEvents,
    Images,
    Membership,
    PrefixIndex,
    RedisProbe,
    Reservations,
    RetainedBytes,
    RunningStores,
    S3Buckets,
    StoredPolicies,
    connect,
    key_secret,
)
from quire_server.redis.keys.access import CHUNKS_BUCKET
from quire_server.service import member_channels, member_tls, run_service, serve_member
from quire_server.telemetry.otlp_logs import OtlpLog

_MESSAGE_BYTES_MAX: Final = 8 << 20
"""Of a client's request: 65,536 keys are 2 MiB, and as many tokens as may be sent 5 MiB."""


@dataclass(frozen=True, slots=True)
class _Boundary:
    """The isolation of tenants: derived chunk keys, and the ownership of client memory; and tenants' names."""

    derivation: KeyDerivation
    addresses: WorkerAddresses
    names: TenantNames


def _s3_frontend(
    *,
    config: GatewayConfig,
    admission: Admission,
    keys: KeyRing,
    redis: Any,
    view: RefreshedView,
    channels: ChannelPool,
    gateway: KvTransfers,
    singles: SingleChunkReads,
    leases: Leases,
    images: ImageService,
    memory: PeerTransfers,
    boundary: _Boundary,
    clock: Clock,
) -> S3Frontend:
    authenticator = Authenticator(keys, clock)
    chunks = ObstoreChunks(config.object_url, config.object_timeout_s)
    whole_bodies = FairTurns(WHOLE_BODIES)
    index, guarded = GrpcChunkIndex(config, channels), config.asks_for_tokens
    reserved: dict[str, Callable[[str], Backend]] = {
        CHUNKS_BUCKET: lambda tenant: ChunkBackend(
            chunks, index, boundary.derivation, partial(whole_bodies.turn, tenant)
        ),
        LATENTS_BUCKET: lambda tenant: LatentBackend(
            images, tenant if guarded else "", partial(whole_bodies.turn, tenant)
        ),
    }
    blobs = ObstoreBlobs(config.object_url, config.object_timeout_s)
    buckets = S3Buckets(redis)
    quotas = Quotas(
        policy=view.policy,
        objects=buckets,
        images=Images(redis),
        reservations=Reservations(redis),
        secrets=config.secrets,
    )
    backends = Backends(
        buckets=buckets,
        blobs=blobs,
        reserved=reserved,
        clock=clock,
        quotas=quotas,
        upload_s=config.s3_upload_days * 86_400,
    )
    rdma = RdmaRequests(
        backends=backends,
        gateway=gateway,
        singles=singles,
        leases=leases,
        staging=memory,
        admission=admission,
        derivation=boundary.derivation,
        addresses=boundary.addresses,
    )
    return S3Frontend(config=config, authenticator=authenticator, admission=admission, backends=backends, rdma=rdma)


def _listeners(
    *,
    config: GatewayConfig,
    gateway: KvTransfers,
    images: ImageReads,
    latents: LatentGateway,
    own: ImageService,
    pictures: PictureUploads,
    admission: Admission,
    spans: GrpcClusterSpans,
    lookups: Lookups,
    following: Following,
    retention: Retention,
    boundary: _Boundary,
    watching: EventWatch,
    channels: ChannelPool,
    clock: Clock,
) -> tuple[Server, list[Server], Sessions]:
    """The members' frontend; others: clients' over TLS, the operators'; and the sessions at these."""
    orchestrator: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(config.orchestrator_address))
    servicer = GatewayServicer(
        config=config,
        gateway=gateway,
        images=images,
        latents=latents,
        own=own,
        pictures=pictures,
        admission=admission,
        lookups=lookups,
        following=following,
        orchestrator=orchestrator,
        retention=retention,
        derivation=boundary.derivation,
        addresses=boundary.addresses,
        clock=clock,
    )
    tls, service = member_tls(config), ["quire.v1.GatewayService"]
    public = partial(
        Server,
        requests_max=config.requests_max,
        sessions_max=config.sessions_max,
        connection_age_s=config.connection_age_s,
        message_bytes_max=_MESSAGE_BYTES_MAX,
        authenticate=admission.caller,
        strangers=config.asks_for_tokens,
        on_failure=admission.audit.request,
    )
    members = public(config.listen, service, tls=tls, secrets=config.secrets)
    add_GatewayServiceServicer_to_server(servicer, members.grpc)
    servers = []
    if config.tls_listen:
        certificate = Tls(cert=Path(config.tls_cert), key=Path(config.tls_key))
        clients = public(config.tls_listen, service, tls=certificate, public=True)
        add_GatewayServiceServicer_to_server(servicer, clients.grpc)
        servers.append(clients)
    if config.admin_listen:
        operators = Server(
            config.admin_listen,
            ["quire.v1.AdminService"],
            tls=tls,
            share=ASIDE_SHARE,
            authenticate=admission.operator,
            on_failure=admission.audit.request,
        )
        admin = AdminServicer(config, admission, orchestrator, watching, spans, boundary.derivation, boundary.names)
        add_AdminServiceServicer_to_server(admin, operators.grpc)
        servers.append(operators)
    return members, servers, servicer.sessions


def _reading(config: GatewayConfig, redis: Any, clock: Clock) -> tuple[RefreshedView, Lookups]:
    """The read path: the cluster as this gateway sees it, and look-ups."""
    view = RefreshedView(
        members=Membership(redis), tenants=StoredPolicies(redis), clock=clock, refresh_s=config.members_ms / 1000
    )
    settings = LookupSettings(
        secrets=config.secrets, lease_ttl_ms_max=config.lease_ttl_ms_max, fetch_fixed_ms=config.fetch_fixed_ms
    )
    index = PrefixIndex(redis)
    profiles = Profiles(Path(config.profiles) if config.profiles else None)
    return view, Lookups(settings=settings, index=index, view=view, profiles=profiles, clock=clock)


def _retention(config: GatewayConfig, redis: Any, view: RefreshedView, clock: Clock) -> Retention:
    index, retained = PrefixIndex(redis), RetainedBytes(redis)
    return Retention(index, clock, config.retention_s_max, policy=view.policy, retained=retained)


def _image_gateway(
    config: GatewayConfig, channels: ChannelPool, redis: Any, owners: ImageOwners, decoders: GrpcDecoders, clock: Clock
) -> ImageReads:
    return ImageReads(
        entries=Images(redis),
        owners=owners,
        router=GrpcRouter(config, channels),
        decoders=decoders,
        clock=clock,
        enlarge=config.images_enlarge,
    )


def _own_memory(
    config: GatewayConfig,
    images: ImageReads,
    latents: LatentGateway,
    catalogue: GrpcCatalogue,
    memory: PeerTransfers,
    vaes: KnownVaes,
    reach: Callable[[], Awaitable[None]],
    warming: Warming,
) -> ImageService:
    return ImageService(
        images=images,
        latents=latents,
        catalogue=catalogue,
        memory=memory,
        vaes=vaes,
        reach=reach,
        name=partial(record_name, config.secrets[0]),
        kept_bytes=config.images_kept_bytes,
        stored=warming.stored,
    )


def _described(
    config: GatewayConfig,
    incarnation: str,
    gateway: KvTransfers,
    lookups: Lookups,
    sessions: Sessions,
    admission: Admission,
) -> Node:
    return Node(
        node_id=config.node_id,
        about=GatewayInfo(),
        grpc_address=config.advertise or config.listen,
        incarnation=incarnation,
        protocol_version=PROTOCOL_VERSION,
        stats={"transfers": gateway.transfers, "leases": lookups.leases, **sessions.stats, **admission.stats},
        tenant_stats=admission.tenant_stats,
    )


class _HttpFrontend(Protocol):
    async def start(self) -> None: ...
    async def close(self) -> None: ...


async def _live(
    config: GatewayConfig,
    member: Callable[..., Awaitable[None]],
    *,
    servers: Sequence[Server],
    frontends: Sequence[_HttpFrontend],
    sessions: Sessions,
    watching: EventWatch,
) -> None:
    """Open the other frontends, then the members', until SIGTERM; close them in that order."""

    async def stop() -> None:
        watching.end()
        stopping = (server.stop(config.stop_grace_s, sessions.leave) for server in servers)
        await asyncio.gather(*stopping, *(frontend.close() for frontend in frontends))

    await asyncio.gather(*(frontend.start() for frontend in frontends), *(server.start() for server in servers))
    await member(frontends=(stop,), stopping=sessions.leave)


async def _boundary(
    config: GatewayConfig, redis: Any, view: RefreshedView, nodes: GrpcStorageNodes, clock: Clock
) -> _Boundary:
    """Set up the isolation of tenants.

    Raises:
        ConfigInvalid: The cluster's secrets do not unwrap the secret for derived keys.
    """
    guarded, names = config.asks_for_tokens, TenantNames(_access_keys(config, redis), clock)
    addresses = WorkerAddresses(
        required=guarded and not config.accept_unproven_addresses,
        secrets=config.secrets,
        nodes=view.storage_nodes,
        sender=nodes,
        clock=clock,
    )
    if not guarded:
        return _Boundary(SameKeys(), addresses, names)
    derived = DerivedKeys(partial(key_secret, redis, *config.secrets))
    try:
        await derived.load()
    except Unavailable as error:
        logger().warning("requests for chunks are refused until Redis is there", error=str(error))
    return _Boundary(derived, addresses, names)


def _access_keys(config: GatewayConfig, redis: Any) -> AccessKeys:
    return AccessKeys(redis, *config.secrets)


def _audit_log(config: GatewayConfig, clock: Clock) -> AuditLog:
    collector = OtlpLog("quire-gateway", "quire.audit", node_id=config.node_id) if config.audit_otlp else None
    return AuditLog(config.audit_log, clock, collector)


async def serve(config: GatewayConfig) -> None:
    """Run until SIGTERM."""
    channels, redis = member_channels(config, "gateway"), connect(config.redis_url)
    incarnation, clock = os.urandom(8).hex(), ClusterClock(SystemClock(), Membership(redis).now_ms)
    allocator, nodes = GrpcAllocator(config, channels), GrpcStorageNodes(config, channels, clock)
    members, catalogue = GrpcMembers(config, channels), GrpcCatalogue(config, channels)
    view, lookups = _reading(config, redis, clock)
    announcing = Announcements(RunningStores(redis), clock, round(1000 * config.transfer_timeout_s))
    gateway = KvTransfers(config=config, allocator=allocator, nodes=nodes, announcements=announcing)
    owners, decoders = ImageOwners(view, clock), GrpcDecoders(config, channels)
    images = _image_gateway(config, channels, redis, owners, decoders, clock)
    leases, singles = Leases(lookups), SingleChunkReads(lookups, gateway)
    latents = LatentGateway(gateway, catalogue, singles, leases)
    await (transport := data_plane(OFF)).start()
    memory, vaes, probe = PeerTransfers(transport), KnownVaes(view), RedisProbe(redis)
    warming = Warming(owners, decoders, memory.lend)
    reach = RouteCheck(transport, members.nodes).check
    own = _own_memory(
        config, images, latents=latents, catalogue=catalogue, memory=memory, vaes=vaes, reach=reach, warming=warming
    )
    boundary, keys = await _boundary(config, redis, view, nodes, clock), KeyRing(_access_keys(config, redis), clock)
    spans, watching = GrpcClusterSpans(config, members.nodes), EventWatch(CacheEvents(redis))
    admission = Admission(config, keys, clock, audit := _audit_log(config, clock))
    key_acts = KeyActs(Acts(redis), audit, config.node_id, clock)
    server, servers, sessions = _listeners(
        config=config,
        gateway=gateway,
        images=images,
        latents=latents,
        own=own,
        pictures=(pictures := PictureUploads(owners, decoders, vaes, memory, at_once=config.pictures_max)),
        admission=admission,
        spans=spans,
        lookups=lookups,
        following=Following(lookups, RunningStores(redis), view, clock),
        retention=_retention(config, redis, view, clock),
        boundary=boundary,
        watching=watching,
        channels=channels,
        clock=clock,
    )
    frontends = (
        ImagesFrontend(config, own, pictures, vaes, admission),
        _s3_frontend(
            config=config,
            admission=admission,
            keys=keys,
            redis=redis,
            view=view,
            channels=channels,
            gateway=gateway,
            singles=singles,
            leases=leases,
            images=own,
            memory=memory,
            boundary=boundary,
            clock=clock,
        ),
        PageFrontend(config, members, lookups, boundary.names, spans, audit, own, clock),
    )
    probe.start()
    admission.start()
    key_acts.start()
    await view.start()
    describe = partial(_described, config, incarnation, gateway, lookups, sessions, admission)
    first = (warming.close, boundary.addresses.close, sessions.close, leases.close, admission.close, announcing.close)
    ends = (*first, probe.close, key_acts.close, view.close)
    member = partial(serve_member, server, channels, config, describe, clock=clock, last=ends)
    await _live(config, member, servers=servers, frontends=frontends, sessions=sessions, watching=watching)
    await asyncio.gather(transport.close(), redis.aclose())


def main() -> None:
    run_service("gateway", GatewayConfig, PREFIX, serve)


if __name__ == "__main__":
    main()
