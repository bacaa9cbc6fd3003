"""Store and fetch through the real services: gateway, orchestrator, scheduler, three storage nodes, Redis, UCX."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from quire.client import AsyncClient, SlicePlaces
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability, OnExisting
from quire.model.errors import ContentConflict, InvalidRequest, NotImplementedHere, TargetInvalid
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("order", list(DeliveryOrder))
@pytest.mark.parametrize("chunks", [1, 40, 700])
async def test_what_was_stored_comes_back_layer_by_layer(
    cluster: LocalCluster, chunks: int, order: DeliveryOrder
) -> None:
    """Bytes are exact at the moment each layer is announced, with stripes from several storage nodes (700 chunks)."""
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, chunks), random_payload(namespace, chunks, seed=chunks)
        summary = await store(client, namespace, keys, payload)
        assert (summary.stored_chunks, summary.known_chunks) == (chunks, 0)
        found = await client.lookup(namespace, keys)
        assert found.matched_chunks == chunks
        assert len({each.node_id for each in found.ranges}) >= (2 if chunks == 700 else 1)
        got, fetched = await fetch_all(client, found, order)
        assert np.array_equal(got, payload)
        assert fetched.usable_chunks == chunks and fetched.bytes_moved == payload.nbytes
        assert all(outcome.quiesced and not outcome.error_code for outcome in fetched.outcomes)
        assert await client.release(found) and not await client.release(found)


@pytest.mark.usefixtures("each_way")
async def test_known_chunks_are_skipped_and_the_rest_appended(cluster: LocalCluster) -> None:
    """A second store of a longer prefix stores what is new; the whole comes back."""
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 300), random_payload(namespace, 300)
        await store(client, namespace, keys.run(0, 250), payload[:, :250])
        summary = await store(client, namespace, keys, payload)
        assert (summary.stored_chunks, summary.known_chunks) == (50, 250)
        found = await client.lookup(namespace, keys)
        assert np.array_equal((await fetch_all(client, found))[0], payload)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("lease_ttl_ms", [60_000, 0])
@pytest.mark.parametrize(("matching", "first"), [(700, 0), (35, 0), (35, 30), (35, 35), (0, 0)])
async def test_retrieved_in_one_exchange(cluster: LocalCluster, matching: int, first: int, lease_ttl_ms: int) -> None:
    """What matches lies where it would if all of it did; what does not is left alone; the lease can be given back."""
    async with AsyncClient(cluster.gateway_address) as client:
        namespace, chunks = fresh_namespace(), 700
        keys, payload = some_keys(namespace, chunks), random_payload(namespace, chunks)
        if matching:
            await store(client, namespace, keys.run(0, matching), payload[:, :matching])
        layout = namespace.layout
        buffer = client.allocate(layout.payload_bytes(chunks - first))
        assert buffer.view is not None
        buffer.view[:] = 0xEE
        retrieval = await client.retrieve(
            namespace, keys, buffer, first_chunk=first, order=DeliveryOrder.LAYERWISE, lease_ttl_ms=lease_ttl_ms
        )
        assert retrieval.found.matched_chunks == matching
        got = buffer.layers(layout.num_layers, chunks - first, layout.slice_bytes)
        if retrieval.delivery is not None:
            for layer in range(layout.num_layers):
                await retrieval.delivery.layer(layer)
                assert np.array_equal(got[layer, : matching - first], payload[layer, first:matching])
            assert (await retrieval.delivery.summary()).usable_chunks == matching - first
            await retrieval.delivery.quiesced(10)
        assert (retrieval.delivery is None) == (matching == first)
        assert (got[:, matching - first :] == 0xEE).all()
        assert await client.release(retrieval.found) == bool(matching and lease_ttl_ms)
        buffer.close()


async def test_a_retrieval_that_is_refused_leaves_its_buffer_alone(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys = some_keys(namespace, 4)
        buffer = client.allocate(namespace.layout.payload_bytes(4))
        with pytest.raises(InvalidRequest, match="lease_ttl_ms"):
            await client.retrieve(namespace, keys, buffer, lease_ttl_ms=1 << 31)
        with pytest.raises(TargetInvalid):
            await client.retrieve(namespace, some_keys(namespace, 5), buffer)
        assert not buffer.is_busy
        buffer.close()


@pytest.mark.usefixtures("each_way")
async def test_partial_hit_and_miss(cluster: LocalCluster) -> None:
    """Another prompt matches as far as it agrees; another namespace not at all."""
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 60), random_payload(namespace, 60)
        await store(client, namespace, keys, payload)
        other = type(keys)(keys.run(0, 35).packed + b"".join(bytes([number]) * 32 for number in range(10)))
        found = await client.lookup(namespace, other)
        assert found.matched_chunks == 35
        assert np.array_equal((await fetch_all(client, found))[0], payload[:, :35])
        stranger = fresh_namespace()
        assert (await client.lookup(stranger, some_keys(stranger, 60))).matched_chunks == 0


async def test_shards_are_looked_up_together(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request names as many shards as fit into a message. The answer has a lease for each shard."""
    async with AsyncClient(cluster.gateway_address) as client:
        shards = []
        for has in (40, 0, 25):
            namespace = fresh_namespace()
            keys, payload = some_keys(namespace, 60), random_payload(namespace, 60)
            if has:
                await store(client, namespace, keys.run(0, has), payload[:, :has])
            shards.append((namespace, keys))
        for room in (1 << 20, 2 * len(shards[0][1].packed)):
            monkeypatch.setattr("quire.client.lookup._KEYS_BYTES_MAX", room)
            lookups = await client.lookup_shards(shards)
            assert [lookup.matched_chunks for lookup in lookups] == [40, 0, 25]
            assert [lookup.namespace for lookup in lookups] == [namespace for namespace, _ in shards]
            assert [bool(lookup.lease) and await client.release(lookup) for lookup in lookups] == [True, False, True]
        lone = [(namespace, keys.run(20, 10)) for namespace, keys in shards]
        assert [lookup.there for lookup in await client.lookup_shards(lone, lease_ttl_ms=0, unchained=True)] == [[]] * 3


