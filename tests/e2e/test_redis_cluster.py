"""Everything on a real Redis Cluster: a master that dies and a slot that moves under load cost no acknowledged byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest
from redis.exceptions import RedisError

from quire.client import AsyncClient, ImageClient
from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.images import Rendering
from quire.model.keys import ChunkKeys
from quire.model.policy import TenantPolicy
from quire_server.redis import AccessKeys, StoredPolicies, connect
from quire_server.redis.leader import RedisLeaderLease
from quire_server.redis.prefix_index.slots import TAGS
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import encode, pictures
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store
from tests.redis_cluster import MASTERS, RedisClusterServers, redis_cluster_servers

_CHUNKS = 40


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisClusterServers]:
    with redis_cluster_servers(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(servers: RedisClusterServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"),
        storage_nodes=2,
        decoders=1,
        arena_bytes=192 << 20,
        redis_url=servers.url,
    ) as running:
        yield running


@dataclass(slots=True)
class _Load:
    """Prefixes that are stored and fetched all the while. `stored`: what was acknowledged, with its bytes."""

    client: AsyncClient
    stored: dict[bytes, tuple[Namespace, ChunkKeys, np.ndarray[Any, Any]]] = field(default_factory=dict)
    fetched: int = 0
    failed: list[QuireError] = field(default_factory=list)
    over: bool = False

    async def run(self) -> None:
        while not self.over:
            try:
                await self._one()
            except QuireError as error:
                self.failed.append(error)
                await asyncio.sleep(0.05)

    async def _one(self) -> None:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, _CHUNKS), random_payload(namespace, _CHUNKS)
        await store(self.client, namespace, keys, payload)
        self.stored[keys.packed] = namespace, keys, payload
        assert await self.check(keys.packed) in (0, _CHUNKS)

    async def check(self, name: bytes) -> int:
        """How many chunks of an acknowledged prefix are found; their bytes are right."""
        namespace, keys, payload = self.stored[name]
        found = await self.client.lookup(namespace, keys)
        if found.matched_chunks:
            got, summary = await fetch_all(self.client, found)
            usable = summary.usable_chunks
            assert np.array_equal(got[:, :usable], payload[:, :usable])
            self.fetched += 1
        await self.client.release(found)
        return found.matched_chunks

    async def all_are_found(self) -> None:
        """What Redis forgot is registered again by the nodes that have it."""
        async with asyncio.timeout(60):
            for name in self.stored:
                while True:
                    with contextlib.suppress(QuireError):
                        if await self.check(name) == _CHUNKS:
                            break
                    await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def _loaded(cluster: LocalCluster) -> AsyncIterator[_Load]:
    async with AsyncClient(cluster.gateway_address, timeout_s=10) as client:
        load = _Load(client)
        tasks = [asyncio.create_task(load.run()) for _ in range(3)]
        try:
            yield load
        finally:
            load.over = True
            async with asyncio.timeout(30):
                await asyncio.gather(*tasks)
        await load.all_are_found()


async def _more(load: _Load, count: int) -> None:
    """Until so many more prefixes were stored."""
    wanted = len(load.stored) + count
    async with asyncio.timeout(40):
        while len(load.stored) < wanted:
            await asyncio.sleep(0.05)


async def test_all_that_uses_redis(cluster: LocalCluster, servers: RedisClusterServers) -> None:
    """Images by gRPC and HTTP, policies, keys, leases of leaders: each on the Cluster."""
    async with AsyncClient(cluster.gateway_address) as client:
        ((latent, info),) = encode(pictures(1, 64))
        images = ImageClient(client)
        await images.put("cat", latent, info)
        assert (await images.get("cat", Rendering("jpeg", width=32))).data[:2] == b"\xff\xd8"
        assert {node.role.name for node in await client.status()} >= {"STORAGE", "DECODER", "GATEWAY", "SCHEDULER"}
    async with aiohttp.ClientSession(f"http://{cluster.http_address}") as http:
        async with http.get("/v1/images/cat") as answer:
            assert answer.status == 200
        async with http.get("/v1/images") as answer:
            assert [each["id"] for each in (await answer.json())["images"]] == ["cat"]
        async with http.delete("/v1/images/cat") as answer:
            assert answer.status == 204
    redis = connect(servers.url)
    policies, keys = StoredPolicies(redis), AccessKeys(redis, cluster.secret.encode())
    await policies.set_tenant(TenantPolicy("t", weight=2.0))
    assert (await policies.tenants())["t"].weight == 2.0
    key = await keys.create("t")
    assert await keys.get(key.name) == key and await keys.delete(key.name)
    lease = RedisLeaderLease(redis, "test")
    assert (await lease.hold("a", 60_000))[0] == "a" == (await lease.hold("b", 60_000))[0]
    await lease.release("a")
    await redis.aclose()


@pytest.mark.slow
async def test_a_master_dies_under_load(cluster: LocalCluster, servers: RedisClusterServers) -> None:
    """With -9; its replica takes its slots. Requests of these seconds may fail, none gets a wrong byte."""
    async with _loaded(cluster) as load:
        await _more(load, 10)
        dead = servers.master_of(0)
        servers.kill(dead)
        await _more(load, 10)
        servers.start(dead)
        await _more(load, 5)
    assert load.fetched > 20


@pytest.mark.slow
async def test_slots_move_under_load(cluster: LocalCluster, servers: RedisClusterServers) -> None:
    """A tenth of the index's slots, key by key, to another master."""
    slots = sorted({_slot(servers, b"{%s}" % tag) for tag in TAGS[::10]})
    async with _loaded(cluster) as load:
        await _more(load, 10)
        for slot in slots:
            await asyncio.to_thread(_move, servers, slot)
        await _more(load, 10)
    assert load.fetched > 15


def _slot(servers: RedisClusterServers, key: bytes) -> int:
    return int(servers.client(servers.ports[1]).execute_command("CLUSTER", "KEYSLOT", key))


def _move(servers: RedisClusterServers, slot: int) -> None:
    """To the next master, as redis-cli does it."""
    source = servers.master_of(slot)
    masters = sorted({servers.master_of(each) for each in range(0, 16384, 16384 // (4 * MASTERS))})
    target = masters[(masters.index(source) + 1) % len(masters)]
    there, here = servers.client(target), servers.client(source)
    names = {port: servers.client(port).execute_command("CLUSTER", "MYID") for port in (source, target)}
    there.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
    here.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
    while keys := here.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10, NEVER_DECODE=True):
        here.execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *keys)
    for port in (target, source, *masters):
        with contextlib.suppress(RedisError):
            servers.client(port).execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target])
