"""Policies of a simulated cluster's tenants: bounds of namespaces, and no quotas."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

from quire.model.policy import NamespacePolicy, TenantPolicy, Theta


class Policies:
    """The `PolicyBook` port. `namespaces`: bounds of namespaces."""

    def __init__(self, namespaces: list[NamespacePolicy]) -> None:
        self._namespaces = namespaces

    async def set(self, policy: NamespacePolicy) -> None: ...
    async def all(self) -> list[NamespacePolicy]:
        return self._namespaces

    async def set_tenant(self, policy: TenantPolicy) -> None: ...
    async def tenants(self) -> dict[str, TenantPolicy]:
        return {}

    async def add_namespace(self, tenant: str, namespace: bytes) -> None: ...
    async def namespaces_of(self, tenant: str) -> frozenset[bytes]:
        return frozenset()

    async def set_theta(self, theta_bytes: int, *, object_tier: bool) -> None: ...
    async def theta(self) -> Theta:
        return Theta()


class Unlimited:
    """The `TenantQuotas` port."""

    def reserve(self, tenant: str, more_bytes: int) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def kept(self, digests: Iterable[str]) -> dict[str, int]:
        return {}
