"""Announcements of stores that are running: in Redis, and in memory as tests have them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import redis.asyncio as redis

from quire.model.keys import ChunkKeys
from quire.model.ranges import ChunkRange
from quire.testing.running_stores import MemoryRunningStores
from quire_server.redis import RunningStores

_STORE, _OTHER = b"s" * 16, b"o" * 16
_END_MS = 10_000


@pytest.fixture(params=["redis_client", "redis_cluster_client", "memory"])
def running(request: pytest.FixtureRequest) -> Any:
    memory = request.param == "memory"
    return MemoryRunningStores() if memory else RunningStores(request.getfixturevalue(request.param))


def _keys(count: int) -> ChunkKeys:
    return ChunkKeys(os.urandom(32 * count))


def _chunks(ranges: list[ChunkRange]) -> dict[int, str]:
    """The node of each chunk that arrives."""
    return {at: run.node_id for run in ranges for at in range(run.first, run.stop)}


async def test_what_arrives_is_found_as_far_as_prefixes_agree(running: Any) -> None:
    keys = _keys(900)
    await running.begin(keys, [ChunkRange("a", 100, 400), ChunkRange("b", 500, 400)], _STORE, _END_MS)
    nodes = dict.fromkeys(range(100, 500), "a") | dict.fromkeys(range(500, 900), "b")
    assert _chunks(await running.find(keys, 0)) == nodes
    shorter = {at: node for at, node in nodes.items() if at < 300}
    assert _chunks(await running.find(keys.run(0, 300), 0)) == shorter, "another wants less of it"
    forked = ChunkKeys(keys.run(0, 150).packed + os.urandom(32 * 400))
    assert _chunks(await running.find(forked, 0)) == dict.fromkeys(range(100, 150), "a")
    assert await running.find(_keys(300), 0) == []


async def test_a_store_withdraws_its_own(running: Any) -> None:
    keys, ranges = _keys(600), [ChunkRange("a", 0, 600)]
    await running.begin(keys, ranges, _STORE, _END_MS)
    await running.begin(keys, [ChunkRange("b", 0, 600)], _OTHER, _END_MS)
    await running.end(keys, ranges, _STORE)
    assert set(_chunks(await running.find(keys, 0)).values()) == {"b"}, "another has announced the same since"
    await running.end(keys, ranges, _OTHER)
    assert await running.find(keys, 0) == []
    await running.end(keys, ranges, _OTHER)


async def test_of_two_stores_the_later_one_comes_first(running: Any) -> None:
    """The end of the other may have been lost with its gateway."""
    keys = _keys(100)
    for node, first, end_ms in (("stale", 0, 5_000), ("live", 10, 9_000), ("older", 5, 4_000)):
        await running.begin(keys, [ChunkRange(node, first, 100 - first)], os.urandom(16), end_ms)
    assert [run.node_id for run in await running.find(keys, 0)] == ["live", "stale", "older"]


async def test_one_whose_end_was_lost_ends_with_its_permit(running: Any) -> None:
    keys = _keys(3)
    await running.begin(keys, [ChunkRange("a", 0, 3)], _STORE, _END_MS)
    assert await running.find(keys, _END_MS - 1) and not await running.find(keys, _END_MS)


async def test_it_is_forgotten_by_redis_too(any_redis: redis.Redis) -> None:
    keys = _keys(600)
    await RunningStores(any_redis).begin(keys, [ChunkRange("a", 0, 600)], _STORE, _END_MS)
    names = [name async for name in any_redis.scan_iter(match="quire:s:*")]
    lives = [await any_redis.pttl(name) for name in names]
    assert len(names) == 3 and all(life > 0 for life in lives)
