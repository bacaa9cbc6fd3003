"""The real services of a cluster, in one process on virtual time: wiring, crashes and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

from quire import PROTOCOL_VERSION
from quire.model.errors import QuireError
from quire.model.nodes import GatewayInfo, Location, Node
from quire.model.permit import PermitSigner
from quire.model.policy import NamespacePolicy
from quire.model.profile import Profiles
from quire.testing.simulation import (
    Fabric,
    Network,
    Process,
    SimBlobs,
    SimChannels,
    SimNearestTransport,
    SimObjects,
    SimServer,
)
from quire.testing.simulation.loop import SimulatedLoop
from quire.wire.v1.gateway_pb2_grpc import add_GatewayServiceServicer_to_server
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub, add_OrchestratorServiceServicer_to_server
from quire.wire.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from quire.wire.v1.storage_pb2_grpc import add_StorageServiceServicer_to_server
from quire_gateway.access.addresses import WorkerAddresses
from quire_gateway.access.admission import Admission
from quire_gateway.access.key_derivation import SameKeys
from quire_gateway.adapters.cluster import GrpcAllocator, GrpcStorageNodes
from quire_gateway.config import GatewayConfig
from quire_gateway.grpc.public import GatewayServicer
from quire_gateway.grpc.sessions import Sessions
from quire_gateway.kv.following import Announcements, Following
from quire_gateway.kv.retention import Retention
from quire_gateway.kv.transfers import KvTransfers
from quire_gateway.s3.backends import Backends
from quire_orchestrator.adapters.storage import GrpcChunkHolder
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.runtime import Orchestrator
from quire_orchestrator.server import OrchestratorServicer
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.leadership import Leadership
from quire_scheduler.runtime import Scheduler
from quire_scheduler.server import SchedulerServicer
from quire_server.access.permits import PermitChecker
from quire_server.clock import ClusterClock
from quire_server.lookups import Lookups, LookupSettings
from quire_server.membership.cluster_view import RefreshedView
from quire_server.membership.heartbeat import Heartbeat
from quire_server.membership.membership_log import KnownNodes
from quire_server.redis import Membership, RunningStores
from quire_server.redis.connection import metadata_errors
from quire_storage.adapters.cluster import GrpcClusterIndex, GrpcPeers, GrpcRateSource
from quire_storage.config import StorageConfig
from quire_storage.errors import ObjectTierThrottled
from quire_storage.node import StorageNode
from quire_storage.ports import Ports
from quire_storage.server import StorageServicer
from tests.integration.engine.disk import SimDisk, no_fault
from tests.simulation.metadata import EPOCH_MS, Metadata
from tests.simulation.tenants import Policies, Unlimited

SECRET = "simulated"
ORCHESTRATORS = GATEWAYS = S3_FRONTENDS = 2


class SimClock:
    """The `Clock` port of one process."""

    def __init__(self, loop: SimulatedLoop, process: Process) -> None:
        self._loop = loop
        self._process = process

    def now_ms(self) -> int:
        return EPOCH_MS + int(self._loop.time() * 1000) + self._process.skew_ms

    async def known_ms(self) -> int:
        return self.now_ms()

    def monotonic_s(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class InRedis:
    """Buckets behind Redis' delay."""

    def __init__(self, metadata: Metadata, inner: Any) -> None:
        self._metadata = metadata
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            async with metadata_errors():
                await self._metadata.wait(asking=True)
                answer = await method(*arguments, **options)
                await self._metadata.wait()
            return answer

        return call


class SimHolders(GrpcChunkHolder):
    """Watches connections as simulated channels have them."""

    async def gone(self, node: Node) -> None:
        await cast(Any, self._channels.get(node.grpc_address)).gone()


@dataclass(slots=True)
class Member:
    """One service: how it starts, and what of it outlives a crash."""

    name: str
    start: Callable[[Process], Coroutine[Any, Any, Any]]
    process: Process
    service: Any = None
    disk: SimDisk | None = None
    transport: SimNearestTransport | None = None
    heartbeat: Heartbeat | None = None


