"""The prefix-closed index against a reference model, on a real Redis, asked in one call and segment by segment."""

from __future__ import annotations

import asyncio
import random

import pytest
import redis.asyncio as redis

from quire.errors import MetadataUnavailable
from quire.keys import SEGMENT_CHUNKS, ChunkKeys
from quire.metadata import Membership, PrefixIndex, connect
from quire.metadata.index import ChunkRecord, records
from quire.nodes import Node, Role


def chain(length: int, branch: int = 0, common: int = 0) -> ChunkKeys:
    """Keys of a chain that shares its first `common` chunks with branch 0."""
    names = [(index, branch if index >= common else 0) for index in range(length)]
    return ChunkKeys(b"".join(f"{index:05}/{which:05}".encode().ljust(32, b".") for index, which in names))


@pytest.fixture(params=[False, True], ids=["one call", "by segment"])
def index(request: pytest.FixtureRequest, redis_client: redis.Redis) -> PrefixIndex:
    return PrefixIndex(redis_client, cluster=request.param)


async def _evict(index: PrefixIndex, keys: ChunkKeys, keep: int, now_ms: int) -> list[tuple[bytes, tuple[str, ...]]]:
    """From the end of a chain down to `keep`."""
    deepest_first: list[ChunkRecord] = list(reversed(records(keys, keep, len(keys) - keep)))
    return list((await index.evict(deepest_first, now_ms)).removed)


async def _count(index: PrefixIndex, keys: ChunkKeys) -> int:
    return (await index.match(keys)).count


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
async def test_longest_match_at_every_kind_of_boundary(index: PrefixIndex, length: int) -> None:
    """With the first `present` chunks registered, exactly these match, whatever the segment they end in."""
    keys = chain(length + 300)
    assert await _count(index, keys) == 0
    assert await index.register("a", records(keys, 0, length)) == [True] * length
    assert await _count(index, keys) == length
    assert await _count(index, keys.run(0, min(length, 3))) == min(length, 3)
    assert [run.nodes for run in (await index.match(keys)).runs] == [("a",)]


async def test_a_chunk_without_its_parent_is_refused(index: PrefixIndex) -> None:
    """The index stays closed, also where parent and child lie in different segments."""
    keys = chain(600)
    assert await index.register("a", records(keys, 5, 3)) == [False] * 3
    assert await index.register("a", records(keys, SEGMENT_CHUNKS, 2)) == [False] * 2
    await index.register("a", records(keys, 0, SEGMENT_CHUNKS))
    assert await index.register("a", records(keys, SEGMENT_CHUNKS, 2)) == [True] * 2
    assert await _count(index, keys) == SEGMENT_CHUNKS + 2


async def test_placements_are_runs(index: PrefixIndex) -> None:
    """Mixed placements come back chunk by chunk, merged into runs; a lost replica leaves a tombstone."""
    keys = chain(300)
    await index.register("a", records(keys, 0, 300))
    await index.register("b", records(keys, 10, 280))
    runs = [(run.count, run.nodes) for run in (await index.match(keys)).runs]
    assert runs == [(10, ("a",)), (280, ("a", "b")), (10, ("a",))]
    assert await index.unregister("a", records(keys, 290, 5)) == 5
    runs = [(run.count, run.nodes) for run in (await index.match(keys)).runs]
    assert runs == [(10, ("a",)), (280, ("a", "b")), (5, ()), (5, ("a",))]
    await index.register("c", records(keys, 290, 5))
    assert (await index.match(keys)).runs[2].nodes == ("c",)


async def test_eviction_is_leaf_first(index: PrefixIndex) -> None:
    """A chunk that another extends stays, so does everything before it, also across segments and branches."""
    trunk, branch = chain(300), chain(290, branch=1, common=280)
    await index.register("a", records(trunk, 0, 300))
    await index.register("a", records(branch, 280, 10))
    removed = await _evict(index, trunk, 0, now_ms=0)
    assert [key for key, _ in removed] == [trunk.at(at) for at in range(299, 279, -1)]
    assert all(nodes == ("a",) for _, nodes in removed)
    assert await _count(index, trunk) == 280 and await _count(index, branch) == 290
    assert len(await _evict(index, branch, 0, now_ms=0)) == 290
    assert await _count(index, branch) == 0
    await index.register("a", records(trunk, 0, 300))
    assert await _count(index, trunk) == 300


async def test_a_tombstone_that_opens_a_segment_leaves_no_count_behind(index: PrefixIndex) -> None:
    """Evicting a segment's opener that has no replica left must still release its parent in the segment before."""
    keys = chain(SEGMENT_CHUNKS + 1)
    await index.register("a", records(keys, 0, SEGMENT_CHUNKS + 1))
    await index.unregister("a", records(keys, SEGMENT_CHUNKS, 1))
    assert [nodes for _, nodes in await _evict(index, keys, SEGMENT_CHUNKS, now_ms=0)] == [()]
    assert len(await _evict(index, keys.run(0, SEGMENT_CHUNKS), 0, now_ms=0)) == SEGMENT_CHUNKS


