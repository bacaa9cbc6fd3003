"""What was set holds from then on, whatever looks at the book meanwhile."""

from __future__ import annotations

import asyncio

from quire.model.policy import NamespacePolicy, TenantPolicy, Theta
from quire_orchestrator.policies import Policies


class SlowBook:
    """A look gives what was there when it began, and takes until it is let go."""

    def __init__(self) -> None:
        self.policies: dict[str, TenantPolicy] = {}
        self.slow = asyncio.Event()
        self.looks = 0

    async def tenants(self) -> dict[str, TenantPolicy]:
        self.looks += 1
        seen = dict(self.policies)
        if self.looks == 1:
            await self.slow.wait()
        return seen

    async def theta(self) -> Theta:
        return Theta()

    async def all(self) -> list[NamespacePolicy]:
        return []

    async def set_tenant(self, policy: TenantPolicy) -> None:
        self.policies[policy.tenant] = policy

    async def set(self, policy: NamespacePolicy) -> None: ...
    async def add_namespace(self, tenant: str, namespace: bytes) -> None: ...
    async def namespaces_of(self, tenant: str) -> frozenset[bytes]:
        return frozenset()

    async def set_theta(self, theta_bytes: int, *, object_tier: bool) -> None: ...


async def test_a_look_that_began_before_a_change_does_not_undo_it() -> None:
    book = SlowBook()
    policies = Policies(book)
    look = asyncio.create_task(policies.refresh())
    await asyncio.sleep(0.01)
    change = asyncio.create_task(policies.set_tenant("t", stored_bytes_max=7))
    await asyncio.sleep(0.01)
    book.slow.set()
    await asyncio.gather(look, change)
    assert policies.of("t").stored_bytes_max == 7


async def test_what_is_not_given_stays_as_it_was() -> None:
    policies = Policies(SlowBook())
    policies._book.slow.set()  # type: ignore[attr-defined]
    await policies.set_tenant("t", stored_bytes_max=7)
    made = await policies.set_tenant("t", weight=2.0, cap_bytes_per_s=5)
    assert made == policies.of("t") == TenantPolicy("t", 2.0, 5, 7)
    assert await policies.set_tenant("t", stored_bytes_max=0) == TenantPolicy("t", 2.0, 5, 0)
    assert await policies.set_namespace(bytes(16), ttl_s=60) == NamespacePolicy(bytes(16), 60, 0)