STORAGE = {
    "arena_bytes": 1 << 20,
    "slab_bytes": 1 << 16,
    "staging_bytes": 1 << 17,
    "block_bytes": 1 << 14,
    "drive_bytes": 3 << 20,
    "stripe_bytes": 8192,
    "chunk_bytes_min": 8192,
    "group_bytes": 4096,
    "drives": "a,b",
    "cluster_secret": SECRET,
    "index_timeout_s": 1.0,
    "room_timeout_s": 2.0,
    "transfer_timeout_s": 6.0,
    "scrub_bytes_per_s": 40_000,
    "replication_check_s": 0.5,
    "policy_check_s": 0.5,
    "object_timeout_s": 2.0,
    "stop_grace_s": 1.0,
}


@dataclass(slots=True)
class Cluster:
    """`members` by name: storage-0 …, orchestrator-0 …, gateway-0 …, s3-0 …, scheduler.

    `failed_drives`: nodes whose first drive is replaced at their next start.
    """

    loop: SimulatedLoop
    storage_nodes: int = 3
    objects_on: bool = True
    checked: int = 16
    settings: dict[str, float] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    failed_drives: set[str] = field(default_factory=set)
    network: Network = field(init=False)
    fabric: Fabric = field(init=False)
    metadata: Metadata = field(init=False)
    objects: SimObjects = field(init=False)
    sessions: dict[str, Sessions] = field(default_factory=dict)
    policies: list[NamespacePolicy] = field(default_factory=list)
    blobs: SimBlobs = field(init=False)
    _starts: int = 0

    def __post_init__(self) -> None:
        self.network = Network(self.loop)
        self.fabric = Fabric(self.network)
        self.metadata = Metadata(self.loop)
        self.objects = SimObjects(self.loop)
        self.objects.refusal = ObjectTierThrottled
        self.blobs = SimBlobs(self.objects, self.loop)

    @property
    def storage_names(self) -> list[str]:
        return [f"storage-{number}" for number in range(self.storage_nodes)]

    # ---- life

    async def start(self) -> None:
        """Everything up, and known to everything else."""
        for number in range(ORCHESTRATORS):
            self._add(f"orchestrator-{number}", self._start_orchestrator)
        self._add("scheduler", self._start_scheduler)
        for number in range(GATEWAYS):
            self._add(f"gateway-{number}", self._start_gateway)
        for number in range(S3_FRONTENDS):
            self._add(f"s3-{number}", self._start_s3)
        for name in self.storage_names:
            disk = SimDisk(self.loop.random.getrandbits(32))
            disk.latency_s = lambda: self.loop.random.uniform(50e-6, 500e-6)
            self._add(name, self._start_storage, disk)
        for member in self.members.values():
            await self.restart(member.name)
        members = Membership(cast(Any, self.metadata.client()))
        while len(await members.live()) < len(self.members) - S3_FRONTENDS - ORCHESTRATORS:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

    def _add(
        self, name: str, start: Callable[[Process], Coroutine[Any, Any, Any]], disk: SimDisk | None = None
    ) -> None:
        self.members[name] = Member(name, start, Process(name), disk=disk)

    async def restart(self, name: str) -> None:
        """A new life of a member, after a crash or at the beginning."""
        member = self.members[name]
        member.process = Process(name, skew_ms=member.process.skew_ms)
        if member.disk is not None:
            member.disk.fault = no_fault
            if name in self.failed_drives:
                self.failed_drives.remove(name)
                member.disk.files.pop(next(iter(member.disk.files), ""), None)
        self._starts += 1
        done = member.process.start(member.start(member.process))
        with contextlib.suppress(QuireError):
            member.service = await done

    async def stop(self, name: str) -> bool:
        """Stop a storage node gracefully. No completed write is lost. False if the node crashed before its end."""
        member = self.members[name]

        async def end() -> None:
            assert member.heartbeat is not None
            await member.heartbeat.leave()
            await member.service.close()

        process = member.process
        task, death = process.start(end()), asyncio.ensure_future(process.died())
        await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not task.done():
            return False
        process.crash()
        if member.disk is not None:
            for file in member.disk.files.values():
                file.sync()
            member.disk.crash()
        return True

    def crash(self, name: str) -> None:
        """Power off: what drives had not synced is lost in part."""
        member = self.members[name]
        member.process.crash()
        if member.disk is not None:
            member.disk.crash()

    @property
    def storage(self) -> dict[str, StorageNode]:
        """The nodes that live."""
        found = {name: each for name, each in self.members.items() if re.fullmatch(r"storage-\d+", name)}
        return {
            name: each.service for name, each in found.items() if not each.process.dead and each.service is not None
        }

    # ---- services

    async def _start_orchestrator(self, process: Process) -> Orchestrator:
        config = OrchestratorConfig(
            cluster_secret=SECRET,
            heartbeat_ms=250,
            member_ttl_ms=1500,
            object_grace_ms=3000,
            object_deletion_ms=8000,
            node_lost_ms=8_000,
            sweep_ms=1000,
        )
        channels: Any = SimChannels(self.network, process)
        members = Membership(cast(Any, self.metadata.client()))
        clock = ClusterClock(SimClock(self.loop, process), members.now_ms)
        holders = SimHolders(channels, PermitSigner(SECRET.encode()), clock)
        orchestrator = Orchestrator(
            config=config,
            index=self.metadata.new_index(),
            members=members,
            policies=Policies(self.policies),
            holders=holders,
            clock=clock,
        )
        nothing: Any = None
        servicer = OrchestratorServicer(orchestrator, nothing, Unlimited(), [SECRET.encode()])
        add_OrchestratorServiceServicer_to_server(servicer, cast(Any, SimServer(self.network, process.name, process)))
        while True:
            try:
                await orchestrator.start()
                return orchestrator
            except QuireError:
                await asyncio.sleep(0.2)

    async def _start_scheduler(self, process: Process) -> Scheduler:
        config = SchedulerConfig(links="default=40000000", policy="stall-opt")
        clock = ClusterClock(SimClock(self.loop, process))
        leadership = Leadership("scheduler", None, config.lease_ms, clock)
        scheduler = Scheduler(config, clock, leadership)
        server: Any = SimServer(self.network, "scheduler", process)
        add_SchedulerServiceServicer_to_server(SchedulerServicer(scheduler), server)

        def describe() -> Node:
            return Node(
                node_id="scheduler",
                about=scheduler.info,
                grpc_address="scheduler",
                incarnation=f"s{self._starts}",
                protocol_version=PROTOCOL_VERSION,
            )

        self._announce(process, describe, lambda news: None, clock)
        return scheduler

    async def _start_gateway(self, process: Process) -> KvTransfers:
        config = GatewayConfig(
            cluster_secret=SECRET,
            node_id=process.name,
            orchestrator_address=_orchestrator_of(process),
            control_timeout_s=2.0,
            transfer_timeout_s=8.0,
            tenant_requests_max=64,
        )
        channels: Any = SimChannels(self.network, process)
        members = Membership(cast(Any, self.metadata.client()))
        clock = ClusterClock(SimClock(self.loop, process), members.now_ms)
        running = RunningStores(cast(Any, self.metadata.client()))
        gateway = KvTransfers(
            config=config,
            allocator=GrpcAllocator(config, channels),
            nodes=GrpcStorageNodes(config, channels, clock),
            announcements=Announcements(running, clock, round(1000 * config.transfer_timeout_s)),
        )
        nothing: Any = None
        index = self.metadata.new_index()
        view = RefreshedView(
            members=members,
            tenants=Policies(self.policies),
            clock=clock,
            refresh_s=0.125,
        )
        await view.start()
        settings = LookupSettings(secrets=(SECRET.encode(),))
        lookups = Lookups(settings=settings, index=index, view=view, profiles=Profiles(None), clock=clock)
        admission = Admission(config, nothing, clock)
        admission.start()
        stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(config.orchestrator_address))
        servicer = GatewayServicer(
            config=config,
            gateway=gateway,
            images=nothing,
            latents=nothing,
            own=nothing,
            pictures=nothing,
            admission=admission,
            lookups=lookups,
            following=Following(lookups, running, view, clock),
            orchestrator=stub,
            retention=Retention(index, clock, config.retention_s_max),
            derivation=SameKeys(),
            addresses=WorkerAddresses(required=False, secrets=[], nodes=dict, sender=nothing, clock=clock),
            clock=clock,
        )
        self.sessions[process.name] = servicer.sessions
        add_GatewayServiceServicer_to_server(servicer, cast(Any, SimServer(self.network, process.name, process)))
        incarnation = f"{process.name}/{self._starts}"

        def describe() -> Node:
            return Node(
                node_id=process.name,
                about=GatewayInfo(),
                grpc_address=process.name,
                incarnation=incarnation,
                protocol_version=PROTOCOL_VERSION,
            )

        self._announce(process, describe, lambda news: None, clock)
        return gateway

    async def _start_s3(self, process: Process) -> Backends:
        """A gateway's S3 frontend, without its HTTP."""
        buckets: Any = InRedis(self.metadata, self.metadata.buckets)
        backends = Backends(
            buckets=buckets,
            blobs=self.blobs,
            reserved={},
            clock=SimClock(self.loop, process),
        )

        async def sweep() -> None:
            while True:
                await asyncio.sleep(1.0)
                with contextlib.suppress(QuireError):
                    await backends.sweep()

        process.start(sweep())
        return backends

    async def twin(self, name: str) -> Process:
        """A second process of the same name, with drives of its own: a mistake of its operator's."""
        disk = SimDisk(self.loop.random.getrandbits(32))
        disk.latency_s = lambda: self.loop.random.uniform(50e-6, 500e-6)
        process = Process(f"{name}-twin")
        self._starts += 1
        self.members[process.name] = Member(process.name, self._start_storage, process, disk=disk)
        self.members[process.name].service = await process.start(self._start_storage(process, name))
        return process

    async def _start_storage(self, process: Process, node_id: str = "") -> StorageNode:
        member = self.members[process.name]
        assert member.disk is not None
        node_id = node_id or process.name
        settings: Any = {
            **STORAGE,
            **self.settings,
            "node_id": node_id,
            "orchestrator_address": _orchestrator_of(process),
        }
        config = StorageConfig(**settings)
        channels: Any = SimChannels(self.network, process)
        clock = ClusterClock(SimClock(self.loop, process))
        permits = PermitSigner(SECRET.encode())
        transport = member.transport = SimNearestTransport(self.fabric, process)
        disk, incarnation, roster = member.disk, f"{process.name}/{self._starts}", KnownNodes()
        ports = Ports(
            index=GrpcClusterIndex(channels, config.orchestrator_address),
            rates=GrpcRateSource(channels, ["scheduler"], "default"),
            peers=GrpcPeers(channels, config.orchestrator_address, roster, permits, clock),
            objects=self.objects if self.objects_on else None,
            drives=lambda: disk,
            block_io=cast(Any, disk),
            clock=clock,
            threads=cast(Any, lambda count: _NoThreads(self.loop)),
            draw=self.loop.random.randbytes,
        )

        def describe() -> Node:
            return Node(
                node_id=node_id,
                about=node.info,
                grpc_address=process.name,
                incarnation=incarnation,
                protocol_version=PROTOCOL_VERSION,
                location=Location(process.name),
            )

        node = StorageNode(config, transport, ports, describe, checked=self.checked)
        await node.start()
        servicer = StorageServicer(node, node_id, PermitChecker(permits, clock), clock, cast(Any, None), incarnation)
        add_StorageServiceServicer_to_server(servicer, cast(Any, SimServer(self.network, process.name, process)))
        self._announce(process, describe, node.on_news, clock, roster)
        return node

    def _announce(
        self,
        process: Process,
        describe: Callable[[], Node],
        on_news: Callable[[Any], None],
        clock: ClusterClock,
        roster: KnownNodes | None = None,
    ) -> None:
        channels: Any = SimChannels(self.network, process)
        heartbeat = Heartbeat(
            channels, _orchestrator_of(process), describe, on_news, roster, secret=SECRET.encode(), clock=clock
        )
        self.members[process.name].heartbeat = heartbeat
        heartbeat.start()


def _orchestrator_of(process: Process) -> str:
    """The one that a process knows."""
    number = int(process.name.removesuffix("-twin").rpartition("-")[2]) if "-" in process.name else 0
    return f"orchestrator-{number % ORCHESTRATORS}"


class _NoThreads:
    """The loop runs what executors would."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def submit(self, work: Callable[[], object]) -> None:
        self._loop.run_in_executor(None, work)

    def shutdown(self) -> None:
        return
