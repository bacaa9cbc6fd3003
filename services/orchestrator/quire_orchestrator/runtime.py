"""Carries out the orchestrator's decisions: Redis on one side, storage nodes on the other."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from opentelemetry.trace import SpanKind

from quire.model.durability import Durability, OnExisting
from quire.model.errors import InvalidRequest, QuireError, VersionUnsupported
from quire.model.hashing import Namespace
from quire.model.index import OBJECT_TIER, ChunkRecord, Evicted, Listing, Match, ObjectMark, records
from quire.model.keys import ChunkKeys
from quire.model.lease import Lease, LeaseSigner
from quire.model.nodes import Location, Node, NodeAddress, Role
from quire.model.policy import NamespacePolicy, TenantPolicy
from quire.model.profile import Profiles
from quire.model.ranges import ChunkRange, clip
from quire.telemetry import counter, logger, meter, names, tracer
from quire.wire import version
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.core.advice import Advice, advise
from quire_orchestrator.core.eviction import drops, has_objects, in_object, rebuilder
from quire_orchestrator.core.placement import addresses_of, newcomer_rate, placed_ranges, readable_ranges
from quire_orchestrator.errors import NoDurableNode
from quire_orchestrator.ports import ChunkHolder, Clock, Index, Members, PolicyBook
from quire_server.heartbeat import ClusterNews

_PIN_TRIES = 3
_SWEEP_MAX = 256
_REDIS = {"db.system.name": "redis"}
_NAMESPACES_COUNTED = 64
_NOWHERE = Location()


@dataclass(frozen=True, slots=True)
class Question:
    """What a client wants to know. `prompt_tokens` and `device` ask for advice."""

    namespace: Namespace
    keys: ChunkKeys
    lease_ttl_ms: int = 0
    client: Location = _NOWHERE
    prompt_tokens: int = 0
    device: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A look-up's answer: which chunks from the start can be read, where, and the lease on them (empty for none)."""

    ranges: Sequence[ChunkRange] = ()
    nodes: Sequence[NodeAddress] = ()
    lease: bytes = b""
    lease_expires_ms: int = 0
    index_us: int = 0
    advice: Advice | None = None

    @property
    def matched_chunks(self) -> int:
        return self.ranges[-1].stop if self.ranges else 0


