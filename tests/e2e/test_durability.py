"""What an acknowledgement means, on real processes that are killed: local, replicated, object; and what comes back."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from redis import Redis

from quire.client import AdminClient, AsyncClient
from quire.model.chunk_object import objects_folder
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability, OnExisting
from quire.model.errors import ContentConflict, NodeUnavailable, QuireError, QuotaExceeded
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_tools.local import LocalCluster
from tests.e2e.helpers import SMALL_STORAGE, fetch_all, fresh_namespace, holders_of, random_payload, some_keys, store
from tests.polling import eventually

MIB = 1 << 20
BIG = KvLayout(8, 16, 4, 128, Dtype.BF16)  # 256 KiB a chunk


def small_cluster(folder: Path, nodes: int = 1, /, **more: str) -> LocalCluster:
    return LocalCluster(
        folder, storage_nodes=nodes, arena_bytes=32 * MIB, drive_bytes=160 * MIB, settings=SMALL_STORAGE | more
    )


@pytest.fixture
def three(tmp_path: Path) -> Iterator[LocalCluster]:
    with small_cluster(tmp_path, 3, QUIRE_STORAGE_OBJECT_URL="") as cluster:
        yield cluster


async def _fetched(client: AsyncClient, namespace: Namespace, keys: ChunkKeys) -> npt.NDArray[np.uint8]:
    found = await client.lookup(namespace, keys)
    assert found.matched_chunks == len(keys)
    payload, summary = await fetch_all(client, found)
    await client.release(found)
    assert summary.usable_chunks == len(keys)
    return payload


@pytest.mark.slow
async def test_far_more_than_memory_survives_kill_minus_nine(tmp_path: Path) -> None:
    """Four times the arena, acknowledged local, from two drives: every byte is there after the process is killed."""
    drives = {"QUIRE_STORAGE_DRIVES": f"{tmp_path}/d0,{tmp_path}/d1"}
    with small_cluster(tmp_path, **drives) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            namespace = fresh_namespace(BIG)
            keys, payload = some_keys(namespace, 512), random_payload(namespace, 512)
            for first in range(0, 512, 64):
                part = np.ascontiguousarray(payload[:, first : first + 64])
                await store(client, namespace, keys.run(0, first + 64), part, first=first)
            assert np.array_equal(await _fetched(client, namespace, keys), payload)
            cluster.kill("storage-0")
            await asyncio.to_thread(cluster.restart, "storage-0")
            assert np.array_equal(await _fetched(client, namespace, keys), payload)

            async def told() -> bool:
                node = next(node for node in await client.status() if node.node_id == "storage-0")
                assert "io_uring" in node.notes["io"] or "threads" in node.notes["io"]
                return node.stats["chunks"] == 512 and node.stats["hits disk"] > 0

            await eventually(told)


async def test_replicated_survives_the_loss_of_a_node(three: LocalCluster) -> None:
    """Killed with its data: look-ups find the other copy, and soon there are two again."""
    async with AsyncClient(three.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 60), random_payload(namespace, 60)
        await store(client, namespace, keys, payload, durability=Durability.REPLICATED)
        holders = await holders_of(three, keys)
        assert all(len(names) == 2 for names in holders), holders
        found = await client.lookup(namespace, keys)
        victim = found.ranges[0].node_id
        await client.release(found)
        three.kill(victim)

        async def elsewhere() -> bool:
            """Replicas are read in turns: that one look-up names another is no sign that the loss is known."""
            looks = [await client.lookup(namespace, keys, lease_ttl_ms=0) for _ in range(6)]
            named = {each.node_id for found in looks for each in found.ranges}
            return all(found.matched_chunks == 60 for found in looks) and victim not in named

        await eventually(elsewhere)
        assert np.array_equal(await _fetched(client, namespace, keys), payload)

        async def two_again() -> bool:
            return all(len(names - {victim}) == 2 for names in await holders_of(three, keys))

        await eventually(two_again)
        # The node comes back and tells what it holds: one of the three copies goes, and which depends on the chunk.
        await asyncio.to_thread(three.restart, victim)

        async def two_and_some_of_them_there() -> bool:
            holders = await holders_of(three, keys)
            return all(len(names) == 2 for names in holders) and any(victim in names for names in holders)

        await eventually(two_and_some_of_them_there)
        assert np.array_equal(await _fetched(client, namespace, keys), payload)


async def test_a_level_asked_for_later_is_reached_without_the_bytes(three: LocalCluster) -> None:
    """Stored in memory, then stored again as replicated: nothing is sent a second time, and two nodes have it."""
    async with AsyncClient(three.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 20), random_payload(namespace, 20)
        await store(client, namespace, keys, payload, durability=Durability.MEMORY)
        again = await store(client, namespace, keys, payload, durability=Durability.REPLICATED)
        assert (again.stored_chunks, again.known_chunks, again.bytes_moved) == (0, 20, 0)
        holders = await holders_of(three, keys)
        assert all(len(names) == 2 for names in holders), holders


async def test_a_rotten_byte_is_healed_from_the_other_node(tmp_path: Path) -> None:
    """A byte of the pool file flipped under the node: the reader gets the right one, by RDMA from the replica."""
    with small_cluster(tmp_path, 2, QUIRE_STORAGE_OBJECT_URL="") as two:
        await _rotten_byte_is_healed(two)


async def _rotten_byte_is_healed(two: LocalCluster) -> None:
    async with AsyncClient(two.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 20), random_payload(namespace, 20)
        await store(client, namespace, keys, payload, durability=Durability.REPLICATED)
        node = (await client.lookup(namespace, keys, lease_ttl_ms=0)).ranges[0].node_id
        two.kill(node)
        pool = two.folder / node / "pool.quire"
        at = pool.read_bytes().index(payload[2, 7].tobytes())
        with pool.open("r+b") as file:
            file.seek(at + 77)
            file.write(bytes([payload[2, 7, 77] ^ 1]))
        await asyncio.to_thread(two.restart, node)

        async def serves() -> bool:
            now = await client.lookup(namespace, keys, lease_ttl_ms=0)
            return now.matched_chunks == 20 and {each.node_id for each in now.ranges} == {node}

        await eventually(serves)
        assert np.array_equal(await _fetched(client, namespace, keys), payload)

        async def healed() -> bool:
            return any(each.stats.get("healed") for each in await client.status() if each.node_id == node)

        await eventually(healed)
        assert pool.read_bytes()[at + 77] == payload[2, 7, 77]


async def test_object_survives_the_loss_of_node_and_drive(tmp_path: Path) -> None:
    """Acknowledged as object: the node is killed and its drive wiped; the chunks come from the object tier."""
    with small_cluster(tmp_path) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            await _object_survives(cluster, client, tmp_path)


async def _object_survives(cluster: LocalCluster, client: AsyncClient, folder: Path) -> None:
    """Twice as much as memory holds."""
    namespace = fresh_namespace(BIG)
    keys, payload = some_keys(namespace, 256), random_payload(namespace, 256)
    for first in range(0, 256, 64):
        part = np.ascontiguousarray(payload[:, first : first + 64])
        await store(client, namespace, keys.run(0, first + 64), part, first=first, durability=Durability.OBJECT)
    cluster.kill("storage-0")
    shutil.rmtree(folder / "storage-0")
    await asyncio.to_thread(cluster.restart, "storage-0")
    assert np.array_equal(await _fetched(client, namespace, keys), payload)
    # Brought back, they are on the drive again before long, and stay when asked for a second time.
    assert np.array_equal(await _fetched(client, namespace, keys), payload)
    assert await client.evict(namespace, keys) == 256
    assert (await client.lookup(namespace, keys)).matched_chunks == 0


async def test_a_chunk_that_the_object_tier_lost_costs_itself_alone(tmp_path: Path) -> None:
    """A cold prefix has one truncated object and one rotten layer: the outcome reports the rest as delivered."""
    with small_cluster(tmp_path) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            namespace = fresh_namespace(BIG)
            keys, payload = some_keys(namespace, 32), random_payload(namespace, 32)
            await store(client, namespace, keys, payload, durability=Durability.OBJECT)
            cluster.kill("storage-0")
            shutil.rmtree(tmp_path / "storage-0")
            (truncated,), (rotten,) = (
                list((tmp_path / "objects").glob(f"{objects_folder(keys.at(at))}/*")) for at in (9, 20)
            )
            truncated.write_bytes(truncated.read_bytes()[:-9000])
            raw = bytearray(rotten.read_bytes())
            raw[2 * namespace.layout.slice_bytes + 5] ^= 1
            rotten.write_bytes(raw)
            await asyncio.to_thread(cluster.restart, "storage-0")
            lookup = await client.lookup(namespace, keys)
            assert lookup.matched_chunks == 32
            buffer = client.allocate(payload.nbytes)
            delivery = await client.fetch(lookup, buffer, order=DeliveryOrder.LAYERWISE)
            summary = await delivery.summary()
            await delivery.quiesced(10)
            assert [at for at, mark in enumerate(summary.delivered) if not mark] == [9, 20]
            assert summary.usable_chunks == 9 and summary.outcomes[0].error_code in ("ChunkMissing", "CorruptData")
            got = buffer.layers(namespace.layout.num_layers, 32, namespace.layout.slice_bytes)
            sound = [at for at in range(32) if at not in (9, 20)]
            assert np.array_equal(got[:, sound], payload[:, sound])
            assert not got[:, 9].any(), "nor any other bytes"


async def test_what_the_object_tier_alone_has_is_prefetched_and_compared_with(tmp_path: Path) -> None:
    """A prefetched prefix is delivered from memory; a store with VERIFY of other bytes is a conflict."""
    with small_cluster(tmp_path) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            namespace = fresh_namespace(BIG)
            keys, payload = some_keys(namespace, 32), random_payload(namespace, 32)
            await store(client, namespace, keys, payload, durability=Durability.OBJECT)
            lease = await client.lookup(namespace, keys)
            assert await client.demote(namespace, keys) == 31, "the lease pins the last one"
            await client.release(lease)
            assert await client.demote(namespace, keys) == 32
            other = payload.copy()
            other[1, 30, 7] ^= 1
            with pytest.raises(ContentConflict):
                await store(client, namespace, keys, other, on_existing=OnExisting.VERIFY)
            assert (await client.lookup(namespace, keys, lease_ttl_ms=0)).objects.chunks(0, 32) == 32
            assert await client.prefetch(namespace, keys, within_s=5.0) == 32
            assert not (await client.lookup(namespace, keys, lease_ttl_ms=0)).objects, "the node is listed"
            shutil.rmtree(tmp_path / "objects")
            assert np.array_equal(await _fetched(client, namespace, keys), payload)
            await store(client, namespace, keys, payload, on_existing=OnExisting.VERIFY)


@pytest.mark.skipif("QUIRE_TEST_S3_URL" not in os.environ, reason="QUIRE_TEST_S3_URL names no bucket (make test-s3)")
async def test_object_survives_on_a_real_s3_server(tmp_path: Path) -> None:
    """As above, the object tier being the S3 server that QUIRE_TEST_S3_URL and AWS_* name."""
    with small_cluster(tmp_path, QUIRE_STORAGE_OBJECT_URL=os.environ["QUIRE_TEST_S3_URL"]) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            await _object_survives(cluster, client, tmp_path)


async def test_an_object_tier_that_is_away_costs_only_the_stores_that_need_it(tmp_path: Path) -> None:
    """Nothing listens at the endpoint: local stores and reads go on, `object` says why not."""
    settings = {
        "QUIRE_STORAGE_OBJECT_URL": "s3://nowhere/x",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
        "QUIRE_STORAGE_OBJECT_TIMEOUT_S": "2",
    }
    with small_cluster(tmp_path, **settings) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            namespace = fresh_namespace()
            keys, payload = some_keys(namespace, 20), random_payload(namespace, 20)
            await store(client, namespace, keys, payload, durability=Durability.LOCAL)
            assert np.array_equal(await _fetched(client, namespace, keys), payload)
            with pytest.raises(QuireError, match="object tier"):
                other = fresh_namespace()
                await store(client, other, some_keys(other, 20), payload, durability=Durability.OBJECT)
            assert np.array_equal(await _fetched(client, namespace, keys), payload)


async def test_an_index_that_was_lost_is_filled_again(three: LocalCluster) -> None:
    """Redis loses everything while the nodes run: they hear of its new name and register what they hold."""
    async with AsyncClient(three.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 300), random_payload(namespace, 300)
        await store(client, namespace, keys, payload)
        Redis.from_url(three.redis_url).flushall()

        async def found() -> bool:
            try:
                return (await client.lookup(namespace, keys, lease_ttl_ms=0)).matched_chunks == 300
            except QuireError:
                return False

        await eventually(found)
        assert np.array_equal(await _fetched(client, namespace, keys), payload)


async def test_what_was_evicted_while_a_node_was_away_does_not_come_back_with_it(tmp_path: Path) -> None:
    with small_cluster(tmp_path, QUIRE_STORAGE_OBJECT_URL="") as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            gone, kept = fresh_namespace(), fresh_namespace()
            keys, payload = some_keys(gone, 20), random_payload(gone, 20)
            await store(client, gone, keys, payload)
            await store(client, kept, some_keys(kept, 20), payload)
            cluster.kill("storage-0")
            assert await client.evict(gone, keys) == 20
            await asyncio.to_thread(cluster.restart, "storage-0")
            assert np.array_equal(await _fetched(client, kept, some_keys(kept, 20)), payload)

            async def only_the_others() -> bool:
                stats = [node.stats for node in await client.status() if node.node_id == "storage-0"]
                return bool(stats) and stats[0]["chunks"] == 20

            await eventually(only_the_others)
            assert (await client.lookup(gone, keys)).matched_chunks == 0


@pytest.mark.skipif("QUIRE_SOAK_ROUNDS" not in os.environ, reason="a part of make soak; tests/simulation crashes nodes")
async def test_kill_minus_nine_again_and_again_under_load(tmp_path: Path) -> None:
    """Stores run while the node is killed at random: whatever was acknowledged local is there in the end, whole."""
    rounds = int(os.environ["QUIRE_SOAK_ROUNDS"])
    acknowledged: dict[Namespace, int] = {}
    chance = random.Random(5)
    with small_cluster(tmp_path, QUIRE_STORAGE_INDEX_TIMEOUT_S="2") as cluster:

        async def load(client: AsyncClient, number: int, stop: asyncio.Event) -> None:
            while not stop.is_set():
                namespace = fresh_namespace()
                try:
                    summary = await store(
                        client, namespace, some_keys(namespace, 24), random_payload(namespace, 24, number)
                    )
                except QuireError:
                    await asyncio.sleep(0.05)
                    continue
                if summary.stored_chunks == 24:
                    acknowledged[namespace] = number

        for _ in range(rounds):
            async with AsyncClient(cluster.gateway_address, timeout_s=10) as client:
                stop = asyncio.Event()
                writers = [asyncio.create_task(load(client, number, stop)) for number in range(3)]
                await asyncio.sleep(chance.uniform(0.3, 1.2))
                cluster.kill("storage-0")
                stop.set()
                await asyncio.gather(*writers)
            await asyncio.to_thread(cluster.restart, "storage-0")
        assert len(acknowledged) >= rounds
        async with AsyncClient(cluster.gateway_address) as client:
            for namespace, number in acknowledged.items():
                expected = random_payload(namespace, 24, number)

                async def whole(namespace: Namespace = namespace, expected: Any = expected) -> bool:
                    keys = some_keys(namespace, 24)
                    if (await client.lookup(namespace, keys, lease_ttl_ms=0)).matched_chunks < 24:
                        return False
                    try:
                        got = await _fetched(client, namespace, keys)
                    except NodeUnavailable:  # as it was before the restart
                        return False
                    assert np.array_equal(got, expected)
                    return True

                await eventually(whole)


def _others(namespace: Namespace, chunks: int) -> ChunkKeys:
    """Of another prompt than `some_keys`."""
    return block_keys(namespace, [7] * (chunks * namespace.layout.chunk_tokens))


async def test_a_namespace_keeps_to_its_quota_and_its_time(tmp_path: Path) -> None:
    """Half of what was stored goes, from the ends of the prefixes; with a time to live all of it; others are spared."""
    with small_cluster(tmp_path, QUIRE_STORAGE_POLICY_CHECK_S="0.2") as cluster:
        async with (
            AsyncClient(cluster.gateway_address) as client,
            AdminClient(cluster.admin_address, cluster.secret) as operator,
        ):
            bounded, free = fresh_namespace(), fresh_namespace()
            keys, payload = some_keys(bounded, 100), random_payload(bounded, 100)
            await store(client, bounded, keys, payload)
            await store(client, free, some_keys(free, 100), payload)
            await operator.set_policy(bounded, quota_bytes=50 * bounded.layout.chunk_bytes)

            async def matched(count: int) -> bool:
                return (await client.lookup(bounded, keys, lease_ttl_ms=0)).matched_chunks == count

            await eventually(lambda: matched(50))
            found = await client.lookup(bounded, keys)
            assert np.array_equal((await fetch_all(client, found))[0], payload[:, :50])
            with pytest.raises(QuotaExceeded, match="the namespace may have"):  # before its bytes move
                await store(client, bounded, _others(bounded, 60), payload[:, :60])
            assert (await store(client, bounded, _others(bounded, 40), payload[:, :40])).stored_chunks == 40
            await operator.set_policy(bounded, ttl_s=1)
            await asyncio.sleep(1.5)
            assert await matched(50), "leased"
            await client.release(found)
            await eventually(lambda: matched(0))
            assert np.array_equal(await _fetched(client, free, some_keys(free, 100)), payload)
            with pytest.raises(QuireError, match="ttl_s"):
                await operator.set_policy(bounded, ttl_s=1 << 50)
