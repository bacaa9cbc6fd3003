"""What a tenant may keep of S3 objects and images."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from quire.model.errors import QuotaExceeded
from quire.model.hashing import tenant_name
from quire.model.policy import TenantPolicy
from quire_server.limits import quotas as quotas_module
from quire_server.limits.quotas import Quotas
from quire_server.redis.keys.access import salt_of
from quire_server.redis.reservations import Reservation

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


class _Reserved:
    """The reservations of all processes."""

    def __init__(self) -> None:
        self.number, self.renewed, self.sizes = 0, 0, dict[int, int]()
        self.at_add: asyncio.Event | None = None

    async def add(self, tenant: str, reserved_bytes: int) -> Reservation:
        if self.at_add is not None:
            await self.at_add.wait()
        self.number += 1
        earlier = sum(self.sizes.values())
        self.sizes[self.number] = reserved_bytes
        return Reservation(tenant, "", reserved_bytes, self.number, earlier)

    async def earlier_bytes(self, reservation: Reservation) -> int:
        return sum(size for number, size in self.sizes.items() if number < reservation.number)

    async def renew(self, reservation: Reservation) -> None:
        self.renewed += 1

    async def end(self, reservation: Reservation) -> None:
        del self.sizes[reservation.number]


class _Growing(_Stored):
    """Another process' write of 100 bytes ends between the first reading of the reservations and that of the sums."""

    def __init__(self, reserved: _Reserved, stored_bytes: int, written_bytes: int) -> None:
        super().__init__(alice=stored_bytes)
        self._reserved, self._written_bytes = reserved, written_bytes

    async def stored_bytes(self, tenant: str) -> int:
        if self._reserved.sizes.pop(1, 0):
            self._by_tenant["alice"] += self._written_bytes
        return await super().stored_bytes(tenant)


def _quotas(objects: _Stored | None = None, reserved: _Reserved | None = None) -> Quotas:
    policies = {ALICE: TenantPolicy(ALICE, stored_bytes_max=1000)}
    return Quotas(
        policy=lambda name: policies.get(name) or TenantPolicy(name),
        objects=objects or _Stored(alice=600, bob=10**9),
        images=_Stored(alice=300, carol=5),
        reservations=reserved or _Reserved(),
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


async def test_what_another_gateway_is_writing_counts() -> None:
    reserved = _Reserved()
    async with _quotas(reserved=reserved).reserve("alice", 60):
        with pytest.raises(QuotaExceeded, match="900 bytes are stored and 60 are being written"):
            async with _quotas(reserved=reserved).reserve("alice", 41):
                pass
    assert reserved.sizes == {}


@pytest.mark.parametrize("more_bytes", [50, 51])
async def test_a_write_that_ends_while_the_sums_are_read_counts_once(more_bytes: int) -> None:
    reserved = _Reserved()
    await reserved.add("alice", 100)
    quotas = _quotas(_Growing(reserved, 550, 100), reserved)
    with pytest.raises(QuotaExceeded, match=r"950 .* 0 are") if more_bytes > 50 else contextlib.nullcontext():
        async with quotas.reserve("alice", more_bytes):
            pass


async def test_the_first_of_two_has_the_room() -> None:
    """Neither is refused because of the other that came later."""
    reserved = _Reserved()
    quotas, others = _quotas(reserved=reserved), _quotas(reserved=reserved)
    async with quotas.reserve("alice", 100):
        with pytest.raises(QuotaExceeded):
            await others.reserve("alice", 100).__aenter__()


async def test_a_request_that_ends_while_it_reserves_leaves_nothing() -> None:
    reserved = _Reserved()
    reserved.at_add = asyncio.Event()
    entering = asyncio.ensure_future(_quotas(reserved=reserved).reserve("alice", 100).__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    await asyncio.sleep(0)
    reserved.at_add.set()
    with pytest.raises(asyncio.CancelledError):
        await entering
    async with asyncio.timeout(10):
        while reserved.number != 1 or reserved.sizes:
            await asyncio.sleep(0)


async def test_a_long_write_renews_its_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_module, "RESERVATION_MS", 1)
    reserved = _Reserved()
    async with _quotas(reserved=reserved).reserve("alice", 100), asyncio.timeout(10):
        while reserved.renewed < 3:
            await asyncio.sleep(0.001)
    assert reserved.sizes == {}


async def test_what_is_kept_is_known_by_the_digest_of_a_salt() -> None:
    quotas = _quotas()
    assert await quotas.kept([ALICE, "of chunks alone"]) == {ALICE: 900, "of chunks alone": 0}
    assert await quotas.kept([]) == {}
