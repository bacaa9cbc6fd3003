"""The index on a real Redis, on a real Redis Cluster, and in memory."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import pytest
import redis.asyncio as redis

from quire.model.errors import InvalidRequest, MetadataUnavailable
from quire.model.fingerprints import fingerprint
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys
from quire.model.records import UNCHAINED_MAX, ChunkRecord, records
from quire.testing.contracts import IndexCallsContract, IndexContract, IndexHistoriesContract
from quire.testing.contracts.index import chain, holdings
from quire.testing.index import MemoryIndex
from quire_server.redis import PrefixIndex, connect
from quire_server.redis.prefix_index.bucket_scripts import _MASTER_SHIFT


class TestIndex(IndexContract, IndexCallsContract, IndexHistoriesContract):
    @pytest.fixture(params=["redis_client", "redis_cluster_client", "memory"])
    def index(self, request: pytest.FixtureRequest) -> PrefixIndex | MemoryIndex:
        return MemoryIndex() if request.param == "memory" else PrefixIndex(request.getfixturevalue(request.param))


def test_what_the_index_is_told_of_chunks() -> None:
    """Of a chain its links, also from one bucket to the next; each for itself of keys that are no prefix."""
    keys = chain(BUCKET_CHUNKS + 1)
    root, last = keys.at(0), keys.at(BUCKET_CHUNKS)
    assert list(records(keys, 0, 2)) == [ChunkRecord(root, b"", root, b""), ChunkRecord(keys.at(1), root, root, root)]
    assert list(records(keys, BUCKET_CHUNKS, 1)) == [ChunkRecord(last, keys.at(BUCKET_CHUNKS - 1), last, root)]
    assert list(records(keys, 1, 2, unchained=True)) == [ChunkRecord(key, b"", key, b"") for key in keys.run(1, 2)]
    many = ChunkKeys(b"".join(number.to_bytes(32, "big") for number in range(UNCHAINED_MAX + 1)))
    assert len(records(many, 0, UNCHAINED_MAX, unchained=True)) == UNCHAINED_MAX
    with pytest.raises(InvalidRequest, match="16385 unchained keys, 16384 at most") as refused:
        records(many, 0, UNCHAINED_MAX + 1, unchained=True)
    assert refused.value.field == "chunk_keys"


async def test_a_registration_that_is_sent_again_counts_once(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was lost: the second one says the same, and the parent in the bucket before has one child."""
    index, keys = PrefixIndex(any_redis), chain(BUCKET_CHUNKS + 1)
    run: Any = index._run

    async def twice(name: str, *arguments: Any) -> Any:
        if name == "register":
            await run(name, *arguments)
        return await run(name, *arguments)

    monkeypatch.setattr(index, "_run", twice)
    assert all(await index.register("a", records(keys, 0, len(keys)), 0))
    trunk = list(reversed(records(keys, 0, BUCKET_CHUNKS)))
    assert not (await index.evict(trunk, 0, 0)).removed, "the last chunk extends them"
    assert len((await index.evict(records(keys, BUCKET_CHUNKS, 1), 0, 0)).removed) == 1
    assert len((await index.evict(trunk, 0, 0)).removed) == BUCKET_CHUNKS


