"""The orchestrator's parts: Redis on one side, storage nodes on the other."""

from __future__ import annotations

from collections import Counter

from quire.model.nodes import Role
from quire.model.profile import Profiles
from quire_orchestrator.allocation import Allocation
from quire_orchestrator.announcements import Announcements, EventLog
from quire_orchestrator.assigning import Assigning
from quire_orchestrator.cluster import Cluster
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.core.placement import Placement
from quire_orchestrator.evictions import Evictions
from quire_orchestrator.policies import Policies
from quire_orchestrator.ports import ChunkHolder, Index, Members, PolicyBook
from quire_orchestrator.removals import Removals
from quire_orchestrator.reports import Reports
from quire_server.clock import ClusterClock
from quire_server.lookups import Lookups, LookupSettings


class Orchestrator:
    """Holds no state but a short-lived picture of the cluster, which its parts share."""

    def __init__(
        self,
        *,
        config: OrchestratorConfig,
        index: Index,
        members: Members,
        policies: PolicyBook,
        holders: ChunkHolder,
        clock: ClusterClock,
        events: EventLog | None = None,
    ) -> None:
        """`events`: receives the events of chunks; None for none."""
        self.announcements = announcements = Announcements(events, clock)
        self.policies = Policies(policies)
        self.cluster = cluster = Cluster(
            config=config, index=index, members=members, policies=self.policies, holders=holders, clock=clock
        )
        settings = LookupSettings(secrets=config.secrets)
        self.lookups = Lookups(settings=settings, index=index, view=cluster, profiles=Profiles(None), clock=clock)
        self.assigning = Assigning(lookups=self.lookups, cluster=cluster)
        placement = Placement(2 * config.heartbeat_ms / 1000)
        self.allocation = Allocation(index=index, cluster=cluster, holders=holders, placement=placement, clock=clock)
        self.evictions = Evictions(
            config=config, index=index, cluster=cluster, holders=holders, announcements=announcements, clock=clock
        )
        self.removals = Removals(index=index, cluster=cluster, members=members)
        self.reports = Reports(config=config, index=index, cluster=cluster, announcements=announcements, clock=clock)

    @property
    def stats(self) -> dict[str, float]:
        """Figures for the dashboard."""
        live = Counter(node.role.value for node in self.cluster.live.values())
        return {"leases": self.lookups.leases, **{f"nodes.{role.value}": live[role.value] for role in Role}}

    async def start(self) -> None:
        await self.cluster.start()
        self.evictions.start()

    async def close(self) -> None:
        await self.evictions.close()
        await self.cluster.close()
        await self.announcements.close()
