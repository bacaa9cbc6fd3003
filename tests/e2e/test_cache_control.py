"""What a client may say of a prefix: retain it, prefetch it, drop it; and what watchers hear. On real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from quire.client import AdminClient, AsyncClient
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest, QuireError, Unauthenticated
from quire.model.events import CacheEvent, EventKind, EventPage
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, metric, random_payload, some_keys, store

MIB = 1 << 20
CHUNKS = 16
LAYOUT = KvLayout(8, 16, 4, 128, Dtype.BF16)  # 256 KiB a chunk
SETTINGS = {
    "QUIRE_STORAGE_SLAB_BYTES": str(4 * MIB),
    "QUIRE_STORAGE_STAGING_BYTES": str(8 * MIB),
    "QUIRE_STORAGE_BLOCK_BYTES": str(2 * MIB),
    "QUIRE_STORAGE_OBJECT_URL": "",
}


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[LocalCluster]:
    """A node with room for eight prefixes."""
    settings = {**SETTINGS, "QUIRE_STORAGE_DRIVES": "", "QUIRE_GATEWAY_RETENTION_S_MAX": "600"}
    with LocalCluster(tmp_path, arena_bytes=40 * MIB, settings=settings) as cluster:
        yield cluster


async def _put(client: AsyncClient, durability: Durability) -> tuple[Namespace, ChunkKeys]:
    namespace = fresh_namespace(LAYOUT)
    keys = some_keys(namespace, CHUNKS)
    await store(client, namespace, keys, random_payload(namespace, CHUNKS), durability=durability)
    return namespace, keys


async def _press(client: AsyncClient, prefixes: int) -> None:
    """More than there is room for."""
    for _ in range(prefixes):
        for attempt in range(50):
            try:
                await _put(client, Durability.MEMORY)
                break
            except QuireError:
                assert attempt < 49
                await asyncio.sleep(0.05)


async def _there(client: AsyncClient, prefix: tuple[Namespace, ChunkKeys]) -> int:
    return (await client.lookup(*prefix, lease_ttl_ms=0)).matched_chunks


async def test_what_is_retained_outlasts_its_client_and_everybody_elses_need(in_memory: LocalCluster) -> None:
    async with AsyncClient(in_memory.gateway_address) as client:
        kept, other = await _put(client, Durability.MEMORY), await _put(client, Durability.MEMORY)
        with pytest.raises(InvalidRequest, match="ttl_ms"):
            await client.retain(*kept, seconds=601)
        assert await client.retain(*kept, seconds=600) == CHUNKS
    async with AsyncClient(in_memory.gateway_address) as client:
        await _press(client, 12)
        assert await _there(client, other) == 0, "there was no room for all"
        assert await _there(client, kept) == CHUNKS
        assert await client.evict(*kept) == 0, "nor is it dropped"
        assert not await client.end_retention(*other)
        assert await client.end_retention(*kept)
        assert not await client.end_retention(*kept)
        assert await client.evict(*kept) == CHUNKS, "it may go again"


async def test_a_retention_ends_by_itself(in_memory: LocalCluster) -> None:
    async with AsyncClient(in_memory.gateway_address) as client:
        kept = await _put(client, Durability.MEMORY)
        assert await client.retain(*kept, seconds=0.2) == CHUNKS
        await asyncio.sleep(0.3)
        assert await client.evict(*kept) == CHUNKS


async def test_a_prefix_is_kept_until_its_last_holder_ends(in_memory: LocalCluster) -> None:
    async with AsyncClient(in_memory.gateway_address) as client:
        kept = await _put(client, Durability.MEMORY)
        for holder in ("one", "two"):
            assert await client.retain(*kept, seconds=600, holder=holder) == CHUNKS
        assert await client.retain(*kept, seconds=0.1, holder="two") == CHUNKS, "which shortens nothing"
        assert await client.end_retention(*kept, holder="one")
        assert not await client.end_retention(*kept), "that of the tenant itself"
        await asyncio.sleep(0.2)
        assert await client.evict(*kept) == 0
        assert await client.end_retention(*kept, holder="two")
        assert await client.evict(*kept) == CHUNKS
        with pytest.raises(InvalidRequest, match="holder"):
            await client.retain(*kept, seconds=1, holder="x" * 257)


async def test_what_is_prefetched_lies_in_memory(tmp_path: Path) -> None:
    """What it is then read from: the node says where hits came from."""

    async def hits() -> dict[str, float]:
        await asyncio.sleep(0.3)  # a scrape within a quarter of a second of another one is told the same
        address = cluster.metrics["storage-0"]
        return {tier: metric(address, "quire_storage_tier_hits_total", tier=tier) for tier in ("memory", "disk")}

    with LocalCluster(tmp_path, arena_bytes=40 * MIB, drive_bytes=160 * MIB, settings=SETTINGS) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            first = await _put(client, Durability.LOCAL)
            for _ in range(12):
                await _put(client, Durability.LOCAL)
            before = await hits()
            assert await client.prefetch(*first, within_s=0.5) == CHUNKS
            after = await hits()
            assert after["disk"] - before["disk"] == CHUNKS
            assert await client.prefetch(*first) == CHUNKS, "it is there"
            payload, summary = await fetch_all(client, await client.lookup(*first))
            assert summary.usable_chunks == CHUNKS and payload.any()
            at_last = await hits()
            assert at_last["disk"] == after["disk"] and at_last["memory"] - after["memory"] == 2 * CHUNKS
            assert await client.prefetch(fresh_namespace(LAYOUT), first[1].run(0, 0)) == 0


async def test_watchers_hear_what_comes_and_goes(in_memory: LocalCluster) -> None:
    """In order, with parents, and from a cursor on again; a client without the cluster's secret is refused."""
    async with AsyncClient(in_memory.gateway_address) as client, _operator(in_memory) as operator:
        watching = operator.watch()
        begun = await anext(watching)
        assert not begun.events
        namespace, keys = await _put(client, Durability.MEMORY)
        stored = await _heard(watching, CHUNKS)
        assert {each.kind for each in stored} == {EventKind.STORED} and {each.holder for each in stored} == {
            "storage-0"
        }
        told = b"".join(each.keys.packed for each in stored)
        assert told == keys.packed
        assert b"".join(each.parents for each in stored) == bytes(32) + told[:-32]
        assert await client.evict(namespace, keys, keep_chunks=10) == 6
        (removed,) = await _heard(watching, 6)
        assert removed.kind is EventKind.REMOVED and set(removed.keys) == set(keys.run(10, 6))
        await watching.aclose()
        again = operator.watch(begun.cursor)
        assert [each.kind for each in await _heard(again, CHUNKS + 6)] == [
            *(each.kind for each in stored),
            removed.kind,
        ]
        await again.aclose()
        with pytest.raises(InvalidRequest, match="cursor"):
            await anext(operator.watch("soon"))
    async with AdminClient(in_memory.admin_address, "another secret " * 3) as stranger:
        with pytest.raises(Unauthenticated):
            await anext(stranger.watch())


