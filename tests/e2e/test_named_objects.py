"""Objects of any bytes, as LMCache, SGLang and vLLM's tiers keep them: `quire.integrations.objects`."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from quire.client import AsyncClient, Buffer, StoreSummary
from quire.integrations.objects import PIECE_BYTES, Objects, Owner, layout_of
from quire.integrations.transfers import ObjectPart, ObjectSettings, ObjectTransfers
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.records import records
from quire_server.redis import PrefixIndex, connect
from quire_tools.local import LocalCluster
from tests.e2e.helpers import LAYOUT, fresh_namespace, random_payload, some_keys


@pytest.mark.parametrize("size", [1, 7, 4096, 131072, 200_000, 3 << 20, PIECE_BYTES, PIECE_BYTES + 4096, 80 << 20])
def test_an_object_is_cut_into_equal_pieces(size: int) -> None:
    layout, pieces = layout_of(size)
    assert layout.chunk_bytes * pieces == size and layout.chunk_bytes <= PIECE_BYTES


def test_a_size_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be cut"):
        layout_of(1_000_003)


@pytest.mark.parametrize("size", [5000, 100_000, 2 * PIECE_BYTES + 64])
async def test_what_was_put_is_got_and_nothing_else_is(cluster: LocalCluster, size: int) -> None:
    """Neither one of another size, nor of another name, nor of another version."""
    owner = Owner(model="objects", version=os.urandom(4).hex())
    async with AsyncClient(cluster.gateway_address) as client:
        objects = Objects(client, Durability.MEMORY)
        memory = client.allocate(2 * size)
        assert memory.view is not None
        here, there = memory.part(0, size), memory.part(size, size)
        place = owner.place(b"a", size)
        assert await objects.have([place]) == await objects.get([place], there, [0]) == [False]
        wanted = os.urandom(size)
        memory.view[:size] = memoryview(wanted)
        await objects.put([place], here)
        await objects.put([place], here)
        assert await objects.have([place]) == await objects.get([place], there, [0]) == [True]
        assert memory.view[size:].tobytes() == wanted
        for other in (
            owner.place(b"b", size),
            owner.place(b"a", size * 2),
            Owner(model="objects", version="another").place(b"a", size),
        ):
            assert await objects.have([other]) == [False]
        assert await objects.drop(place) and await objects.have([place]) == [False]
        memory.close()


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.LOCAL])
async def test_chunks_that_stand_for_themselves(cluster: LocalCluster, durability: Durability) -> None:
    """Some are stored, then all: the new ones alone move. Those that are there come to where they belong; gaps stay."""
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        layout, count = namespace.layout, 40
        keys, payload = some_keys(namespace, count), random_payload(namespace, count)
        buffer = client.allocate(layout.payload_bytes(count))
        there = [3, 4, 5, 17, 39]
        buffer.layers(layout.num_layers, len(there), layout.slice_bytes)[:] = payload[:, there]
        stored = await _store(client, namespace, keys.pick(there), buffer, durability)
        assert (stored.stored_chunks, stored.known_chunks) == (len(there), 0)

        assert list((await client.lookup(namespace, keys, lease_ttl_ms=0, unchained=True)).there) == there
        assert (await client.lookup(namespace, keys, lease_ttl_ms=0)).matched_chunks == 0, "no prefix of them"
        got = buffer.layers(layout.num_layers, count, layout.slice_bytes)
        got[:] = 0xEE
        retrieval = await client.retrieve(namespace, keys, buffer, lease_ttl_ms=0, unchained=True)
        assert retrieval.delivery is not None and list(retrieval.found.there) == there
        summary = await retrieval.delivery.summary()
        await retrieval.delivery.quiesced(10)
        assert summary.delivered == b"\1" * len(there)
        assert np.array_equal(got[:, there], payload[:, there])
        assert (np.delete(got, there, axis=1) == 0xEE).all()

        got[:] = payload
        stored = await _store(client, namespace, keys, buffer, durability)
        assert (stored.stored_chunks, stored.known_chunks) == (count - len(there), len(there))
        got[:] = 0
        retrieval = await client.retrieve(namespace, keys, buffer, lease_ttl_ms=0, unchained=True)
        assert retrieval.delivery is not None
        await retrieval.delivery.summary()
        await retrieval.delivery.quiesced(10)
        assert np.array_equal(got, payload)
        assert await client.evict(namespace, keys.pick([7])) == 1
        assert list((await client.lookup(namespace, keys, lease_ttl_ms=0, unchained=True)).there) == [
            at for at in range(count) if at != 7
        ]
        buffer.close()


async def test_objects_larger_than_staging_memory_are_transferred(cluster: LocalCluster) -> None:
    """By what an engine's integration uses where a user has not said how much staging memory there should be."""
    transfers = ObjectTransfers(ObjectSettings(gateway=cluster.gateway_address), None)
    size, owner = 20 << 20, Owner(model="objects", version=os.urandom(4).hex())
    memory = np.random.default_rng(1).integers(0, 256, 2 * size, dtype=np.uint8)
    wanted, address = memory.copy(), memory.ctypes.data
    parts = [ObjectPart(at, owner.place(b"%d" % at, size), address + at * size, size) for at in range(2)]
    assert len(await asyncio.to_thread(transfers.client.run, transfers.store(parts))) == 2
    memory[:] = 0
    assert sorted(await asyncio.to_thread(transfers.client.run, transfers.load(parts))) == [0, 1]
    assert np.array_equal(memory, wanted)
    await asyncio.to_thread(transfers.close)


