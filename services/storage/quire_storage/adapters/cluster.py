"""The orchestrator, the scheduler and other storage nodes over gRPC."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from quire.model.descriptor import Descriptor
from quire.model.durability import Durability
from quire.model.errors import DeadlineExceeded, NodeUnavailable, QuireError, Unavailable
from quire.model.index import OBJECT_TIER, Drop, Held, Listing, ObjectMark
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.outcome import NodeOutcome
from quire.model.permit import PermitSigner
from quire.model.policy import PolicyList
from quire.model.ranges import ChunkRange
from quire.model.records import ChunkRecord
from quire.model.transfers import DeliverOrder
from quire.wire import convert
from quire.wire.channels import ChannelPool, call, stream
from quire.wire.convert_records import ask_about, records_to
from quire.wire.convert_transfers import deliver_order_to
from quire.wire.index_messages import drops_from, drops_to, held_from
from quire.wire.policies import policies_from
from quire.wire.v1 import common_pb2, gateway_pb2, orchestrator_pb2, scheduler_pb2, storage_pb2
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire.wire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.wire.v1.storage_pb2_grpc import StorageServiceStub
from quire_server.access.permits import member_permit, permit
from quire_server.clock import Clock
from quire_server.membership.membership_log import KnownNodes
from quire_storage.ports import COPY_S_MAX, AdmissionRequest, RateGrant

_INDEX_TIMEOUT_S = 10.0
_RATE_TIMEOUT_S = 0.1
_TOLD_TIMEOUT_S = 2.0
"""Of what a scheduler is told when a delivery has ended: nothing waits for that."""


class GrpcClusterIndex:
    """The `ClusterIndex` port."""

    def __init__(self, channels: ChannelPool, address: str) -> None:
        self._stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(address))

    async def commit(
        self, node_id: str, records: Sequence[ChunkRecord], *, reporter: str, fresh: int = 0, wait_ms: int = 0
    ) -> list[int]:
        request = orchestrator_pb2.CommitRequest(
            node_id=node_id, records=records_to(records, reporter), fresh_generation=fresh, wait_ms=wait_ms
        )
        return list((await self._ask(self._stub.Commit, request, "generations")).generations)

    async def join(
        self, node_id: str, records: Sequence[ChunkRecord], generations: Sequence[int], *, only_in_object: bool
    ) -> list[bool]:
        if not only_in_object:  # an orchestrator of the release before makes entries that do not exist
            commit = orchestrator_pb2.CommitRequest(
                node_id=node_id, records=records_to(records, node_id), within=generations
            )
            entries = (await self._ask(self._stub.Commit, commit, "generations")).generations
            return [entry == named for entry, named in zip(entries, generations, strict=True)]
        request = orchestrator_pb2.JoinRequest(node_id=node_id, records=records_to(records), generations=generations)
        return [bool(mark) for mark in (await self._ask(self._stub.Join, request, "marks")).marks]

    async def add_objects(
        self, records: Sequence[ChunkRecord], generations: Sequence[int], *, reporter: str
    ) -> list[ObjectMark]:
        request = orchestrator_pb2.CommitObjectsRequest(records=records_to(records, reporter), generations=generations)
        return [ObjectMark(mark) for mark in (await self._ask(self._stub.CommitObjects, request, "marks")).marks]

    async def expect_objects(self, records: Sequence[ChunkRecord]) -> list[bool]:
        request = orchestrator_pb2.ExpectObjectsRequest(records=records_to(records))
        return [bool(mark) for mark in (await self._ask(self._stub.ExpectObjects, request, "marks")).marks]

    async def object_generations(self, records: Sequence[ChunkRecord]) -> tuple[list[int], bool]:
        request = orchestrator_pb2.GetGenerationsRequest(node_id=OBJECT_TIER, records=records_to(records))
        answer = await self._ask(self._stub.GetGenerations, request, "generations")
        return list(answer.generations), not answer.rebuilding

    async def withdraw(
        self, node_id: str, records: Sequence[ChunkRecord], *, reporter: str, hidden: bool = False
    ) -> None:
        request = orchestrator_pb2.WithdrawRequest(
            node_id=node_id,
            records=records_to(records, reporter),
            all_generations=node_id == OBJECT_TIER,
            hidden=hidden,
        )
        await self._ask(self._stub.Withdraw, request, "withdrawn")

    async def withdraw_in_object(self, node_id: str, records: Sequence[ChunkRecord]) -> list[bool]:
        request = orchestrator_pb2.WithdrawRequest(
            node_id=node_id, records=records_to(records, node_id), only_in_object_tier=True
        )
        return [bool(mark) for mark in (await self._ask(self._stub.Withdraw, request, "withdrawn")).withdrawn]

    async def withdraw_surplus(
        self, node_id: str, records: Sequence[ChunkRecord], keepers: Sequence[str]
    ) -> list[bool]:
        request = orchestrator_pb2.WithdrawRequest(
            node_id=node_id,
            records=records_to(records, node_id),
            keepers=keepers,
            others_min=len(keepers),  # for an orchestrator of the release before, which knows no keepers
        )
        return [bool(mark) for mark in (await self._ask(self._stub.Withdraw, request, "withdrawn")).withdrawn]

    async def evict(self, node_id: str, records: Sequence[ChunkRecord]) -> list[bool]:
        request = orchestrator_pb2.EvictChunksRequest(node_id=node_id, records=records_to(records))
        return [bool(mark) for mark in (await self._ask(self._stub.EvictChunks, request, "evicted")).evicted]

    async def locate(self, records: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        request = orchestrator_pb2.LocateRequest(records=records_to(records))
        response = await self._ask(self._stub.Locate, request, "holders")
        return [tuple(names.split(",")) if names else () for names in response.holders]

    async def generations(self, node_id: str, records: Sequence[ChunkRecord]) -> list[int]:
        request = orchestrator_pb2.GetGenerationsRequest(node_id=node_id, records=records_to(records))
        return list((await self._ask(self._stub.GetGenerations, request, "generations")).generations)

    async def drops(self, node_id: str, cursor: int) -> tuple[list[Drop], int]:
        request = orchestrator_pb2.TakeDropsRequest(node_id=node_id, cursor=cursor)
        answer = await self._call(self._stub.TakeDrops, request)
        return drops_from(answer.drops), answer.cursor

    async def settle_drops(self, node_id: str, drops: Sequence[Drop]) -> None:
        request = orchestrator_pb2.SettleDropsRequest(node_id=node_id, drops=drops_to(drops))
        await self._call(self._stub.SettleDrops, request)

    async def listing(self, node_id: str) -> Listing:
        answer = await self._call(self._stub.GetListing, orchestrator_pb2.GetListingRequest(node_id=node_id))
        return Listing(answer.count, answer.digest, answer.changes)

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[Held], int]:
        request = orchestrator_pb2.ListHoldingsRequest(node_id=node_id, cursor=cursor)
        answer = await self._call(self._stub.ListHoldings, request)
        return held_from(answer.fingerprints, answer.buckets, answer.generations), answer.cursor

    async def withdraw_held(self, node_id: str, holdings: Sequence[Held]) -> None:
        prints, buckets = (
            b"".join(holding.fingerprint for holding in holdings),
            b"".join(holding.bucket for holding in holdings),
        )
        request = orchestrator_pb2.WithdrawHeldRequest(node_id=node_id, fingerprints=prints, buckets=buckets)
        await self._call(self._stub.WithdrawHeld, request)

    async def damaged(self, node_id: str) -> None:
        await self._call(self._stub.ReportDamage, orchestrator_pb2.ReportDamageRequest(node_id=node_id))

    async def rebuilt(self, token: str) -> None:
        await self._call(self._stub.ReportRebuilt, orchestrator_pb2.ReportRebuiltRequest(rebuild=token))

    async def policies(self) -> PolicyList:
        return policies_from(await self._call(self._stub.ListPolicies, gateway_pb2.ListPoliciesRequest()))

    async def _ask(self, method: Any, request: Any, answers: str) -> Any:
        return await ask_about(method, request, answers, timeout_s=_INDEX_TIMEOUT_S)

    async def _call(self, method: Any, request: Any) -> Any:
        return await call(method, request, timeout_s=_INDEX_TIMEOUT_S)


class GrpcPeers:
    """The `Peers` port."""

    def __init__(
        self, channels: ChannelPool, orchestrator_address: str, roster: KnownNodes, permits: PermitSigner, clock: Clock
    ) -> None:
        self._channels = channels
        self._orchestrator: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(orchestrator_address))
        self._permits = permits
        self._clock = clock
        self._roster = roster

    async def storage_nodes(self) -> list[Node]:
        return await self._roster.storage_nodes()

    async def described(self) -> list[Node]:
        request = orchestrator_pb2.ListNodesRequest(role=common_pb2.ROLE_STORAGE)
        response = await call(self._orchestrator.ListNodes, request, timeout_s=_INDEX_TIMEOUT_S)
        return [convert.node_from(node) for node in response.nodes]

    async def describe(self, node: Node, keys: ChunkKeys) -> list[bytes]:
        request = storage_pb2.DescribeRequest(chunk_keys=keys.packed)
        member_permit(self._permits, request, self._clock.now_ms())
        response = await call(self._stub(node).Describe, request, timeout_s=_INDEX_TIMEOUT_S)
        return list(response.headers)

    async def deliver(self, node: Node, descriptor: Descriptor) -> NodeOutcome:
        part = ChunkRange(node.node_id, descriptor.first_chunk, descriptor.chunks)
        request = deliver_order_to(DeliverOrder(delivery_id=os.urandom(16), descriptor=descriptor, ranges=(part,)))
        expires_ms = self._clock.now_ms() + round(COPY_S_MAX * 1000)
        permit(self._permits, request, "", expires_ms)
        outcome = None
        async for event in stream(self._stub(node).Deliver, request, timeout_s=COPY_S_MAX):
            if event.HasField("outcome"):
                outcome = convert.outcome_from(event.outcome)
        if outcome is None:
            raise NodeUnavailable(f"{node.node_id} ended a delivery without an outcome")
        return outcome

    async def replicate(
        self,
        node: Node,
        generations: Mapping[bytes, int],
        source: Node,
        *,
        level: Durability = Durability.REPLICATED,
        hot: bool = False,
    ) -> list[int]:
        request = storage_pb2.ReplicateRequest(
            chunk_keys=b"".join(generations),
            generations=generations.values(),
            source=convert.node_to(source),
            hot=hot,
            level=convert.durability_to(level),
        )
        member_permit(self._permits, request, self._clock.now_ms())
        response = await call(self._stub(node).Replicate, request, timeout_s=COPY_S_MAX, again=False)
        return list(response.kept)

    def _stub(self, node: Node) -> StorageServiceStub:
        stub: StorageServiceStub = self._channels.stub(StorageServiceStub, node.grpc_address)
        return stub


class GrpcRateSource:
    """The `RateSource` port: of several schedulers the one that leads; the others say that they do not."""

    def __init__(self, channels: ChannelPool, addresses: Sequence[str], link: str) -> None:
        self._stubs: list[SchedulerServiceStub] = [SchedulerServiceStub(channels.get(address)) for address in addresses]
        self._link = link

    async def admit(self, request: AdmissionRequest, layers_left: int, held_bytes_per_s: int) -> RateGrant:
        message = scheduler_pb2.AdmitRequest(
            delivery=request.delivery,
            link=self._link,
            bytes_per_layer=request.bytes_per_layer,
            compute_window_us=request.compute_window_us,
            layers_left=layers_left,
            tenant=request.tenant.tenant,
            weight=request.tenant.weight,
            cap_bytes_per_s=request.tenant.cap_bytes_per_s,
            held_bytes_per_s=held_bytes_per_s,
            priority=request.priority,
        )
        return _grant((await self._leader("Admit", message)).grant)

    async def renew(self, layers_left: dict[str, int]) -> list[RateGrant]:
        progress = [scheduler_pb2.Progress(delivery=name, layers_left=layers) for name, layers in layers_left.items()]
        response = await self._leader("Renew", scheduler_pb2.RenewRequest(deliveries=progress))
        return [_grant(grant) for grant in response.grants]

    async def finish(self, delivery: str) -> None:
        await self._leader("Finish", scheduler_pb2.FinishRequest(delivery=delivery), _TOLD_TIMEOUT_S)

    async def observe(self, request: AdmissionRequest, rate_bytes_per_s: int, stall_s: float) -> None:
        message = scheduler_pb2.ObserveRequest(
            link=self._link,
            tenant=request.tenant.tenant,
            bytes_per_layer=request.bytes_per_layer,
            compute_window_us=request.compute_window_us,
            layers=request.layers,
            rate_bytes_per_s=rate_bytes_per_s,
            stall_us=int(stall_s * 1e6),
        )
        await self._leader("Observe", message, _TOLD_TIMEOUT_S)

    async def _leader(self, method: str, message: Any, timeout_s: float = _RATE_TIMEOUT_S) -> Any:
        """Return the answer of the leader, which is called first from then on."""
        failure: QuireError = NodeUnavailable("no scheduler is configured")
        for stub in list(self._stubs):
            try:
                answer = await call(getattr(stub, method), message, timeout_s=timeout_s)
            except (Unavailable, DeadlineExceeded) as error:
                failure = error
                continue
            if self._stubs[0] is not stub:
                self._stubs.remove(stub)
                self._stubs.insert(0, stub)
            return answer
        raise failure


def _grant(message: scheduler_pb2.Grant) -> RateGrant:
    left_s, credit = message.epoch_left_ms / 1000, message.credit_bytes_per_s
    return RateGrant(message.delivery, message.rate_bytes_per_s, left_s, credit, message.short)
