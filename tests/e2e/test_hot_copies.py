"""A prefix that is read much is copied to more nodes by itself, and is not any more when that is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store

_LINK = 4_000_000


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[LocalCluster]:
    """Three nodes, each with a link of 4 MB/s."""
    settings = {
        "QUIRE_SCHEDULER_LINKS": ",".join(f"storage-{number}={_LINK}" for number in range(3)),
        "QUIRE_STORAGE_LINK_BYTES_PER_S": str(_LINK),
        "QUIRE_STORAGE_HOT_IDLE_S": "1",
        "QUIRE_STORAGE_DRIVES": "",
        "QUIRE_STORAGE_OBJECT_URL": "",
    }
    with LocalCluster(tmp_path, storage_nodes=3, arena_bytes=64 << 20, own_links=True, settings=settings) as cluster:
        yield cluster


async def test_copies_come_and_go(narrow: LocalCluster) -> None:
    async with AsyncClient(narrow.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 8), random_payload(namespace, 8)
        await store(client, namespace, keys, payload, durability=Durability.MEMORY)

        async def copies() -> float:
            return sum(node.stats.get("hot copies", 0) for node in await client.status())

        async def holders() -> set[str]:
            looks = [await client.lookup(namespace, keys, lease_ttl_ms=0) for _ in range(8)]
            assert all(found.matched_chunks == 8 for found in looks)
            return {each.node_id for found in looks for each in found.ranges}

        served: set[str] = set()
        async with asyncio.timeout(60):
            while len(served) < 2 or not await copies():  # nodes say so with their next heartbeat
                found = await client.lookup(namespace, keys)
                got, summary = await fetch_all(client, found)
                await client.release(found)
                assert summary.usable_chunks == 8 and np.array_equal(got, payload)
                served |= {each.node_id for each in found.ranges}
            while await copies() or len(await holders()) > 1:
                await asyncio.sleep(0.2)
