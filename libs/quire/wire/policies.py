"""Policies as messages, and back."""

from __future__ import annotations

from quire.model.policy import NamespacePolicy, PolicyList, TenantPolicy, TenantState
from quire.wire.v1 import common_pb2, gateway_pb2


def policy_from(message: common_pb2.NamespacePolicy) -> NamespacePolicy:
    return NamespacePolicy(message.namespace, message.ttl_s, message.quota_bytes)


def policy_to(policy: NamespacePolicy) -> common_pb2.NamespacePolicy:
    return common_pb2.NamespacePolicy(namespace=policy.namespace, ttl_s=policy.ttl_s, quota_bytes=policy.quota_bytes)


def policies_to(book: PolicyList) -> gateway_pb2.ListPoliciesResponse:
    tenants = (
        gateway_pb2.TenantState(
            tenant=state.policy.tenant,
            weight=state.policy.weight,
            cap_bytes_per_s=state.policy.cap_bytes_per_s,
            stored_bytes_max=state.policy.stored_bytes_max,
            kept_bytes=state.kept_bytes,
            namespaces=sorted(state.namespaces),
            name=state.name,
        )
        for state in book.tenants
    )
    return gateway_pb2.ListPoliciesResponse(
        policies=map(policy_to, book.namespaces), storage_nodes=book.storage_nodes, tenants=tenants
    )


def policies_from(message: gateway_pb2.ListPoliciesResponse) -> PolicyList:
    tenants = (
        TenantState(
            policy=TenantPolicy(tenant.tenant, tenant.weight, tenant.cap_bytes_per_s, tenant.stored_bytes_max),
            kept_bytes=tenant.kept_bytes,
            namespaces=frozenset(tenant.namespaces),
            name=tenant.name,
        )
        for tenant in message.tenants
    )
    namespaces = tuple(map(policy_from, message.policies))
    return PolicyList(namespaces=namespaces, tenants=tuple(tenants), storage_nodes=message.storage_nodes)