async def test_pins_hold_the_whole_prefix_until_they_expire(index: PrefixIndex) -> None:
    keys = chain(270)
    await index.register("a", records(keys, 0, 270))
    tip, segment = keys.at(263), keys.segment_of(263)
    assert await index.pin(segment, tip, b"l" * 16, expires_ms=1000, ttl_ms=60_000)
    assert len(await _evict(index, keys, 0, now_ms=999)) == 6
    assert await _count(index, keys) == 264
    assert await _evict(index, keys.run(0, 264), 0, now_ms=999) == []
    assert len(await _evict(index, keys.run(0, 264), 200, now_ms=1000)) == 64
    assert await index.pin(keys.segment_of(100), keys.at(100), b"m" * 16, 5000, 60_000)
    assert await index.unpin(keys.segment_of(100), keys.at(100), b"m" * 16)
    assert not await index.unpin(keys.segment_of(100), keys.at(100), b"m" * 16)
    assert len(await _evict(index, keys.run(0, 200), 0, now_ms=0)) == 200
    assert not await index.pin(segment, tip, b"l" * 16, 1000, 1000), "a chunk that is gone cannot be pinned"


@pytest.mark.parametrize("seed", range(4))
async def test_random_histories_equal_the_model(index: PrefixIndex, seed: int) -> None:
    """Register, unregister, evict and match on branching chains, against a dict of parents and holders."""
    rng = random.Random(seed)
    chains = [chain(rng.randint(200, 560), branch=b, common=rng.randint(100, 400)) for b in range(4)]
    holders: dict[bytes, set[str]] = {}
    parents: dict[bytes, bytes] = {}
    for _ in range(60):
        keys = rng.choice(chains)
        first = rng.randrange(len(keys))
        count = rng.randint(1, len(keys) - first)
        node = rng.choice("abc")
        part = records(keys, first, count)
        action = rng.random()
        if action < 0.6:
            expected = []
            for record in part:
                fits = not record.parent or record.parent in holders or record.key in holders
                expected.append(fits)
                if fits:
                    holders.setdefault(record.key, set()).add(node)
                    parents[record.key] = record.parent
            assert await index.register(node, part) == expected
        elif action < 0.8:
            await index.unregister(node, part)
            for record in part:
                holders.get(record.key, set()).discard(node)
        else:
            gone = [key for key, _ in await _evict(index, keys, first, now_ms=0)]
            for key in reversed(list(keys.run(first, len(keys) - first))):
                if key in holders:
                    if key in parents.values():
                        break
                    assert key in gone
                    del holders[key], parents[key]
        for each in chains:
            present = 0
            while present < len(each) and each.at(present) in holders:
                present += 1
            match = await index.match(each)
            assert match.count == present
            flat = [set(run.nodes) for run in match.runs for _ in range(run.count)]
            assert flat == [holders[each.at(at)] for at in range(present)]


async def test_racing_stores_of_one_chain_leave_it_evictable(index: PrefixIndex) -> None:
    """Many nodes registering the same chunks at once must not count a child twice."""
    keys = chain(520)
    await asyncio.gather(*(index.register(node, records(keys, 0, 520)) for node in "abcdef"))
    assert await _count(index, keys) == 520
    assert len(await _evict(index, keys, 0, now_ms=0)) == 520


async def test_membership_expires_and_leaves(redis_client: redis.Redis) -> None:
    """A member lives as long as it reports; an old incarnation's good-bye does not remove the new one."""
    members = Membership(redis_client)
    old = Node("s", Role.STORAGE, "h:1", b"w", "old", 1, 10, 5, {"chunks": 2.0})
    new = Node("s", Role.STORAGE, "h:2", b"w", "new", 1)
    await members.renew(old, expires_ms=100)
    assert await members.live(99) == [old]
    assert await members.live(100) == []
    await members.renew(new, expires_ms=200)
    assert not await members.leave("s", "old")
    assert await members.live(150) == [new]
    assert await members.leave("s", "new")
    assert await members.live(150) == []


async def test_redis_that_is_not_there_is_a_typed_error() -> None:
    client = connect("unix:///nowhere/redis.sock", timeout_s=1)
    with pytest.raises(MetadataUnavailable, match="Redis"):
        await PrefixIndex(client).match(chain(3))
    await client.aclose()


async def test_a_burst_of_commands_waits_for_a_connection(index: PrefixIndex) -> None:
    """More questions at once than connections: all are answered."""
    keys = chain(4)
    await index.register("a", records(keys, 0, 4))
    assert {match.count for match in await asyncio.gather(*(index.match(keys) for _ in range(500)))} == {4}
