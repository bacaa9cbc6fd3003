"""Two chunks whose fingerprints are the same: the index takes one for the other, and storage nodes do not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from quire.client import AsyncClient
from quire.model.errors import ChunkMissing
from quire.model.fingerprints import _FACTORS, fingerprint
from quire.model.keys import ChunkKeys
from quire.model.records import records
from quire_server.redis import PrefixIndex, connect
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store


def _same_print(key: bytes) -> bytes:
    """Another key with the fingerprint of this one."""
    first, second = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    more = -_FACTORS[0] * pow(_FACTORS[1], -1, 1 << 64)
    words = (first + 1) % (1 << 64), (second + more) % (1 << 64)
    return b"".join(each.to_bytes(8, "little") for each in words) + key[16:]


@pytest.fixture
def twins() -> tuple[ChunkKeys, ChunkKeys]:
    """Two chains of three chunks that differ in the last one."""
    keys = some_keys(fresh_namespace(), 3)
    return keys, ChunkKeys(keys.packed[:64] + _same_print(keys.at(2)))


async def test_it_costs_a_miss_and_nothing_else(cluster: LocalCluster, twins: tuple[ChunkKeys, ChunkKeys]) -> None:
    """No byte of the one is delivered for the other, and the one that was stored is found again."""
    one, other = twins
    assert fingerprint(one.at(2)) == fingerprint(other.at(2)) and one != other
    namespace = fresh_namespace()
    payload = random_payload(namespace, 3)
    async with AsyncClient(cluster.gateway_address) as client:
        await store(client, namespace, one, payload)
        found = await client.lookup(namespace, other)
        assert found.matched_chunks == 3, "the index knows no better"
        with pytest.raises(ChunkMissing):
            await fetch_all(client, found)
        await client.release(found)
        async with asyncio.timeout(30):
            while True:
                found = await client.lookup(namespace, one)
                got, summary = await fetch_all(client, found)
                await client.release(found)
                assert np.array_equal(got[:, : summary.usable_chunks], payload[:, : summary.usable_chunks])
                if summary.usable_chunks == 3:
                    break
                await asyncio.sleep(0.2)


async def test_one_behind_another_parent_is_refused(cluster: LocalCluster, twins: tuple[ChunkKeys, ChunkKeys]) -> None:
    """The index would not be closed otherwise."""
    one, _ = twins
    strange = ChunkKeys(one.packed[:32] + _same_print(one.at(2)))
    redis = connect(cluster.redis_url)
    index = PrefixIndex(redis)
    assert all(await index.register("elsewhere", records(one, 0, 3), 0))
    assert await index.register("elsewhere", records(strange, 1, 1), 0) == [0]
    await index.unregister("elsewhere", records(one, 0, 3)[::-1], 0)
    await redis.aclose()