async def test_racing_registrations_count_a_child_once(any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes have linked the chunk to its parent before one of them registers it."""
    index, keys, barrier = PrefixIndex(any_redis), chain(BUCKET_CHUNKS + 1), asyncio.Barrier(3)
    await index.register("a", records(keys, 0, BUCKET_CHUNKS), 0)
    trunk, last = list(reversed(records(keys, 0, BUCKET_CHUNKS))), records(keys, BUCKET_CHUNKS, 1)
    run, linked = cast(Any, index._run), list[str]()

    async def together(name: str, *arguments: Any) -> Any:
        answer = await run(name, *arguments)
        if name == "link" and len(linked) < 3:
            linked.append(name)
            await barrier.wait()
        return answer

    monkeypatch.setattr(index, "_run", together)
    async with asyncio.timeout(30):
        generations = await asyncio.gather(*(index.register(node, last, 0) for node in "abc"))
    assert generations == [generations[0]] * 3 and all(generations[0])
    assert [set(nodes) for nodes in await index.holders(last)] == [{"a", "b", "c"}]
    assert not (await index.evict(trunk, 0, 0)).removed, "the last chunk extends them"
    assert len((await index.evict(last, 0, 0)).removed) == 1
    assert len((await index.evict(trunk, 0, 0)).removed) == BUCKET_CHUNKS


async def test_a_parent_stays_while_a_child_in_another_bucket_is_being_registered(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child was evicted, and then its parent was to be, before a registration that had seen both went on."""
    index, keys = PrefixIndex(any_redis), chain(BUCKET_CHUNKS + 1)
    trunk, last = list(reversed(records(keys, 0, BUCKET_CHUNKS))), records(keys, BUCKET_CHUNKS, 1)
    await index.register("a", records(keys, 0, len(keys)), 0)
    run: Any = index._run

    async def evicted_in_between(name: str, *arguments: Any) -> Any:
        if name == "register":
            monkeypatch.setattr(index, "_run", run)
            assert len((await index.evict(last, 0, 0)).removed) == 1
            assert not (await index.evict(trunk, 0, 0)).removed, "it is linked to what is being registered"
        return await run(name, *arguments)

    monkeypatch.setattr(index, "_run", evicted_in_between)
    assert all(await index.register("b", last, 0))
    assert (await index.match(keys)).count == len(keys)
    assert len((await index.evict(last, 0, 0)).removed) == 1
    assert len((await index.evict(trunk, 0, 0)).removed) == BUCKET_CHUNKS


async def test_registrations_of_one_child_share_no_link(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry of one ends, and its link is removed, after the child is registered by the other."""
    index, other = PrefixIndex(any_redis), PrefixIndex(any_redis)
    keys = chain(BUCKET_CHUNKS + 1)
    trunk, last = list(reversed(records(keys, 0, BUCKET_CHUNKS))), records(keys, BUCKET_CHUNKS, 1)
    await index.register("a", records(keys, 0, BUCKET_CHUNKS), 0)
    run: Any = index._run
    unlink: Any = other._unlink
    late: list[Any] = []

    async def registered_and_evicted(name: str, *arguments: Any) -> Any:
        if name == "register":
            monkeypatch.setattr(index, "_run", run)
            assert all(await other.register("b", last, 0))
            assert len((await other.evict(last, 0, 0)).removed) == 1
        return await run(name, *arguments)

    async def later(*arguments: Any) -> None:
        late.extend(arguments)

    monkeypatch.setattr(index, "_run", registered_and_evicted)
    monkeypatch.setattr(other, "_unlink", later)
    assert all(await index.register("a", last, 0))
    await unlink(*late)
    assert not (await index.evict(trunk, 0, 0)).removed, "the last chunk extends them"
    assert len((await index.evict(last, 0, 0)).removed) == 1
    assert len((await index.evict(trunk, 0, 0)).removed) == BUCKET_CHUNKS


async def test_a_link_that_a_dead_client_left_beside_the_child_s_own_is_removed(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, keys = PrefixIndex(any_redis), chain(BUCKET_CHUNKS + 1)
    trunk, last = list(reversed(records(keys, 0, BUCKET_CHUNKS))), records(keys, BUCKET_CHUNKS, 1)
    await index.register("a", records(keys, 0, len(keys)), 0)
    unlink: Any = index._unlink

    async def dies(*arguments: Any) -> None:
        raise MetadataUnavailable("the connection broke")

    monkeypatch.setattr(index, "_unlink", dies)
    with pytest.raises(MetadataUnavailable):
        await index.register("b", last, 0)
    monkeypatch.setattr(index, "_unlink", unlink)
    assert await _repaired(index, older_ms=3_600_000) == 0, "it may be the link of a registration that is under way"
    assert await _repaired(index, older_ms=-1000) == 1
    assert not (await index.evict(trunk, 0, 0)).removed, "its own link stays"
    assert len((await index.evict([*last, *trunk], 0, 0)).removed) == BUCKET_CHUNKS + 1


@pytest.mark.parametrize("cut", ["register", "unlink"])
async def test_a_call_that_is_cut_short_keeps_a_parent_until_the_index_is_repaired(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    index, keys = PrefixIndex(any_redis), chain(BUCKET_CHUNKS + 1)
    trunk, last = list(reversed(records(keys, 0, BUCKET_CHUNKS))), records(keys, BUCKET_CHUNKS, 1)
    await index.register("a", records(keys, 0, BUCKET_CHUNKS if cut == "register" else len(keys)), 0)
    run: Any = index._run

    async def fails(name: str, *arguments: Any) -> Any:
        if name == cut:
            raise MetadataUnavailable("the connection broke")
        return await run(name, *arguments)

    monkeypatch.setattr(index, "_run", fails)
    with pytest.raises(MetadataUnavailable):
        await (index.register("a", last, 0) if cut == "register" else index.evict(last, 0, 0))
    monkeypatch.setattr(index, "_run", run)
    assert not (await index.match(keys)).count > BUCKET_CHUNKS
    assert not (await index.evict(trunk, 0, 0)).removed, "the chain stays closed, whatever was cut short"
    assert await _repaired(index, older_ms=3_600_000) == 0, "the child may still be registered"
    assert await _repaired(index, older_ms=-1000) == 1
    assert len((await index.evict(trunk, 0, 0)).removed) == BUCKET_CHUNKS


async def test_a_refused_registration_leaves_the_link_of_a_child_that_is_there(any_redis: redis.Redis) -> None:
    """The child's object is being deleted: the object tier is refused, and the child still extends its parent."""
    index, keys = PrefixIndex(any_redis), chain(BUCKET_CHUNKS + 1)
    last, trunk = records(keys, BUCKET_CHUNKS, 1), list(reversed(records(keys, 0, BUCKET_CHUNKS)))
    await index.expect_objects(last, 10)
    assert len(await index.claim_objects(10, 100, 10)) == 1
    await index.register("a", records(keys, 0, len(keys)), 0)
    assert await index.register("@object", last, 10) == [0]
    assert not (await index.evict(trunk, 0, 0)).removed
    assert len((await index.evict(last, 0, 0)).removed) == 1
    assert len((await index.evict(trunk, 0, 0)).removed) == BUCKET_CHUNKS


async def test_a_repair_leaves_the_links_of_children_that_are_there(any_redis: redis.Redis) -> None:
    index, keys = PrefixIndex(any_redis), chain(2 * BUCKET_CHUNKS + 1)
    await index.register("a", records(keys, 0, len(keys)), 0)
    assert await _repaired(index, older_ms=-1000) == 0
    assert not (await index.evict(records(keys, BUCKET_CHUNKS - 1, 1), 0, 0)).removed


async def test_a_registration_that_comes_too_late_is_refused(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link may have been removed by a repair since."""
    monkeypatch.setattr("quire_server.redis.prefix_index.index.LINK_MS", -1000)
    index, keys = PrefixIndex(any_redis), chain(BUCKET_CHUNKS + 1)
    await index.register("a", records(keys, 0, BUCKET_CHUNKS), 0)
    assert await index.register("a", records(keys, BUCKET_CHUNKS, 1), 0) == [0]
    trunk = list(reversed(records(keys, 0, BUCKET_CHUNKS)))
    assert len((await index.evict(trunk, 0, 0)).removed) == BUCKET_CHUNKS


async def _repaired(index: PrefixIndex, *, older_ms: int) -> int:
    removed, cursor = await index.repair(0, older_ms=older_ms)
    while cursor:
        more, cursor = await index.repair(cursor, older_ms=older_ms)
        removed += more
    return removed


async def test_a_registration_that_is_refused_counts_for_nothing(any_redis: redis.Redis) -> None:
    """The object of the first chunk of a bucket is being deleted: its parent in the bucket before has no child."""
    index, keys = PrefixIndex(any_redis), chain(BUCKET_CHUNKS + 1)
    await index.register("a", records(keys, 0, BUCKET_CHUNKS), 0)
    last = records(keys, BUCKET_CHUNKS, 1)
    assert await index.expect_objects(last, 10) == [True]
    assert len(await index.claim_objects(10, 100, 10)) == 1
    assert await index.register("@object", last, 10) == [0]
    trunk = list(reversed(records(keys, 0, BUCKET_CHUNKS)))
    assert len((await index.evict(trunk, 10, 0)).removed) == BUCKET_CHUNKS


async def test_an_index_has_a_name_until_it_is_lost(any_redis: redis.Redis) -> None:
    index, keys = PrefixIndex(any_redis), chain(2)
    name = await index.epoch()
    await index.register("a", records(keys, 0, 2), 0)
    assert (await index.listing("a")).count == len(await holdings(index, "a")) == 2, "among other keys"
    assert len(bytes.fromhex(name)) == 8
    assert await PrefixIndex(any_redis).epoch() == name
    await any_redis.delete("quire:index-epoch")
    assert await PrefixIndex(any_redis).epoch() != name


async def test_an_index_that_is_lost_while_its_name_is_asked_for_has_another(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulator: an orchestrator looked at the cluster no more."""
    index, get = PrefixIndex(redis_client), redis_client.get

    async def lost_once(name: str) -> object:
        monkeypatch.setattr(redis_client, "get", get)
        await redis_client.flushdb()
        return await get(name)

    monkeypatch.setattr(redis_client, "get", lost_once)
    name = await index.epoch()
    assert len(bytes.fromhex(name)) == 8 and await index.epoch() == name


async def test_holders_are_asked_for_in_parts(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_server.redis.prefix_index.index._HELD_AT_ONCE", 2)
    index, chunks = PrefixIndex(redis_client), records(chain(5), 0, 5)
    await index.register("a", chunks, 0)
    assert await index.holders(chunks) == [("a",)] * 5
    roots = chain(5, branch=1)
    await index.register("a", records(roots, 0, 3, unchained=True), 0)
    assert await index.root_holders(roots) == [("a",)] * 3 + [()] * 2


async def test_a_cluster_is_read_one_master_after_the_other(
    redis_cluster_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in whatever order the client has the masters at the time; and a master that has gone ends it."""
    monkeypatch.setattr("quire_server.redis.prefix_index.bucket_scripts._SCANNED", 1)
    client: Any = redis_cluster_client
    index, roots = PrefixIndex(client), [records(chain(1, branch=branch), 0, 1)[0] for branch in range(60)]
    await index.register("a", roots, 0)
    masters, turns = client.get_primaries(), itertools.count()
    monkeypatch.setattr(client, "get_primaries", lambda: masters[:: 1 if next(turns) % 2 else -1])
    found, cursor, more = list[bytes](), 0, True
    while more:
        page, cursor = await index.holdings("a", cursor)
        found += [each.fingerprint for each in page]
        more = bool(cursor)
    assert sorted(found) == sorted(fingerprint(chunk.key) for chunk in roots)
    assert await index.holdings("a", len(masters) << _MASTER_SHIFT) == ([], 0)


async def test_what_is_to_be_deleted_is_noted_until_that_is_settled(redis_client: redis.Redis) -> None:
    """Listed, deleted, or found to be listed when its time came: it is not looked at again."""
    index, chunks = PrefixIndex(redis_client), records(chain(3), 0, 3)

    async def due() -> dict[bytes, float]:
        names = [name async for name in redis_client.scan_iter(match="*due*")]
        found: list[Any] = [each for name in names for each in await redis_client.zrange(name, 0, -1, withscores=True)]
        return {member[-32:]: score for member, score in found}

    generations = await index.register("a", chunks, 0)
    await index.expect_objects(chunks, 50)
    assert await due() == {chunk.key: 50.0 for chunk in chunks}
    await index.add_objects(chunks[:1], generations[:1])
    assert await due() == {chunk.key: 50.0 for chunk in chunks[1:]}
    await index.register("@object", chunks[1:2], 0)
    await index.evict(chunks[2:], 0, 50)
    claimed = await index.claim_objects(60, 100, 10)
    assert [each.key for each in claimed] == [chunks[2].key]
    assert await due() == {chunks[2].key: 100.0}
    await index.objects_deleted(claimed, 100)
    assert await due() == {}


async def test_only_what_lies_in_the_object_tier_is_to_be_deleted(redis_client: redis.Redis) -> None:
    """Others would be looked at again when their time comes, for nothing."""
    index, keys = PrefixIndex(redis_client), chain(2)
    await index.register("a", records(keys, 0, 2), 0)
    assert len((await index.evict(list(reversed(records(keys, 0, 2))), 0, 50)).removed) == 2
    assert not [name async for name in redis_client.scan_iter(match="*due*")]


async def test_no_key_holds_more_than_a_page(redis_client: redis.Redis) -> None:
    """One root of many conversations, one long chain, and many branches behind one chunk: 24 bytes a chunk at most.

    Counted is what the index writes. What Redis' allocator makes of it differs from run to run.
    """
    index = PrefixIndex(redis_client)
    await index.register("storage-1", records(chain(1), 0, 1), 0)  # Redis keeps the scripts, too
    shapes = [(60, 1, 400, 1), (2000, 1000, 1001, 0), (8, 2000, 5000, 3)]
    for length, first, last, common in shapes:
        for branch in range(first, last):
            keys = chain(length, branch=branch, common=common)
            assert all(await index.register("storage-1", records(keys, 0, length), 0))
    longest = written = 0
    async for name in redis_client.scan_iter(match="quire:x:*"):
        if await redis_client.type(name) == b"string":
            longest = max(longest, int.from_bytes(cast(bytes, await redis_client.getrange(name, 0, 1)), "big"))
            written += len(name) + await redis_client.strlen(name)
        else:
            fields = await redis_client.hgetall(name)
            longest = max(longest, len(fields))
            written += len(name) + sum(len(field) + len(value) for field, value in fields.items())
    assert longest <= 256
    listed = (await index.listings())["storage-1"].count
    assert written / listed <= 24, f"{written / listed:.1f} bytes a chunk"


async def test_redis_that_is_not_there_is_a_typed_error() -> None:
    client = connect("unix:///nowhere/redis.sock", timeout_s=1)
    with pytest.raises(MetadataUnavailable, match="Redis"):
        await PrefixIndex(client).match(chain(3))
    await client.aclose()
