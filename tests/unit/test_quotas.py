"""What a tenant may keep of S3 objects and images."""

from __future__ import annotations

import asyncio

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


class _Late(_Stored):
    """Sums come when they are released."""

    def __init__(self, **by_tenant: int) -> None:
        super().__init__(**by_tenant)
        self.sums, self.asked = asyncio.Semaphore(0), asyncio.Event()
        self._sums_read = 0

    async def stored_bytes(self, tenant: str) -> int:
        size = await super().stored_bytes(tenant)
        self._sums_read += 1
        if self._sums_read > 1:
            self.asked.set()
        await self.sums.acquire()
        return size


def _quotas(objects: _Stored | None = None) -> Quotas:
    policies = {ALICE: TenantPolicy(ALICE, stored_bytes_max=1000)}
    return Quotas(
        policy=lambda name: policies.get(name) or TenantPolicy(name),
        objects=objects or _Stored(alice=600, bob=10**9),
        images=_Stored(alice=300, carol=5),
        secrets=[SECRET],
    )


async def test_objects_and_images_count_together() -> None:
    quotas = _quotas()
    async with quotas.reserve("alice", 100):
        pass
    with pytest.raises(QuotaExceeded, match="900 bytes are stored and 0 are being written, 1000 may be"):
        async with quotas.reserve("alice", 101):
            pass
    for unlimited in ("bob", "carol", ""):
        async with quotas.reserve(unlimited, 10**12):
            pass


async def test_what_is_being_written_counts() -> None:
    """Requests at one moment share the room that is left; one that fails gives its part back."""
    quotas = _quotas()
    async with quotas.reserve("alice", 60):
        with pytest.raises(QuotaExceeded, match="900 bytes are stored and 60 are being written"):
            async with quotas.reserve("alice", 41):
                pass
        async with quotas.reserve("alice", 40):
            pass
    with pytest.raises(ValueError, match="lost"):
        async with quotas.reserve("alice", 100):
            raise ValueError("lost")
    async with quotas.reserve("alice", 100):
        pass


async def test_a_write_that_ends_while_the_sum_is_read_counts() -> None:
    """The sum may lack its bytes."""
    stored = _Late(alice=600)
    quotas = _quotas(stored)
    first = quotas.reserve("alice", 100)
    stored.sums.release()
    await first.__aenter__()
    second = asyncio.create_task(quotas.reserve("alice", 50).__aenter__())
    await stored.asked.wait()
    await first.__aexit__(None, None, None)
    stored.sums.release()
    with pytest.raises(QuotaExceeded, match="100 are being written"):
        await second


async def test_what_is_kept_is_known_by_the_digest_of_a_salt() -> None:
    quotas = _quotas()
    assert await quotas.kept([ALICE, "of chunks alone"]) == {ALICE: 900, "of chunks alone": 0}
    assert await quotas.kept([]) == {}
