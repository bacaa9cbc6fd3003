"""The operators' gRPC frontend."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Final

from quire.model.events import CacheEvent
from quire.model.hashing import tenant_name
from quire.model.keys import ChunkKeys
from quire.model.records import NO_NAMESPACE, NO_PARENT
from quire.wire import convert
from quire.wire.channels import call
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1 import orchestrator_pb2
from quire.wire.v1.gateway_pb2_grpc import (
    AdminServiceServicer,
)
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire_gateway.access.admission import Admission
from quire_gateway.access.key_derivation import KeyDerivation
from quire_gateway.access.tenant_names import TenantNames
from quire_gateway.config import GatewayConfig
from quire_gateway.kv.watch import EventWatch
from quire_gateway.ports import ClusterSpans

_COUNT_S_MAX: Final = 60.0
"""For how long an orchestrator may look through the whole index."""


class AdminServicer(AdminServiceServicer):
    """Servicer for operators, who know the cluster's secret. Requests are forwarded to the orchestrator unchanged."""

    def __init__(
        self,
        config: GatewayConfig,
        admission: Admission,
        orchestrator: OrchestratorServiceStub,
        watching: EventWatch,
        spans: ClusterSpans,
        derivation: KeyDerivation,
        names: TenantNames,
    ) -> None:
        self._names = names
        self._derivation = derivation
        self._watching = watching
        self._spans = spans
        self._timeout_s = config.control_timeout_s
        self._admission = admission
        self._orchestrator = orchestrator

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        await self._admission.operator(context)
        listing = orchestrator_pb2.ListNodesRequest(with_away=request.with_away, with_checks=True)
        listed = await call(self._orchestrator.ListNodes, listing, timeout_s=self._timeout_s)
        return pb.StatusResponse(nodes=listed.nodes, checks=listed.checks, checked=listed.checked)

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Any) -> pb.SetPolicyResponse:
        response: pb.SetPolicyResponse = await self._act(
            self._orchestrator.SetPolicy,
            request,
            context,
            lambda: convert.namespace_from(request.namespace).tag.hex(),
        )
        return response

    async def SetTenant(self, request: pb.SetTenantRequest, context: Any) -> pb.SetTenantResponse:
        response: pb.SetTenantResponse = await self._act(
            self._orchestrator.SetTenant, request, context, lambda: request.name or tenant_name(request.tenant_salt)
        )
        return response

    async def ListPolicies(self, request: pb.ListPoliciesRequest, context: Any) -> pb.ListPoliciesResponse:
        response: pb.ListPoliciesResponse = await self._act(self._orchestrator.ListPolicies, request, context)
        names = await self._names.by_digest()
        for tenant in response.tenants:
            tenant.name = names.get(tenant.tenant, "")
        return response

    async def SetTheta(self, request: pb.SetThetaRequest, context: Any) -> pb.SetThetaResponse:
        response: pb.SetThetaResponse = await self._act(
            self._orchestrator.SetTheta, request, context, lambda: str(request.theta_bytes)
        )
        return response

    async def SetObjectTheta(self, request: pb.SetThetaRequest, context: Any) -> pb.SetThetaResponse:
        response: pb.SetThetaResponse = await self._act(
            self._orchestrator.SetObjectTheta, request, context, lambda: str(request.theta_bytes)
        )
        return response

    async def SetDraining(self, request: pb.SetDrainingRequest, context: Any) -> pb.SetDrainingResponse:
        response: pb.SetDrainingResponse = await self._act(
            self._orchestrator.SetDraining, request, context, lambda: request.node_id
        )
        return response

    async def Decommission(self, request: pb.DecommissionRequest, context: Any) -> pb.DecommissionResponse:
        response: pb.DecommissionResponse = await self._act(
            self._orchestrator.Decommission, request, context, lambda: request.node_id, timeout_s=_COUNT_S_MAX
        )
        return response

    async def CheckRemoval(self, request: pb.CheckRemovalRequest, context: Any) -> pb.CheckRemovalResponse:
        await self._admission.operator(context)
        response: pb.CheckRemovalResponse = await call(self._orchestrator.CheckRemoval, request, timeout_s=_COUNT_S_MAX)
        return response

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        await self._admission.operator(context)
        self._admission.audit.act("Watch", request.after, None)
        async with contextlib.aclosing(self._watching.follow(request.after)) as pages:  # type: ignore[type-var]
            async for page in pages:
                events = [convert.event_to(await self._with_clients_keys(event)) for event in page.events]
                yield pb.WatchResponse(events=events, cursor=page.cursor, lost=page.lost)

    async def ListSpans(
        self, request: pb.ListClusterSpansRequest, context: Any
    ) -> AsyncIterator[pb.ListClusterSpansResponse]:
        await self._admission.operator(context)
        self._admission.audit.act("ListSpans", request.trace_id, None)
        async with contextlib.aclosing(self._spans.of(request.trace_id)) as pages:
            async for page in pages:
                yield pb.ListClusterSpansResponse(member=page.member, spans=page.spans, error=page.error)

    async def _with_clients_keys(self, event: CacheEvent) -> CacheEvent:
        """Translate derived keys, unless the event has no namespace, as from a node of an earlier release."""
        if event.namespace == NO_NAMESPACE:
            return event
        keys = await self._derivation.revert(event.namespace, event.keys)
        parents = await self._derivation.revert(event.namespace, ChunkKeys(event.parents))
        pairs = zip(ChunkKeys(event.parents), parents, strict=True)
        translated = b"".join(NO_PARENT if derived == NO_PARENT else parent for derived, parent in pairs)
        return replace(event, keys=keys, parents=translated)

    async def _act(
        self, method: Any, request: Any, context: Any, subject: Callable[[], str] = str, *, timeout_s: float = 0.0
    ) -> Any:
        """Forward an act to the orchestrator, and record it. `subject`: returns its object; called once admitted."""
        act, subject_of_act = type(request).__name__.removesuffix("Request"), ""
        await self._admission.operator(context)
        try:
            subject_of_act = subject()
            response = await call(method, request, timeout_s=timeout_s or self._timeout_s)
        except BaseException as error:  # also of an operator who has hung up
            self._admission.audit.act(act, subject_of_act, error)
            raise
        self._admission.audit.act(act, subject_of_act, None)
        return response