async def test_one_that_is_listed_and_not_there_costs_no_other(cluster: LocalCluster) -> None:
    """It is not listed any more afterwards, although it is not the first of those that were asked for."""
    namespace, count, false = fresh_namespace(), 12, 7
    keys, payload = some_keys(namespace, count), random_payload(namespace, count)
    there = [at for at in range(count) if at != false]
    async with AsyncClient(cluster.gateway_address) as client:
        buffer = client.allocate(payload.nbytes)
        got = buffer.layers(LAYOUT.num_layers, count, LAYOUT.slice_bytes)
        buffer.layers(LAYOUT.num_layers, len(there), LAYOUT.slice_bytes)[:] = payload[:, there]
        await _store(client, namespace, keys.pick(there), buffer, Durability.MEMORY)
        found = await client.lookup(namespace, keys, lease_ttl_ms=0, unchained=True)
        redis = connect(cluster.redis_url)
        lost = records(keys, false, 1, unchained=True)
        assert await PrefixIndex(redis).register(found.ranges[0].node_id, lost, 0) != [0]
        await redis.aclose()
        got[:] = 0xEE
        retrieval = await client.retrieve(namespace, keys, buffer, lease_ttl_ms=0, unchained=True)
        assert retrieval.delivery is not None and len(retrieval.found.there) == count
        summary = await retrieval.delivery.summary()
        await retrieval.delivery.quiesced(10)
        assert summary.delivered == bytes(at != false for at in range(count))
        assert np.array_equal(got[:, there], payload[:, there]) and (got[:, false] == 0xEE).all()
        async with asyncio.timeout(10):
            while len((await client.lookup(namespace, keys, lease_ttl_ms=0, unchained=True)).there) == count:
                await asyncio.sleep(0.05)
        buffer.close()


async def _store(
    client: AsyncClient, namespace: Namespace, keys: ChunkKeys, buffer: Buffer, durability: Durability
) -> StoreSummary:
    source = buffer.part(0, namespace.layout.payload_bytes(len(keys)))
    session = await client.store(namespace, keys, 0, source, durability=durability, complete=True, unchained=True)
    summary = await session.commit()
    await session.quiesced(10)
    return summary


async def test_what_makes_no_sense_of_keys_that_are_no_prefix_is_refused(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys = some_keys(namespace, 4)
        buffer = client.allocate(namespace.layout.payload_bytes(4))
        with pytest.raises(InvalidRequest, match="leased"):
            await client.lookup(namespace, keys, unchained=True)
        with pytest.raises(InvalidRequest, match="are all delivered"):
            await client.retrieve(namespace, keys, buffer, lease_ttl_ms=0, unchained=True, first_chunk=1)
        with pytest.raises(InvalidRequest, match="first_chunk"):
            await client.store(namespace, keys, 1, buffer, complete=True, unchained=True)
        assert not buffer.is_busy
        buffer.close()


async def test_many_objects_at_once_of_several_sizes(cluster: LocalCluster) -> None:
    """Into memory at places of their own, in any order; what is missing is told and leaves its place alone."""
    owner, generator = Owner(model="objects", version=os.urandom(4).hex()), np.random.default_rng(1)
    async with AsyncClient(cluster.gateway_address) as client:
        objects = Objects(client, Durability.MEMORY)
        memory = client.allocate(64 << 20)
        assert memory.view is not None
        sizes = [4096] * 300 + [70_000] * 30 + [2 * PIECE_BYTES]
        places = [owner.place(b"%d" % at, size) for at, size in enumerate(sizes)]
        values = [generator.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        for size in sorted(set(sizes)):
            group = [at for at in range(len(sizes)) if sizes[at] == size and at % 7]
            for slot, at in enumerate(group):
                memory.view[slot * size : (slot + 1) * size] = values[at]
            await objects.put([places[at] for at in group], memory.part(0, size * len(group)))
        assert await objects.have(places) == [bool(at % 7) for at in range(len(sizes))]
        memory.view[:] = 0xEE
        order, offsets, end = generator.permutation(len(sizes)), [0] * len(sizes), 0
        for at in order:
            offsets[at], end = end, end + sizes[at] + 64
        assert await objects.get(places, memory, offsets) == [bool(at % 7) for at in range(len(sizes))]
        for at, size in enumerate(sizes):
            got = memory.view[offsets[at] : offsets[at] + size]
            assert np.array_equal(got, values[at]) if at % 7 else (got == 0xEE).all()
            assert (memory.view[offsets[at] + size : offsets[at] + size + 64] == 0xEE).all()
        memory.close()