class Orchestrator:
    """Every method is one request. Holds no state but a short-lived picture of the membership."""

    def __init__(
        self,
        config: OrchestratorConfig,
        index: Index,
        members: Members,
        policies: PolicyBook,
        holders: ChunkHolder,
        profiles: Profiles,
        clock: Clock,
    ) -> None:
        self._config = config
        self._index = index
        self._members = members
        self._policies = policies
        self._holders = holders
        self._profiles = profiles
        self._tenants: dict[str, TenantPolicy] = {}
        self._theta_bytes = 0
        self._clock = clock
        self._signer = LeaseSigner(config.cluster_secret.encode())
        self._live: dict[str, Node] = {}
        self._epoch = self._rebuild = ""
        self._listings: dict[str, Listing] = {}
        self._seen_s: dict[str, float] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._unusable: dict[str, str] = {}
        self._watchers: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._refresher: asyncio.Task[None] | None = None
        self._namespaces: set[str] = set()
        self._asked = meter().create_counter(names.INDEX_CHUNKS, "1", "chunks that look-ups asked for")
        self._leases = counter(names.INDEX_LEASES, "1", "leases by what became of them", [{"event": "given"}])
        self._leased: dict[bytes, int] = {}

    @property
    def stats(self) -> dict[str, float]:
        """For the dashboard. Leases are counted where they were given, until they are given back here or run out."""
        live = Counter(node.role.value for node in self._live.values())
        return {"leases": len(self._leased), **{f"nodes.{role.value}": live[role.value] for role in Role}}

    async def start(self) -> None:
        await self._refresh()
        self._refresher = asyncio.create_task(self._keep_fresh())
        self._sweeper = asyncio.create_task(self._keep_swept())

    async def close(self) -> None:
        for task in (self._refresher, self._sweeper, *self._watchers.values()):
            if task is not None:
                task.cancel()

    async def lookup(self, question: Question) -> Found:
        """The longest prefix that can be read, from the replicas nearest to the client; with a lifetime, leased."""
        keys, lease_ttl_ms = question.keys.distinct(), question.lease_ttl_ms
        if lease_ttl_ms > self._config.lease_ttl_ms_max:
            raise InvalidRequest(f"{lease_ttl_ms} ms, {self._config.lease_ttl_ms_max} at most", field="lease_ttl_ms")
        tenant = self._tenant(question.namespace)
        for _ in range(_PIN_TRIES):
            now_ms = self._clock.now_ms()
            started = time.perf_counter_ns()
            with tracer().start_as_current_span(names.INDEX_MATCH, kind=SpanKind.CLIENT, attributes=_REDIS):
                match = await self._index.match(keys)
            index_us = (time.perf_counter_ns() - started) // 1000
            live = self._storage_nodes()
            ranges = readable_ranges(match, live, keys, question.client)
            matched = ranges[-1].stop if ranges else 0
            self._count(question.namespace, matched, len(keys))
            advice = self._advise(question, tenant, ranges, matched)
            found = Found(ranges, addresses_of(ranges, live), index_us=index_us, advice=advice)
            if matched == 0 or lease_ttl_ms == 0:
                return found
            lease = self._lease(keys.run(0, matched), found, lease_ttl_ms, tenant)
            if await self._index.pin(
                lease.tip_segment, lease.tip, lease.lease_id, lease.expires_ms, lease_ttl_ms, now_ms
            ):
                self._leases.add(1, {"event": "given"})
                self._leased[lease.lease_id] = lease.expires_ms
                return replace(found, lease=self._signer.sign(lease), lease_expires_ms=lease.expires_ms)
            # Evicted between the match and the pin: look again.
        return Found(index_us=index_us)

    async def allocate(
        self, keys: ChunkKeys, first: int, durability: Durability, on_existing: OnExisting
    ) -> tuple[list[ChunkRange], list[NodeAddress], int]:
        """Nodes for the chunks that are not stored, how they are reached, and how many from the start are stored."""
        keys.distinct()
        live = self._storage_nodes()  # the same ones to the end, whoever leaves meanwhile
        nodes = list(live.values())
        if not nodes:
            raise NoDurableNode("no storage node is alive")
        if durability is Durability.REPLICATED and len(nodes) < 2:
            raise NoDurableNode("two storage nodes are needed, one is alive")
        if first > len(keys):
            raise InvalidRequest(f"{first}, but there are {len(keys)} keys", field="first_chunk")
        match = await self._index.match(keys)
        readable = readable_ranges(match, live, keys)
        if durability is not Durability.MEMORY:
            readable = await self._raised(match, readable, keys, durability)
        known = readable[-1].stop if readable else 0
        if known < first:
            raise InvalidRequest(
                f"chunk {known} is not stored, so chunks from {first} on would have no parent", field="first_chunk"
            )
        placed = placed_ranges(keys, max(known, first), nodes)
        if on_existing is OnExisting.VERIFY:
            placed = [*clip(readable, first, known), *placed]
        return placed, addresses_of(placed, live), known

    async def _raised(
        self, match: Match, readable: Sequence[ChunkRange], keys: ChunkKeys, durability: Durability
    ) -> list[ChunkRange]:
        """What is stored already, raised to the level that is asked for now; up to the first chunk that is not.

        What the object tier has is as durable as anything can be asked to be.
        """
        live = self._storage_nodes()
        safe = in_object(match)

        async def marks(each: ChunkRange) -> list[bool]:
            mine = safe[each.first : each.stop]
            if all(mine):
                return mine
            try:
                part = keys.run(each.first, each.count)
                raised = await self._holders.raise_level(live[each.node_id], part, durability)
                return [now or before for now, before in zip(raised, mine, strict=True)]
            except (QuireError, KeyError) as error:
                logger().warning("chunks could not be made durable", node=each.node_id, error=str(error))
                return mine

        raised: list[ChunkRange] = []
        for each, mine in zip(readable, await asyncio.gather(*map(marks, readable)), strict=True):
            count = mine.index(False) if False in mine else each.count
            if count:
                raised.append(replace(each, count=count))
            if count < each.count:
                break
        return raised

    async def commit(self, node_id: str, chunks: Sequence[ChunkRecord]) -> list[int]:
        """Index replicas; the generations of their entries, 0 where the parent is not indexed."""
        with tracer().start_as_current_span(names.INDEX_REGISTER, kind=SpanKind.CLIENT, attributes=_REDIS):
            return await self._index.register(node_id, chunks, self._clock.now_ms())

    async def commit_objects(self, chunks: Sequence[ChunkRecord], generations: Sequence[int]) -> list[ObjectMark]:
        """List the object tier in these very entries."""
        return await self._index.add_objects(chunks, generations)

    async def expect_objects(self, chunks: Sequence[ChunkRecord]) -> tuple[list[bool], int]:
        """Objects are about to be written, or no entry lists them: they are deleted after the time of grace, unless
        one lists them then. False for one that is being deleted; and the time of grace in ms.
        """
        grace_ms = self._config.object_grace_ms
        return await self._index.expect_objects(chunks, self._clock.now_ms() + grace_ms), grace_ms

    async def withdraw(
        self, node_id: str, chunks: Sequence[ChunkRecord], *, only_in_object: bool = False, others_min: int = 0
    ) -> list[bool]:
        """A node lost chunks, or found them corrupt: look-ups must not promise them any more.

        For each whether the node is not listed now. `only_in_object`: only where the object tier is listed too;
        `others_min`: only where so many other nodes are.
        """
        now_ms, only = self._clock.now_ms(), only_in_object
        return await self._index.unregister(node_id, chunks, now_ms, only_in_object=only, others_min=others_min)

    async def count_change(self, node_id: str) -> None:
        """What a node has reported is done: it is answered next."""
        if node_id:
            await self._index.count_change(node_id)

    async def release(self, token: bytes) -> bool:
        """Give a lease back, expired or not; whether it was held."""
        lease = self._signer.open(token)
        self._leased.pop(lease.lease_id, None)
        held = await self._index.unpin(lease.tip_segment, lease.tip, lease.lease_id)
        self._leases.add(1, {"event": "given back" if held else "was over"})
        return held

    async def evict(self, keys: ChunkKeys, keep: int) -> int:
        """Drop chunks from the end of a chain; how many. Stops at one that others extend or a lease pins."""
        keys.distinct()
        if not 0 <= keep <= len(keys):
            raise InvalidRequest(f"{keep} of {len(keys)}", field="keep_chunks")
        chunks = list(reversed(records(keys, keep, len(keys) - keep)))
        return len((await self._evict(chunks, "")).removed)

    async def evict_chunk(self, key: ChunkKeys) -> bool:
        """Drop the one chunk of a chain of one; whether it is out of the index. Not while a lease pins it."""
        return (await self.evict_chunks("", records(key, 0, 1)))[0]

    async def evict_chunks(self, node_id: str, chunks: Sequence[ChunkRecord]) -> list[bool]:
        """A node needs room and holds the last copy: for each chunk, children first, whether it is out of the index."""
        evicted = await self._evict(chunks, node_id)
        out = {gone.record.key for gone in evicted.removed} | set(evicted.absent)
        return [chunk.key in out for chunk in chunks]

    async def _evict(self, chunks: Sequence[ChunkRecord], asking: str) -> Evicted:
        """Out of the index, and off every node but the one that asks. One that is away hears of it when it is back."""
        now_ms = self._clock.now_ms()
        evicted = await self._index.evict(chunks, now_ms, now_ms + self._config.object_grace_ms)
        orders = drops(evicted, asking)
        await asyncio.gather(*(self._drop(node_id, mine) for node_id, mine in orders.items()))
        return evicted

    async def _drop(self, node_id: str, generations: Mapping[bytes, int]) -> None:
        try:
            await self._holders.drop(self._live[node_id], generations)
        except (QuireError, KeyError) as error:
            count = len(generations)
            logger().warning("a node could not be told to drop chunks", node=node_id, chunks=count, why=str(error))
            await self._index.remember_drops(node_id, generations)

    async def locate(self, chunks: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        """The live nodes that hold each chunk, and the object tier where it does."""
        live = self._storage_nodes()
        placements = await self._index.holders(chunks)
        return [tuple(name for name in names if name in live or name == OBJECT_TIER) for names in placements]

    async def take_drops(self, node_id: str) -> dict[bytes, int]:
        """Entries that ended while the node was away: generations by key."""
        return await self._index.take_drops(node_id)

    async def listing(self, node_id: str) -> Listing:
        """What the index lists for a node, in two numbers."""
        return (await self._index.listings()).get(node_id, Listing())

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[tuple[ChunkRecord, int]], int]:
        """A page of what the index lists for a node, and the next cursor, 0 at the end."""
        return await self._index.holdings(node_id, cursor)

    async def damaged(self, node_id: str) -> None:
        """A node found that the index has lost entries."""
        logger().error("the index has lost entries", node=node_id)
        await self._index.damaged()

    async def rebuilt(self, token: str) -> None:
        """The index was told what lies in the object tier."""
        await self._index.rebuilt(token)

    async def set_policy(self, policy: NamespacePolicy) -> None:
        """Bound a namespace; storage nodes hear of it when they next look."""
        await self._policies.set(policy)

    async def policies(self) -> tuple[list[NamespacePolicy], int]:
        """All that are set, and how many storage nodes share the quotas."""
        return await self._policies.all(), len(self._storage_nodes())

    async def set_tenant(self, policy: TenantPolicy) -> None:
        """Counts for look-ups from the next refresh on."""
        await self._policies.set_tenant(policy)

    async def set_theta(self, theta_bytes: int) -> None:
        """Storage nodes hear of it with their next heartbeats."""
        await self._policies.set_theta(theta_bytes)
        self._theta_bytes = theta_bytes

    async def heartbeat(self, node: Node) -> tuple[int, ClusterNews]:
        """Keep a member alive; milliseconds until it should report again, and what is new."""
        self._check_version(node)
        now_ms = self._clock.now_ms()
        await self._members.renew(node, now_ms, now_ms + self._config.member_ttl_ms)
        self._live[node.node_id] = node
        self._watch()
        listing = self._listings.get(node.node_id, Listing())
        chosen = (
            self._rebuild if self._rebuild and rebuilder(self._rebuild, self._storage_nodes()) == node.node_id else ""
        )
        return self._config.heartbeat_ms, ClusterNews(self._epoch, self._theta_bytes, listing, chosen)

    def _check_version(self, node: Node) -> None:
        """Raises `VersionUnsupported`; the log says it once for each start of a node."""
        try:
            version.check(node.protocol_version)
        except VersionUnsupported as error:
            if self._unusable.get(node.node_id) != node.incarnation:
                logger().error("a node cannot be used", node=node.node_id, error=str(error))
            self._unusable[node.node_id] = node.incarnation
            raise

    async def leave(self, node_id: str, incarnation: str) -> None:
        await self._members.leave(node_id, incarnation)
        await self._refresh()

    async def nodes(self, role: Role | None) -> list[Node]:
        await self._refresh()
        return [node for node in self._live.values() if role in (None, node.role)]

    @property
    def decoders(self) -> list[Node]:
        """Those that are alive."""
        return [node for node in self._live.values() if node.role is Role.DECODER]

    def _storage_nodes(self) -> dict[str, Node]:
        return {name: node for name, node in self._live.items() if node.role is Role.STORAGE}

    def _tenant(self, namespace: Namespace) -> TenantPolicy:
        return self._tenants.get(namespace.tenant) or TenantPolicy(namespace.tenant)

    def _advise(
        self, question: Question, tenant: TenantPolicy, ranges: Sequence[ChunkRange], matched: int
    ) -> Advice | None:
        """None if nobody asks, and where a profile or the scheduler's word on the link is missing."""
        if not (question.prompt_tokens and question.device and matched):
            return None
        layout = question.namespace.layout
        if question.prompt_tokens < matched * layout.chunk_tokens:
            raise InvalidRequest(f"{question.prompt_tokens}, but more are cached", field="prompt_tokens")
        profile = self._profiles.find(question.namespace.model_id, question.device)
        rate = newcomer_rate(list(self._live.values()), ranges[0].node_id)
        if profile is None or rate <= 0:
            return None
        rate = min(rate, tenant.cap_bytes_per_s or rate)
        fixed_s = self._config.fetch_fixed_ms / 1000
        return advise(profile, layout, question.prompt_tokens, matched, rate, fixed_s)

    def _lease(self, keys: ChunkKeys, found: Found, ttl_ms: int, tenant: TenantPolicy) -> Lease:
        """Over all of `keys`, which are those that matched."""
        return Lease(
            lease_id=os.urandom(16),
            tip=keys.at(len(keys) - 1),
            tip_segment=keys.segment_of(len(keys) - 1),
            expires_ms=self._clock.now_ms() + ttl_ms,
            ranges=tuple(found.ranges),
            keys_digest=keys.digest(),
            addresses={node.node_id: node.grpc_address for node in found.nodes},
            tenant=tenant,
        )

    def _count(self, namespace: Namespace, matched: int, asked: int) -> None:
        """By namespace, the first so many; Prometheus keeps a series for each."""
        tag = namespace.digest()[:4].hex()
        if tag not in self._namespaces and len(self._namespaces) >= _NAMESPACES_COUNTED:
            tag = "others"
        self._namespaces.add(tag)
        self._asked.add(matched, {"namespace": tag, "result": "hit"})
        self._asked.add(asked - matched, {"namespace": tag, "result": "miss"})

    async def _refresh(self) -> None:
        now_ms = self._clock.now_ms()
        self._leased = {lease: until for lease, until in self._leased.items() if until > now_ms}
        # One that an orchestrator of another release let in is not used by this one.
        members = await self._members.live(self._clock.now_ms())
        self._live = {node.node_id: node for node in members if version.understood(node.protocol_version)}
        self._epoch, self._rebuild = await self._index.epoch(), await self._index.rebuild()
        self._listings = await self._index.listings()
        for name in self._live:
            self._seen_s[name] = self._clock.monotonic_s()
        self._tenants, self._theta_bytes = await self._policies.tenants(), await self._policies.theta()
        self._watch()

    def _watch(self) -> None:
        """Watch the connection to every storage node: a process that dies is known at once, not at its expiry."""
        for node in self._storage_nodes().values():
            name = (node.node_id, node.incarnation)
            if name not in self._watchers:
                self._watchers[name] = asyncio.create_task(self._until_gone(node))

    async def _until_gone(self, node: Node) -> None:
        try:
            await self._holders.gone(node)
            logger().warning("the connection to a storage node broke", node=node.node_id)
            self._live.pop(node.node_id, None)
            await self._members.leave(node.node_id, node.incarnation)  # until its next heartbeat
        except QuireError as error:
            logger().warning("membership cannot be written", error=str(error))
        finally:
            del self._watchers[node.node_id, node.incarnation]

    async def _keep_fresh(self) -> None:
        while True:
            await self._clock.sleep(self._config.heartbeat_ms / 2000)
            try:
                await self._refresh()
            except QuireError as error:
                logger().warning("membership cannot be read", error=str(error))

    # ---- what nothing refers to any more

    async def _keep_swept(self) -> None:
        while True:
            await self._clock.sleep(self._config.sweep_ms / 1000)
            try:
                await self.sweep_objects()
                await self.forget_lost_nodes()
            except QuireError as error:
                logger().warning("nothing can be swept now", error=str(error))

    async def sweep_objects(self) -> int:
        """Have objects deleted whose time of grace is over and that no entry lists; how many."""
        nodes = [node for node in self._storage_nodes().values() if has_objects(node)]
        if not nodes or self._rebuild:  # an index that went back may not know what was stored again since
            return 0
        now_ms = self._clock.now_ms()
        until_ms = now_ms + self._config.object_deletion_ms
        claimed = await self._index.claim_objects(now_ms, until_ms, _SWEEP_MAX)
        if claimed:
            keys = ChunkKeys(b"".join(record.key for record in claimed))
            await self._holders.delete_objects(nodes[now_ms % len(nodes)], keys, until_ms)
            await self._index.objects_deleted(claimed, until_ms)
        return len(claimed)

    async def forget_lost_nodes(self) -> int:
        """Withdraw what is listed for nodes that were not seen for long; how many chunks. One that returns registers
        again what it has."""
        gone = 0
        now_s = self._clock.monotonic_s()
        for name, listing in self._listings.items():
            seen_s = self._seen_s.setdefault(name, now_s)
            if name == OBJECT_TIER or not listing.count or now_s - seen_s < self._config.node_lost_ms / 1000:
                continue
            cursor, more = 0, True
            while more and name not in self._live:
                page, cursor = await self._index.holdings(name, cursor)
                more = cursor != 0
                await self._index.unregister(name, [record for record, _ in page], self._clock.now_ms())
                gone += len(page)
            logger().warning("a node is gone for good: what it held is withdrawn", node=name, chunks=gone)
        return gone
