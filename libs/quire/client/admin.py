"""Client of the admin frontend, for operators: policies, the threshold Θ, removal of storage nodes, cache events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property
from typing import Final

from quire.client import status
from quire.model.events import EventPage
from quire.model.hashing import Namespace
from quire.model.health import Check
from quire.model.nodes import MemberSpans, Node, Removal
from quire.model.policy import NamespacePolicy, PolicyList, TenantPolicy
from quire.wire import convert
from quire.wire.channels import ChannelPool, call, heard, stream
from quire.wire.credentials import operator_token
from quire.wire.policies import policies_from, policy_from
from quire.wire.tls import Tls
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1.gateway_pb2_grpc import AdminServiceStub

_COUNT_S_MAX: Final = 60.0
"""For how long an orchestrator may look through the whole index."""
_SILENCE_S: Final = 20.0
"""A gateway says every few seconds that it is there."""


class AdminClient:
    """`address`: a gateway's `QUIRE_GATEWAY_ADMIN_LISTEN`. Raises `Unauthenticated` for another cluster's secret."""

    def __init__(self, address: str, cluster_secret: str, *, tls: Tls | None = None, timeout_s: float = 10.0) -> None:
        self._address = address
        self._channels = ChannelPool(tls, operator_token(cluster_secret))
        self._timeout_s = timeout_s

    @cached_property
    def _stub(self) -> AdminServiceStub:
        """Made at the first call: a channel belongs to the loop that it is opened in."""
        stub: AdminServiceStub = AdminServiceStub(self._channels.get(self._address))
        return stub

    async def __aenter__(self) -> AdminClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channels.close()

    async def status(self, *, with_away: bool = False) -> Sequence[Node]:
        """Return the members of the cluster, with the work of each for each tenant.

        `with_away`: and storage nodes that are expected, but not alive.
        """
        return await status.members(self._stub.Status, self._timeout_s, with_away=with_away)

    async def health(self) -> Sequence[Check]:
        """Return the checks that the cluster fails, the worst first."""
        return await status.failed_checks(self._stub.Status, self._timeout_s)

    async def set_policy(
        self, namespace: Namespace, *, ttl_s: int | None = None, quota_bytes: int | None = None
    ) -> NamespacePolicy:
        """Set a namespace's time to live in seconds and its quota in bytes; 0: no limit, None: unchanged.

        Returns the response that is now in force.
        """
        request = pb.SetPolicyRequest(namespace=convert.namespace_to(namespace), ttl_s=ttl_s, quota_bytes=quota_bytes)
        response = await call(self._stub.SetPolicy, request, timeout_s=self._timeout_s)
        return policy_from(response.policy)

    async def set_tenant(
        self,
        tenant_salt: bytes = b"",
        *,
        name: str = "",
        weight: float | None = None,
        cap_bytes_per_s: int | None = None,
        stored_bytes_max: int | None = None,
    ) -> TenantPolicy:
        """Set a tenant's weight at contended links, its cap (0 for none), and its quota in bytes (0 for none).

        None: unchanged. `name`: as its access keys have it, instead of its salt. Returns the policy that is now in
        force, without the tenant's name.
        """
        request = pb.SetTenantRequest(
            tenant_salt=tenant_salt,
            name=name,
            weight=weight,
            cap_bytes_per_s=cap_bytes_per_s,
            stored_bytes_max=stored_bytes_max,
        )
        response = await call(self._stub.SetTenant, request, timeout_s=self._timeout_s)
        return TenantPolicy("", response.weight, response.cap_bytes_per_s, response.stored_bytes_max)

    async def policies(self) -> PolicyList:
        """Return the policies of namespaces and tenants, and the bytes that limited tenants have stored."""
        return policies_from(await call(self._stub.ListPolicies, pb.ListPoliciesRequest(), timeout_s=self._timeout_s))

    async def set_draining(self, node_id: str, *, draining: bool = True) -> None:
        """Have a storage node's chunks copied to others, or end that: it takes stores again, also if decommissioned.

        Raises `InvalidRequest` for a node that is not expected, `ConditionFailed` if no other could take its chunks.
        """
        request = pb.SetDrainingRequest(node_id=node_id, draining=draining)
        await call(self._stub.SetDraining, request, timeout_s=self._timeout_s)

    async def decommission(self, node_id: str, *, lose_chunks: bool = False) -> None:
        """Take a drained storage node out of use: once it has stopped, it is no longer expected.

        `lose_chunks`: also one with chunks that no other node has. Raises `InvalidRequest` for a node that is not
        expected, `ConditionFailed` while chunks would be lost.
        """
        request = pb.DecommissionRequest(node_id=node_id, lose_chunks=lose_chunks)
        await call(self._stub.Decommission, request, timeout_s=max(self._timeout_s, _COUNT_S_MAX))

    async def check_removal(self, node_id: str) -> Removal:
        """Return what would be lost with a storage node. Raises `InvalidRequest` for one that is not expected."""
        request = pb.CheckRemovalRequest(node_id=node_id)
        answer = await call(self._stub.CheckRemoval, request, timeout_s=max(self._timeout_s, _COUNT_S_MAX))
        return convert.removal_from(answer)

    async def watch(self, after: str = "") -> AsyncGenerator[EventPage, None]:
        """Chunks as they come and go, page by page, from now on or behind a cursor; the first page comes at once.

        `lost` in a page: events before it are missing. Ends with the connection: begin again behind the last cursor.
        Raises `InvalidRequest` for an invalid cursor, `TooManyRequests`, `Unavailable`.
        """
        first = True
        watching = stream(self._stub.Watch, pb.WatchRequest(after=after), timeout_s=None)
        messages = heard(watching, _SILENCE_S, "the gateway")
        async with contextlib.aclosing(messages):
            async for message in messages:
                if first or message.events or message.lost:
                    yield EventPage(tuple(map(convert.event_from, message.events)), message.cursor, message.lost)
                first = False

    async def spans(self, trace_id: str = "") -> AsyncGenerator[MemberSpans, None]:
        """The spans that members keep (`QUIRE_TRACE_RECENT`): of a trace, or whose id begins so, or of all.

        Raises `Unavailable` for a gateway that is silent.
        """
        request = pb.ListClusterSpansRequest(trace_id=trace_id.lower())
        pages = heard(stream(self._stub.ListSpans, request, timeout_s=None), _SILENCE_S, "the gateway")
        async with contextlib.aclosing(pages):
            async for page in pages:
                yield MemberSpans(page.member, tuple(page.spans), page.error)

    async def set_theta(self, theta_bytes: int, *, object_tier: bool = False) -> None:
        """Have every storage node deliver payloads below `theta_bytes` chunkwise; 0: each by its own setting.

        `object_tier`: those with chunks that only the object tier has, in place of the others.
        """
        method = self._stub.SetObjectTheta if object_tier else self._stub.SetTheta
        await call(method, pb.SetThetaRequest(theta_bytes=theta_bytes), timeout_s=self._timeout_s)
