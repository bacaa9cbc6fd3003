"""What a tenant may store, over S3, images and the namespaces of its chunks."""

from __future__ import annotations

import numpy as np
import pytest

from quire.model.errors import QuotaExceeded
from quire.model.hashing import tenant_name
from quire.model.index import ChunkRecord
from quire.model.policy import TenantPolicy
from quire_server.quotas import Quotas
from quire_server.redis.access import salt_of
from quire_storage.core.chunks import Chunk
from quire_storage.core.namespaces import Group, NamespaceBook

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
        cluster_secret=SECRET,
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


def _chunk(number: int, namespace: bytes) -> Chunk:
    record = ChunkRecord(bytes([number]) * 32, b"", b"", b"")
    return Chunk(record, 1, 4096, np.zeros(1, np.uint32), namespace, number)


def test_namespaces_of_a_tenant_are_bounded_together() -> None:
    """The coldest go, whichever of them they are in; the group may grow without being walked again."""
    one, two, book, walked = b"1" * 16, b"2" * 16, NamespaceBook(), list[bytes]()
    there = {one: [(bytes([1]) * 32, 4096, 1)], two: [(bytes([9]) * 32, 4096, 9)]}

    def found(namespace: bytes) -> list[tuple[bytes, int, int]]:
        walked.append(namespace)
        return there.get(namespace, [])

    alone, both = Group([one]), Group([one, two])
    assert book.follow([alone], found, list) == [one]
    assert book.follow([both], found, list) == [two]
    assert walked == [one, two]
    assert book.follow([both], found, list) == []
    book.entered([_chunk(2, one)])
    book.entered([_chunk(3, two)])
    book.used(_chunk(1, one))
    assert book.excess(both, 4 * 4096) == []
    assert book.excess(both, 2 * 4096) == [bytes([9]) * 32, bytes([2]) * 32]
    book.left(_chunk(9, two))
    assert book.excess(both, 2 * 4096) == [bytes([2]) * 32]
    book.follow([alone, both], found, list)
    assert book.excess(alone, 0) == [bytes([1]) * 32]
