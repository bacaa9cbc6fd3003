"""Settings of operators, as this orchestrator knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from quire.model.errors import QuotaExceeded
from quire.model.hashing import Namespace
from quire.model.policy import NamespacePolicy, PolicyList, TenantPolicy, TenantState, Theta
from quire_orchestrator.ports import PolicyBook, TenantQuotas

Policy = TypeVar("Policy", NamespacePolicy, TenantPolicy)


class Policies:
    """A short-lived picture of the book of policies, and the way to change it."""

    def __init__(self, book: PolicyBook) -> None:
        self._book = book
        self._tenants: Mapping[str, TenantPolicy] = {}
        self._quotas: Mapping[bytes, int] = {}
        self._stored_in: set[tuple[str, bytes]] = set()
        self._epoch = ""
        self._looking = asyncio.Lock()
        self.theta = Theta()
        """The thresholds that were set for all storage nodes."""

    async def refresh(self, epoch: str = "") -> None:
        """Read again. `epoch`: of the index; a new one means that Redis has lost the noted namespaces."""
        async with self._looking:  # one that began before a change must not end behind it
            self._tenants, self.theta, namespaces = await asyncio.gather(
                self._book.tenants(), self._book.theta(), self._book.all()
            )
            self._quotas = {policy.namespace: policy.quota_bytes for policy in namespaces}
        if epoch != self._epoch:
            self._epoch = epoch
            self._stored_in.clear()

    def tenant(self, namespace: Namespace) -> TenantPolicy:
        """Return the policy of a namespace's tenant."""
        return self.of(namespace.tenant)

    def of(self, tenant: str) -> TenantPolicy:
        """Return the policy of a tenant, by the digest of its salt."""
        return self._tenants.get(tenant) or TenantPolicy(tenant)

    def check_fits(self, namespace: Namespace, chunks: int) -> None:
        """Check that this number of new chunks can be kept at all. Over a shared quota the coldest chunks are evicted.

        Raises `QuotaExceeded`.
        """
        wanted_bytes = chunks * namespace.layout.chunk_bytes
        quota_bytes = self._quotas.get(namespace.tag, 0)
        for whose, limit_bytes in ("namespace", quota_bytes), ("tenant", self.tenant(namespace).stored_bytes_max):
            if limit_bytes and wanted_bytes > limit_bytes:
                raise QuotaExceeded(f"{wanted_bytes} bytes in one store; the {whose} may have {limit_bytes} in all")

    async def stores_in(self, namespace: Namespace) -> None:
        """A namespace's tenant is about to store: its chunks count for it."""
        noted = namespace.tenant, namespace.tag
        if namespace.tenant and noted not in self._stored_in:
            await self._book.add_namespace(*noted)
            self._stored_in.add(noted)

    async def set_namespace(
        self, tag: bytes, *, ttl_s: int | None = None, quota_bytes: int | None = None
    ) -> NamespacePolicy:
        """Bound a namespace; storage nodes, and other orchestrators, see it at their next read. None: unchanged.

        Returns the policy that is now in force.
        """
        async with self._looking:
            previous = {policy.namespace: policy for policy in await self._book.all()}
            policy = _changed(previous.get(tag, NamespacePolicy(tag, 0, 0)), ttl_s=ttl_s, quota_bytes=quota_bytes)
            await self._book.set(policy)
            self._quotas = {**self._quotas, policy.namespace: policy.quota_bytes}
            return policy

    async def all(self, quotas: TenantQuotas, storage_nodes: int) -> PolicyList:
        """Return all policies, and the bytes that limited tenants have stored."""
        tenants = await self._book.tenants()
        usage = await quotas.kept(name for name, policy in tenants.items() if policy.stored_bytes_max)
        states = [
            TenantState(
                policy=policy,
                kept_bytes=usage.get(name, 0),
                namespaces=await self._book.namespaces_of(name) if policy.stored_bytes_max else frozenset(),
            )
            for name, policy in sorted(tenants.items())
        ]
        namespaces = tuple(await self._book.all())
        return PolicyList(namespaces=namespaces, tenants=tuple(states), storage_nodes=storage_nodes)

    async def set_tenant(
        self,
        tenant: str,
        *,
        weight: float | None = None,
        cap_bytes_per_s: int | None = None,
        stored_bytes_max: int | None = None,
    ) -> TenantPolicy:
        """Limit a tenant, by the digest of its salt; other services see it at their next read.

        None: unchanged. Returns the policy that is now in force.
        """
        changes = {"weight": weight, "cap_bytes_per_s": cap_bytes_per_s, "stored_bytes_max": stored_bytes_max}
        async with self._looking:
            previous = await self._book.tenants()
            policy = _changed(previous.get(tenant, TenantPolicy(tenant)), **changes)
            await self._book.set_tenant(policy)
            self._tenants = {**self._tenants, policy.tenant: policy}
            return policy

    async def set_theta(self, theta_bytes: int, *, object_tier: bool) -> None:
        """Set one of the thresholds Θ; storage nodes receive it with their next heartbeats."""
        async with self._looking:
            await self._book.set_theta(theta_bytes, object_tier=object_tier)
            self.theta = replace(self.theta, **{"object_bytes" if object_tier else "held_bytes": theta_bytes})


def _changed(policy: Policy, **changes: Any) -> Policy:
    return replace(policy, **{name: value for name, value in changes.items() if value is not None})