async def test_a_watcher_that_was_away_for_too_long_is_told_so(tmp_path: Path) -> None:
    settings = {**SETTINGS, "QUIRE_STORAGE_DRIVES": "", "QUIRE_ORCHESTRATOR_EVENTS_KEPT": "1"}
    with LocalCluster(tmp_path, arena_bytes=40 * MIB, settings=settings) as cluster:
        async with AsyncClient(cluster.gateway_address) as client, _operator(cluster) as operator:
            await _put(client, Durability.MEMORY)
            begun = await anext(operator.watch())
            assert not (await anext(operator.watch(begun.cursor))).lost
            for _ in range(150):  # Redis cuts a stream by whole blocks of a hundred
                await client.evict(*await _put_little(client))
            assert (await anext(operator.watch(begun.cursor))).lost


async def _put_little(client: AsyncClient) -> tuple[Namespace, ChunkKeys]:
    namespace = fresh_namespace()
    keys = some_keys(namespace, 1)
    await store(client, namespace, keys, random_payload(namespace, 1), durability=Durability.MEMORY)
    return namespace, keys


def _operator(cluster: LocalCluster) -> AdminClient:
    return AdminClient(cluster.admin_address, cluster.secret)


async def _heard(watching: AsyncGenerator[EventPage, None], chunks: int) -> list[CacheEvent]:
    """Of so many chunks."""
    events: list[CacheEvent] = []
    async with asyncio.timeout(20):
        while sum(len(each.keys) for each in events) < chunks:
            events += (await anext(watching)).events
    return events