async def test_concurrent_deliveries_do_not_mix(cluster: LocalCluster) -> None:
    """Six fetches of three prefixes by two clients at once: each gets its own bytes."""
    async with AsyncClient(cluster.gateway_address) as one, AsyncClient(cluster.gateway_address) as two:
        stored = []
        for seed in range(3):
            namespace = fresh_namespace()
            keys, payload = some_keys(namespace, 120), random_payload(namespace, 120, seed)
            await store(one, namespace, keys, payload, durability=Durability.MEMORY)
            stored.append((namespace, keys, payload))

        async def check(client: AsyncClient, index: int) -> None:
            namespace, keys, payload = stored[index]
            got, _ = await fetch_all(client, await client.lookup(namespace, keys))
            assert np.array_equal(got, payload)

        await asyncio.gather(*(check(client, index) for client in (one, two) for index in range(3)))


@pytest.mark.parametrize("order", list(DeliveryOrder))
async def test_slices_land_in_an_engines_own_blocks(cluster: LocalCluster, order: DeliveryOrder) -> None:
    """Two fetches at once into one registered pool of blocks, each layer a tensor of its own (layers, blocks, slice):

    one begins behind 30 chunks that the engine has. Each slice is where its block is, and nothing else was touched.
    """
    async with AsyncClient(cluster.gateway_address) as client:
        namespace, blocks = fresh_namespace(), 500
        keys, payload = some_keys(namespace, 300), random_payload(namespace, 300)
        await store(client, namespace, keys, payload, durability=Durability.MEMORY)
        found, layout = await client.lookup(namespace, keys), namespace.layout
        pool = client.allocate(layout.payload_bytes(blocks))
        tensor = pool.layers(layout.num_layers, blocks, layout.slice_bytes)
        tensor[:] = 7
        free = np.random.default_rng(1).permutation(blocks)
        wanted = ((30, 200, free[:200]), (0, 90, free[200:290]))
        deliveries = [
            await client.fetch(
                found,
                pool,
                first_chunk=first,
                chunk_count=count,
                order=order,
                places=SlicePlaces(blocks * layout.slice_bytes, mine * layout.slice_bytes),
            )
            for first, count, mine in wanted
        ]
        with pytest.raises(TargetInvalid, match="in use"):
            elsewhere = SlicePlaces(chunk_offsets=[int(free[250]) * layout.slice_bytes])
            await client.fetch(found, pool, chunk_count=1, places=elsewhere)
        for delivery in deliveries:
            summary = await delivery.summary()
            assert summary.usable_chunks in (200, 90) and not summary.outcomes[0].error_code
            await delivery.quiesced(10)
        expected = np.full_like(tensor, 7)
        for first, count, mine in wanted:
            expected[:, mine] = payload[:, first : first + count]
        assert np.array_equal(tensor, expected)
        assert not pool.is_busy
        pool.close()


