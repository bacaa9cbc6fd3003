"""Identity of data: a tenant that knows another tenant's records gains nothing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.errors import Unauthenticated
from quire.model.hashing import Namespace
from quire.model.images import record_keys, record_namespace
from quire.model.latents import LatentInfo, Normalisation, Vae, encode_record
from quire_server.redis import AccessKeys, connect
from quire_tools.local import LocalCluster
from tests.e2e.helpers import store
from tests.e2e.tenants import TOKENS, Tenant, two_tenants


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("identity")
    with LocalCluster(folder, settings=TOKENS, arena_bytes=96 << 20) as running:
        yield running


@pytest_asyncio.fixture
async def tenants(cluster: LocalCluster) -> AsyncIterator[tuple[Tenant, Tenant]]:
    """Alice and Mallory. Both may name memory."""
    async with two_tenants(cluster) as pair:
        yield pair


def _record_namespace(tenant: Tenant, record: bytes) -> Namespace:
    """Return a namespace of this tenant whose chunks are as long as such a record's."""
    return replace(record_namespace(len(record)), tenant_salt=tenant.namespace.tenant_salt)


def _record(seed: int) -> bytes:
    values = np.random.default_rng(seed).normal(size=(4, 64, 64)).astype(np.float16)
    info = LatentInfo(values.shape, "float16", Vae("v"), 512, 512, Normalisation())
    return encode_record(values, info)


async def test_a_record_is_nobody_elses_by_its_content(tenants: tuple[Tenant, Tenant]) -> None:
    """A tenant with an equal record does not see whether another one has stored it, and cannot keep or evict it."""
    alice, mallory = tenants
    record = _record(1)
    await alice.images.put_record("cat", record, allow_unknown_vae=True, durability=Durability.OBJECT)
    his, keys = _record_namespace(mallory, record), record_keys(hashlib.sha256(record).digest())
    lookup = await mallory.client.lookup(his, keys)
    assert lookup.matched_chunks == 0
    assert await mallory.client.retain(his, keys, 60.0) == 0
    assert await mallory.client.evict(his, keys) == 0
    assert await alice.images.get_record("cat") == record
    await mallory.images.put_record("cat", record, allow_unknown_vae=True)
    assert await mallory.images.delete("cat"), "its own, which goes alone"
    assert await alice.images.get_record("cat") == record


async def test_a_record_cannot_be_stored_before_its_owner_has_it(tenants: tuple[Tenant, Tenant]) -> None:
    alice, mallory = tenants
    record = _record(2)
    keys, his = record_keys(hashlib.sha256(record).digest()), _record_namespace(mallory, record)
    payload = np.full((1, 1, his.layout.slice_bytes), ord("!"), dtype=np.uint8)
    await store(mallory.client, his, keys, payload)
    await alice.images.put_record("dog", record, allow_unknown_vae=True)
    assert await alice.images.get_record("dog") == record


async def test_a_deleted_key_ends_an_open_session(cluster: LocalCluster) -> None:
    """Within two seconds, of which a busy machine may make more."""
    redis = connect(cluster.redis_url)
    keys = AccessKeys(redis, cluster.secret.encode())
    key = await keys.create("bob")
    async with AsyncClient(cluster.gateway_address, token=f"{key.name}:{keys.secret(key)}") as client:
        await client.status()
        assert await keys.delete(key.name)
        with pytest.raises(Unauthenticated):
            async with asyncio.timeout(20):  # until a renewal it would be 30
                while True:
                    await client.status()
                    await asyncio.sleep(0.1)
    await redis.aclose()


async def test_clients_are_not_told_what_the_store_calls_a_record(tenants: tuple[Tenant, Tenant]) -> None:
    alice, _ = tenants
    record = _record(3)
    entries = [await alice.images.put_record("owl", record, allow_unknown_vae=True), await alice.images.head("owl")]
    entries += [each async for each in alice.images.list("owl")]
    assert [each.record_name for each in entries] == [hashlib.sha256(record).digest()] * 3
