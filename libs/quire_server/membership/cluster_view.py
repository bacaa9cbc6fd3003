"""The cluster as look-ups need it: who is alive, and what tenants get of the links."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from typing import Final, Protocol

from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.nodes import Node, Role
from quire.model.policy import TenantPolicy
from quire.telemetry import background, logger
from quire.wire import version
from quire_server import tasks
from quire_server.clock import Clock
from quire_server.core.placement import link_rates_of

_HEARTBEAT_S_MAX: Final = 3.0
"""By then each member has sent a heartbeat after an outage of Redis."""


class ClusterView(Protocol):
    """The last view."""

    @property
    def live(self) -> Mapping[str, Node]:
        """Members that are alive, by name."""

    @property
    def link_rates(self) -> Mapping[str, int]:
        """Rate of one more delivery on each link, bytes per second, if the scheduler reports it."""

    def storage_nodes(self) -> Mapping[str, Node]:
        """Storage nodes among them."""

    async def refresh(self) -> None:
        """Look again, now. Raises `MetadataUnavailable`."""

    def tenant(self, namespace: Namespace) -> TenantPolicy:
        """Return the share of links of a namespace's tenant."""


class MembersRead(Protocol):
    """See `quire_server.redis.Membership`."""

    async def live(self) -> list[Node]: ...
    def changes(self) -> AsyncIterator[None]: ...


class TenantsRead(Protocol):
    """See `quire_server.redis.Policies`."""

    async def tenants(self) -> dict[str, TenantPolicy]: ...


class RefreshedView:
    """The view of a service that only reads it: renewed at every change, and every `refresh_s` in case one was missed.

    Without Redis it stays unchanged. Members expire in Redis during an outage: when it answers again, those that were
    alive before count as alive until each had time to send a heartbeat.
    """

    def __init__(self, *, members: MembersRead, tenants: TenantsRead, clock: Clock, refresh_s: float) -> None:
        self._members = members
        self._policies = tenants
        self._clock = clock
        self._refresh_s = refresh_s
        self._tenants: Mapping[str, TenantPolicy] = {}
        self._storage: Mapping[str, Node] = {}
        self._looks = 0
        self._read: set[str] = set()  # storage nodes that Redis had at the last look
        self._failed = False
        self._returned_s = -math.inf
        self._looking = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self.live: Mapping[str, Node] = {}
        self.link_rates: Mapping[str, int] = {}

    async def start(self) -> None:
        """Look once, if Redis answers, and keep looking."""
        await self._try()
        self._tasks = [asyncio.create_task(work, context=background()) for work in (self._keep_fresh(), self._listen())]

    async def close(self) -> None:
        await tasks.end(self._tasks)

    def storage_nodes(self) -> Mapping[str, Node]:
        return self._storage

    def tenant(self, namespace: Namespace) -> TenantPolicy:
        return self.policy(namespace.tenant)

    def policy(self, tenant: str) -> TenantPolicy:
        """Return the policy of a tenant, by the digest of its salt."""
        return self._tenants.get(tenant) or TenantPolicy(tenant)

    async def refresh(self) -> None:
        """Look now; those that ask at once share an answer to a question that was put after they had asked."""
        number = self._looks + 1
        async with self._looking:
            if self._looks < number:
                self._looks += 1
                await self._look()

    async def _look(self) -> None:
        # A node accepted by an orchestrator of another release is not used by this service.
        try:
            members = await self._members.live()
        except QuireError:
            self._failed = True
            raise
        live = {node.node_id: node for node in members if version.understood(node.protocol_version)}
        now_s = self._clock.monotonic_s()
        storage = {name for name, node in live.items() if node.role is Role.STORAGE}
        stood_still = len(self._read) > 1 and not storage & self._read  # until all had expired
        if self._failed or stood_still:
            self._failed, self._returned_s = False, now_s
        self._read = storage
        self.live = {**self.live, **live} if now_s - self._returned_s < _HEARTBEAT_S_MAX else live
        self._storage = {name: node for name, node in self.live.items() if node.role is Role.STORAGE}
        self.link_rates = link_rates_of(self.live.values())
        self._tenants = await self._policies.tenants()

    async def _try(self) -> None:
        try:
            await self.refresh()
        except QuireError as error:
            logger().warning("the cluster's members cannot be read", error=str(error))

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(QuireError):  # the other task says that Redis is away
                async with contextlib.aclosing(self._members.changes()) as changes:  # type: ignore[type-var]
                    async for _ in changes:
                        await self._try()
            await self._clock.sleep(self._refresh_s)

    async def _keep_fresh(self) -> None:
        while True:
            await self._clock.sleep(self._refresh_s)
            await self._try()
