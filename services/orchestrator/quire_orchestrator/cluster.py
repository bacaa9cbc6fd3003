"""Members of the cluster, and the index's listings of them: a short-lived view, kept fresh."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Final, NamedTuple

from quire.model.errors import NameTaken, QuireError, SecretDiffers, VersionUnsupported
from quire.model.hashing import Namespace
from quire.model.index import Listing
from quire.model.nodes import Node, Role, StorageInfo, StorageState
from quire.model.policy import TenantPolicy
from quire.telemetry import logger
from quire.wire import version
from quire.wire.credentials import check_proof
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.core.eviction import has_objects, rebuilder
from quire_orchestrator.policies import Policies
from quire_orchestrator.ports import ChunkHolder, Index, Members
from quire_server import tasks
from quire_server.clock import ClusterClock
from quire_server.core.placement import link_rates_of
from quire_server.membership.heartbeat import ClusterNews
from quire_server.membership.membership_log import MembershipChanges, MembershipLog

_REPORT_MS: Final = 2.5
_UNPROVEN: Final = "QUIRE_ACCEPT_UNPROVEN"
_PROVEN: Final = 4
"""The protocol from which on members prove that they know the secret."""
_GATHERED_SHARE: Final = 0.05
_LISTING_S: Final = 0.02
_TTL_FACTOR_MAX: Final = 5
_PAUSES_KEPT_S: Final = 300.0
_REFUSED_S: Final = 15.0
_REFUSALS_MAX: Final = 64


class _Pauses(NamedTuple):
    """Reports of a process: when the last one came, the longest pause before one, for how long the last one counts."""

    last_s: float
    longest_s: float
    ttl_ms: int


class Cluster:
    """`live`: members by name.

    `rebuild`: the rebuilding of the index that is wanted. `link_rates`: rate of one more delivery on each link, bytes
    per second.
    """

    def __init__(
        self,
        *,
        config: OrchestratorConfig,
        index: Index,
        members: Members,
        policies: Policies,
        holders: ChunkHolder,
        clock: ClusterClock,
    ) -> None:
        self._config = config
        self._index = index
        self._members = members
        self._policies = policies
        self._holders = holders
        self._clock = clock
        self.live: dict[str, Node] = {}
        self._seen_s: dict[str, float] = {}
        self._read_s = -math.inf
        self.link_rates: dict[str, int] = {}
        self._epoch = self.rebuild = self._rebuilder = ""
        self._tick = 0
        self._closed = False
        self._storage: dict[str, Node] = {}
        self._roster = MembershipLog()
        self._listing_due_s: dict[str, float] = {}
        self._unusable: dict[str, str] = {}
        self._pauses: dict[tuple[str, str], _Pauses] = {}  # of each process, the last to report at the end
        self._refusals: dict[str, tuple[str, float]] = {}
        self._watchers: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._refresher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.refresh()
        self._refresher = asyncio.create_task(self._keep_fresh())

    async def close(self) -> None:
        self._closed = True  # the channels close next; that is no sign of dead nodes
        await tasks.end([self._refresher, *self._watchers.values()])

    async def heartbeat(self, node: Node, version: str) -> tuple[int, ClusterNews, MembershipChanges]:
        """Keep a member alive; return the milliseconds until its next report, the news, and the changes.

        The changes, of the other storage nodes since that version, are for storage nodes.
        """
        node = replace(node, state=await self._renew(node))
        self.live[node.node_id] = node
        if node.role is not Role.STORAGE:
            return self._interval_ms, ClusterNews(self._epoch, self._policies.theta), MembershipChanges("")
        self._watch(node)
        self._storage[node.node_id] = node
        self._roster.look_at(node)
        listing = await self._listing(node.node_id)
        if self.rebuild and not self._rebuilder and has_objects(node):  # the first one that can
            self._rebuilder = rebuilder(self.rebuild, self._storage)
        chosen = self.rebuild if node.node_id == self._rebuilder else ""
        news = ClusterNews(self._epoch, self._policies.theta, listing, chosen, node.state)
        return self._interval_ms, news, self._roster.changes(version)

    async def _renew(self, node: Node) -> StorageState:
        """Renew a membership, and return the node's state.

        In a large cluster reports are gathered, and written to Redis together.
        """
        gather_s = _GATHERED_SHARE * (self._interval_ms - self._config.heartbeat_ms) / 1000
        try:
            return await self._members.renew(node, self._ttl_ms(node), gather_s=gather_s)
        except NameTaken as error:
            self._refuse(node.node_id, error)
            raise

    def _ttl_ms(self, node: Node) -> int:
        """Return for how long a report counts: longer for a member whose reports come late, as on a busy machine.

        The longest pause between two reports of a process is remembered, and fades by a tenth with each report.
        """
        now_s = self._clock.monotonic_s()
        name, least_ms = (node.node_id, node.incarnation), max(self._config.member_ttl_ms, 3 * self._interval_ms)
        pauses = self._pauses.pop(name, _Pauses(now_s, 0.0, 0))
        pause_s, current = now_s - pauses.last_s, self.live.get(node.node_id)
        if 1000 * pause_s > pauses.ttl_ms and current is not None and current.incarnation == node.incarnation:
            pause_s = 0.0  # it lives all the same: another orchestrator has its reports
        longest_s = max(pause_s, 0.9 * pauses.longest_s)
        ttl_ms = max(least_ms, min(_TTL_FACTOR_MAX * least_ms, round(3000 * longest_s)))
        self._pauses[name] = _Pauses(now_s, longest_s, ttl_ms)
        while (oldest := next(iter(self._pauses))) and now_s - self._pauses[oldest].last_s > _PAUSES_KEPT_S:
            del self._pauses[oldest]
        return ttl_ms

    @property
    def _interval_ms(self) -> int:
        """The more members, the less often each reports."""
        return max(self._config.heartbeat_ms, round(_REPORT_MS * len(self.live)))

    async def _listing(self, node_id: str) -> Listing | None:
        """Return the index's listing of a node; the more members, the less often it is read."""
        now_s = self._clock.monotonic_s()
        if now_s < self._listing_due_s.get(node_id, 0.0):
            return None
        self._listing_due_s[node_id] = now_s + _LISTING_S * len(self.live)
        return await self._index.listing(node_id)

    def check(self, node: Node, proof: bytes) -> None:
        """Whether it may be a member: it speaks this protocol, and proves that it knows the cluster's secret.

        Raises `VersionUnsupported`, `SecretDiffers`; the log says it once for each start of a node.
        """
        unproven = self._config.accept_unproven and node.protocol_version < _PROVEN and not proof
        current = self.live.get(node.node_id)
        if current is not None and current.incarnation == node.incarnation and current.protocol_version >= _PROVEN:
            unproven = False  # that one has proven it
        try:
            version.check(node.protocol_version)
            if not unproven:
                check_proof(proof, node.node_id, node.incarnation, *self._config.secrets)
            elif self._unusable.get(node.node_id) != node.incarnation:
                logger().warning("a member that proves nothing is accepted", node=node.node_id, setting=_UNPROVEN)
                self._unusable[node.node_id] = node.incarnation
        except (VersionUnsupported, SecretDiffers) as error:
            if self._unusable.get(node.node_id) != node.incarnation:
                logger().error("a node cannot be used", node=node.node_id, error=str(error))
            self._unusable[node.node_id] = node.incarnation
            self._refuse(node.node_id, error)
            raise

    def _refuse(self, node_id: str, error: QuireError) -> None:
        self._refusals.pop(node_id, None)
        self._refusals[node_id] = f"{error.code()}: {error}", self._clock.monotonic_s()
        while len(self._refusals) > _REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]

    def refused(self) -> dict[str, str]:
        """Return the nodes that this orchestrator has refused in the last seconds, with the reason."""
        since_s = self._clock.monotonic_s() - _REFUSED_S
        return {node_id: reason for node_id, (reason, at_s) in self._refusals.items() if at_s >= since_s}

    @property
    def now_ms(self) -> int:
        """Redis' clock, in ms since the Unix epoch."""
        return self._clock.now_ms()

    async def leave(self, node_id: str, incarnation: str) -> None:
        """A node stops; one that has restarted since stays."""
        await self._members.leave(node_id, incarnation)
        await self.refresh()

    async def nodes(self, role: Role | None, *, with_away: bool = False) -> list[Node]:
        """Return the live ones, of a role or of all, with their figures for people.

        `with_away`: and the storage nodes that are expected, by their names.
        """
        await self.refresh()
        nodes = [node for node in await self._members.described() if role in (None, node.role)]
        if with_away and role in (None, Role.STORAGE):
            live = {node.node_id for node in nodes}
            for name, state in sorted((await self._members.expected()).items()):
                if name not in live and state is not StorageState.DECOMMISSIONED:
                    nodes.append(Node(node_id=name, about=StorageInfo(), state=state, is_away=True))
        return nodes

    def storage_nodes(self) -> dict[str, Node]:
        """Return the live storage nodes, by name."""
        return self._storage

    def tenant(self, namespace: Namespace) -> TenantPolicy:
        """Return the policy of a namespace's tenant."""
        return self._policies.tenant(namespace)

    def decoders(self) -> list[Node]:
        """Return the live decoders."""
        return list(self._of(Role.DECODER).values())

    def _of(self, role: Role) -> dict[str, Node]:
        return {name: node for name, node in self.live.items() if node.role is role}

    async def refresh(self) -> None:
        """Look again, now."""
        asked_s = self._clock.monotonic_s()
        self._clock.follow(await self._members.now_ms(), asked_s)
        # A node accepted by an orchestrator of another release is not used by this one.
        members = await self._members.live()
        self.live = {node.node_id: node for node in members if version.understood(node.protocol_version)}
        self.link_rates = link_rates_of(self.live.values())
        await self._look_at_index()
        self._storage = self._of(Role.STORAGE)
        self._roster.look(self._storage)
        self._rebuilder = rebuilder(self.rebuild, self._storage) if self.rebuild else ""
        self._see()
        await self._policies.refresh(self._epoch)
        for node in self.storage_nodes().values():
            self._watch(node)

    async def _look_at_index(self) -> None:
        """Read the index's name and tick. An index that went back is rebuilt: it may miss chunks of the object tier."""
        previous_tick = self._tick  # read before the request: concurrent requests may finish in any order
        epoch, tick = await self._index.epoch(), await self._index.tick()
        went_back = self._epoch not in ("", epoch) or tick <= previous_tick
        if went_back:
            logger().error("the index went back", epoch=epoch, tick=tick, previous_tick=previous_tick)
            await self._index.damaged()
        self._epoch, self._tick = epoch, tick if went_back else max(self._tick, tick)
        self.rebuild = await self._index.rebuild()

    def away_s(self, node_id: str) -> float:
        """Return for how long a node was silent while membership could be read: 0 while it cannot."""
        now_s = self._clock.monotonic_s()
        if now_s - self._read_s > self._blind_s:
            return 0.0
        return now_s - self._seen_s.setdefault(node_id, now_s)

    @property
    def _blind_s(self) -> float:
        """Age of the last read after which absences are forgotten: no member could renew its membership either."""
        return max(self._config.member_ttl_ms, 3 * self._interval_ms) / 1000

    def _see(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._read_s > self._blind_s:  # after an outage every node has its whole time to report again
            self._seen_s = dict.fromkeys(self._seen_s, now_s)
        self._read_s = now_s
        for name in self.live:
            self._seen_s[name] = now_s

    def _watch(self, node: Node) -> None:
        """Watch the connection to a storage node: a process that dies is known at once, not at its expiry."""
        name = (node.node_id, node.incarnation)
        if name not in self._watchers and not self._closed:
            self._watchers[name] = asyncio.create_task(self._until_gone(node))

    async def _until_gone(self, node: Node) -> None:
        try:
            await self._holders.gone(node)
            current = self.live.get(node.node_id)
            if self._closed or current is None or current.incarnation != node.incarnation:
                return  # it has left, or another one has its place
            logger().warning("the connection to a storage node broke", node=node.node_id)
            self.live.pop(node.node_id, None)
            self._storage = {name: member for name, member in self._storage.items() if name != node.node_id}
            self._roster.lost(node.node_id)
            await self._members.leave(node.node_id, node.incarnation, crashed=True)  # until its next heartbeat
        except QuireError as error:
            logger().warning("membership cannot be written", error=str(error))
        finally:
            del self._watchers[node.node_id, node.incarnation]

    async def _keep_fresh(self) -> None:
        while True:
            await self._clock.sleep(self._interval_ms / 2000)
            try:
                await self.refresh()
            except QuireError as error:
                logger().warning("membership cannot be read", error=str(error))