async def test_transfers_share_a_registered_region(cluster: LocalCluster) -> None:
    """A fetch and a store at a time, in parts of one buffer; a part that is in use is refused, and so is closing it."""
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 40), random_payload(namespace, 40)
        await store(client, namespace, keys.run(0, 20), payload[:, :20], durability=Durability.MEMORY)
        room = client.allocate(2 * payload.nbytes)
        left, right = room.part(0, payload.nbytes // 2), room.part(payload.nbytes, payload.nbytes // 2)
        assert right.view is not None
        right.view[:] = payload[:, 20:].reshape(-1)
        session = await client.store(namespace, keys, 20, right, durability=Durability.MEMORY)
        found = await client.lookup(namespace, keys)
        delivery = await client.fetch(found, left)
        assert right.is_busy
        with pytest.raises(TargetInvalid, match="in use"):
            room.close()
        with pytest.raises(TargetInvalid, match="in use"):
            await client.fetch(found, room.part(payload.nbytes - 8, payload.nbytes))
        for layer in range(namespace.layout.num_layers):
            session.layer_ready(layer)
        assert (await session.commit()).stored_chunks == 20
        assert (await delivery.summary()).usable_chunks == 20
        await delivery.quiesced(10)
        got = left.layers(namespace.layout.num_layers, 20, namespace.layout.slice_bytes)
        assert np.array_equal(got, payload[:, :20])
        room.close()


async def test_the_same_key_with_other_bytes_is_refused_and_the_first_kept(cluster: LocalCluster) -> None:
    """VERIFY reads the bytes and compares; a difference is ContentConflict. The stored bytes stay in any case."""
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 20), random_payload(namespace, 20)
        await store(client, namespace, keys, payload)
        await store(client, namespace, keys, payload, on_existing=OnExisting.VERIFY)
        other = payload.copy()
        other[2, 7, 100] ^= 1
        await store(client, namespace, keys, other)
        assert np.array_equal((await fetch_all(client, await client.lookup(namespace, keys)))[0], payload)
        with pytest.raises(ContentConflict, match="chunk_keys"):
            await store(client, namespace, keys, other, on_existing=OnExisting.VERIFY)
        got, _ = await fetch_all(client, await client.lookup(namespace, keys))
        assert np.array_equal(got, payload)


async def test_racing_stores_of_the_same_prefix_both_end_readable(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as one, AsyncClient(cluster.gateway_address) as two:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 300), random_payload(namespace, 300)
        await asyncio.gather(*(store(client, namespace, keys, payload) for client in (one, two)))
        for client in (one, two):
            found = await client.lookup(namespace, keys)
            assert found.matched_chunks == 300
            assert np.array_equal((await fetch_all(client, found))[0], payload)


async def test_eviction_spares_leased_chunks_and_frees_the_rest(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 30), random_payload(namespace, 30)
        await store(client, namespace, keys, payload)
        leased = await client.lookup(namespace, keys.run(0, 20))
        assert await client.evict(namespace, keys) == 10
        assert (await client.lookup(namespace, keys, lease_ttl_ms=0)).matched_chunks == 20
        assert np.array_equal((await fetch_all(client, leased))[0], payload[:, :20])
        await client.release(leased)
        assert await client.evict(namespace, keys.run(0, 20)) == 20
        assert (await client.lookup(namespace, keys)).matched_chunks == 0


async def test_memory_durability_is_lost_with_the_process_and_local_is_not(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """kill -9 of a storage node: what was acknowledged `local` comes back; a node without drives forgets `memory`."""
    folder = tmp_path_factory.mktemp("durable")
    with LocalCluster(folder, arena_bytes=64 << 20, drive_bytes=256 << 20) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            namespace = fresh_namespace()
            keys, payload = some_keys(namespace, 50), random_payload(namespace, 50)
            await store(client, namespace, keys, payload, durability=Durability.LOCAL)
            cluster.kill("storage-0")
            await asyncio.to_thread(cluster.restart, "storage-0")
            found = await client.lookup(namespace, keys)
            assert np.array_equal((await fetch_all(client, found))[0], payload)
    settings = {"QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": ""}
    with LocalCluster(tmp_path_factory.mktemp("volatile"), arena_bytes=64 << 20, settings=settings) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            await store(client, namespace, keys, payload, durability=Durability.MEMORY)
            with pytest.raises(NotImplementedHere, match="no drive"):
                await store(client, fresh_namespace(), keys, payload, durability=Durability.LOCAL)
            cluster.kill("storage-0")
            await asyncio.to_thread(cluster.restart, "storage-0")
            promised = await client.lookup(namespace, keys)
            if promised.matched_chunks:
                buffer = client.allocate(payload.nbytes)
                delivery = await client.fetch(promised, buffer)
                with pytest.raises(Exception, match="chunk 0"):
                    await delivery.layer(0)
                await delivery.quiesced(10)
                for _ in range(600):
                    if not (await client.lookup(namespace, keys)).matched_chunks:
                        break
                    await asyncio.sleep(0.05)
            assert (await client.lookup(namespace, keys)).matched_chunks == 0
