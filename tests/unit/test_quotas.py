"""What a tenant may keep of S3 objects and images."""

from __future__ import annotations

import pytest

from quire.model.errors import QuotaExceeded
from quire.model.hashing import tenant_name
from quire.model.policy import TenantPolicy
from quire_server.quotas import Quotas
from quire_server.redis.access import salt_of

SECRET = b"s" * 32
ALICE = tenant_name(salt_of("alice", SECRET))


class _Stored:
    def __init__(self, **by_tenant: int) -> None:
        self._by_tenant = by_tenant

    async def stored_bytes(self, tenant: str) -> int:
        return self._by_tenant.get(tenant, 0)

    async def everywhere(self) -> list[tuple[str, str]]:
        return [(tenant, bucket) for tenant in self._by_tenant for bucket in ("a", "b")]

    async def tenants(self) -> list[str]:
        return sorted(self._by_tenant)


def _quotas() -> Quotas:
    policies = {ALICE: TenantPolicy(ALICE, stored_bytes_max=1000)}
    return Quotas(
        policy=lambda name: policies.get(name) or TenantPolicy(name),
        objects=_Stored(alice=600, bob=10**9),
        images=_Stored(alice=300, carol=5),
        secrets=[SECRET],
    )


async def test_objects_and_images_count_together() -> None:
    quotas = _quotas()
    await quotas.check("alice", 100)
    with pytest.raises(QuotaExceeded, match="900 bytes are stored, 1000 may be"):
        await quotas.check("alice", 101)
    for unlimited in ("bob", "carol", ""):
        await quotas.check(unlimited, 10**12)


async def test_what_is_kept_is_known_by_the_digest_of_a_salt() -> None:
    quotas = _quotas()
    assert await quotas.kept([ALICE, "of chunks alone"]) == {ALICE: 900, "of chunks alone": 0}
    assert await quotas.kept([]) == {}
