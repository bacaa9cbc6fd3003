"""What operators have set, as this orchestrator knows it."""

from __future__ import annotations

from quire.model.hashing import Namespace
from quire.model.policy import NamespacePolicy, TenantPolicy
from quire_orchestrator.ports import PolicyBook


class Policies:
    """A short-lived picture of the book of policies, and the way to change it."""

    def __init__(self, book: PolicyBook) -> None:
        self._book = book
        self._tenants: dict[str, TenantPolicy] = {}
        self.theta_bytes = 0
        """The threshold Θ that was set for all storage nodes; 0 for their own settings."""

    async def refresh(self) -> None:
        self._tenants, self.theta_bytes = await self._book.tenants(), await self._book.theta()

    def tenant(self, namespace: Namespace) -> TenantPolicy:
        """What a namespace's tenant gets of the links."""
        return self._tenants.get(namespace.tenant) or TenantPolicy(namespace.tenant)

    async def set_namespace(self, policy: NamespacePolicy) -> None:
        """Bound a namespace; storage nodes hear of it when they next look."""
        await self._book.set(policy)

    async def namespaces(self) -> list[NamespacePolicy]:
        """All that are set."""
        return await self._book.all()

    async def set_tenant(self, policy: TenantPolicy) -> None:
        """Counts for look-ups from the next refresh on."""
        await self._book.set_tenant(policy)

    async def set_theta(self, theta_bytes: int) -> None:
        """Storage nodes hear of it with their next heartbeats."""
        await self._book.set_theta(theta_bytes)
        self.theta_bytes = theta_bytes
