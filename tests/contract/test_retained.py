"""A tenant retains no more bytes than it may store. With a real Redis."""

from __future__ import annotations

import os

import pytest
import redis.asyncio as redis

from quire.model.errors import InvalidRequest, QuotaExceeded
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.policy import TenantPolicy
from quire.model.records import records
from quire.testing.clock import FakeClock
from quire_gateway.kv.retention import Retention
from quire_server.redis import PrefixIndex, RetainedBytes
from quire_server.redis.retained import RETENTIONS_MAX, RetainedPrefix

LAYOUT = KvLayout(1, 16, 1, 64, Dtype.BF16)
SPACE = Namespace("m", "1", LAYOUT, b"salt")
LIMIT = 10 * LAYOUT.chunk_bytes


def _keys(count: int) -> ChunkKeys:
    return ChunkKeys(os.urandom(32 * count))


async def _world(client: redis.Redis, limit: int = LIMIT) -> tuple[PrefixIndex, Retention, FakeClock]:
    index, clock = PrefixIndex(client), FakeClock()
    retained = RetainedBytes(client)
    policy = TenantPolicy(stored_bytes_max=limit)
    return index, Retention(index, clock, 1000, policy=lambda _: policy, retained=retained), clock


async def _stored(index: PrefixIndex, count: int) -> ChunkKeys:
    keys = _keys(count)
    await index.register("a", records(keys, 0, count), 0)
    return keys


async def test_no_more_than_the_limit(any_redis: redis.Redis) -> None:
    index, retention, clock = await _world(any_redis)
    first, second = await _stored(index, 6), await _stored(index, 6)
    assert (await retention.retain(SPACE, first, 60_000))[0] == 6
    assert (await retention.retain(SPACE, first, 90_000))[0] == 6, "the same again, for longer"
    with pytest.raises(QuotaExceeded):
        await retention.retain(SPACE, second, 60_000)
    assert (await retention.retain(SPACE, second.run(0, 4), 60_000))[0] == 4
    await clock.advance(95)
    assert (await retention.retain(SPACE, second, 60_000))[0] == 6, "the first one is over"
    await retention.end(SPACE, second)
    assert (await retention.retain(SPACE, first, 60_000))[0] == 6


async def test_a_longer_prefix_takes_the_place_of_its_beginning(any_redis: redis.Redis) -> None:
    """A conversation that is retained turn by turn counts once."""
    index, retention, _ = await _world(any_redis)
    keys = await _stored(index, 10)
    for chunks in range(1, 11):
        assert (await retention.retain(SPACE, keys.run(0, chunks), 60_000 + chunks))[0] == chunks
    with pytest.raises(QuotaExceeded):
        await retention.retain(SPACE, await _stored(index, 1), 60_000)


async def test_a_beginning_that_is_retained_for_longer_counts_too(any_redis: redis.Redis) -> None:
    index, retention, _ = await _world(any_redis)
    keys = await _stored(index, 8)
    await retention.retain(SPACE, keys.run(0, 4), 90_000)
    with pytest.raises(QuotaExceeded):
        await retention.retain(SPACE, keys, 60_000)


async def test_tenants_without_limits_are_not_counted(any_redis: redis.Redis) -> None:
    index, retention, _ = await _world(any_redis, limit=0)
    keys = await _stored(index, 6)
    for _ in range(3):
        await retention.retain(SPACE, keys, 60_000)
    assert not [name async for name in any_redis.scan_iter("quire:retained:*")]


async def test_ending_what_is_not_pinned_there_forgets_nothing(any_redis: redis.Redis) -> None:
    """The last key alone says nothing of the bucket in which its pin is."""
    index, retention, _ = await _world(any_redis)
    keys, second = await _stored(index, 10), await _stored(index, 10)
    await retention.retain(SPACE, keys, 60_000)
    assert await retention.end(SPACE, keys.run(9, 1)) == 0
    with pytest.raises(QuotaExceeded):
        await retention.retain(SPACE, second, 60_000)
    assert await retention.end(SPACE, keys) == 1
    assert (await retention.retain(SPACE, second, 60_000))[0] == 10


async def test_a_refusal_leaves_the_count(any_redis: redis.Redis) -> None:
    index, retention, _ = await _world(any_redis)
    keys = await _stored(index, 11)
    await retention.retain(SPACE, keys.run(0, 6), 60_000)
    with pytest.raises(QuotaExceeded):
        await retention.retain(SPACE, keys, 60_000)
    with pytest.raises(QuotaExceeded):
        await retention.retain(SPACE, await _stored(index, 5), 60_000)


async def test_a_beginning_is_not_pinned_behind_the_count(any_redis: redis.Redis) -> None:
    """A longer prefix replaces it, pin included: ending the longer one then ends both."""
    index, retention, clock = await _world(any_redis)
    keys, other = await _stored(index, 10), await _stored(index, 10)
    await retention.retain(SPACE, keys.run(0, 9), 60_000)
    await retention.retain(SPACE, keys, 60_000)
    assert await index.pins(keys.at(0)) == 1
    assert await retention.end(SPACE, keys) == 1
    assert (await retention.retain(SPACE, other, 60_000))[0] == 10
    evicted = await index.evict(list(reversed(records(keys, 0, 10))), clock.now_ms(), 0)
    assert len(evicted.removed) == 10, "nothing pins it"


async def _is_kept(index: PrefixIndex, keys: ChunkKeys, clock: FakeClock) -> bool:
    """Try to evict the last chunk."""
    (last,) = records(keys, len(keys) - 1, 1)
    return not (await index.evict([last], clock.now_ms(), 0)).removed


async def test_a_shorter_retention_does_not_shorten_one(any_redis: redis.Redis) -> None:
    """Not even of the same holder, with and without a limit."""
    for limit in (LIMIT, 0):
        index, retention, clock = await _world(any_redis, limit)
        keys, other = await _stored(index, 6), await _stored(index, 6)
        await retention.retain(SPACE, keys, 60_000)
        await retention.retain(SPACE, keys, 1)
        await clock.advance(50)
        assert await _is_kept(index, keys, clock)
        if limit:
            with pytest.raises(QuotaExceeded):
                await retention.retain(SPACE, other, 60_000)
        await clock.advance(11)
        assert not await _is_kept(index, keys, clock)


async def test_holders_neither_shorten_nor_end_each_others(any_redis: redis.Redis) -> None:
    for limit in (LIMIT, 0):
        index, retention, clock = await _world(any_redis, limit)
        keys = await _stored(index, 6)
        await retention.retain(SPACE, keys, 60_000, "one")
        await retention.retain(SPACE, keys, 1_000, "two")
        assert await retention.end(SPACE, keys) == 0, "nor the tenant itself"
        assert await retention.end(SPACE, keys, "two") == 1
        assert await _is_kept(index, keys, clock)
        await retention.retain(SPACE, keys, 5_000, "two")
        assert await retention.end(SPACE, keys, "one") == 1
        assert await _is_kept(index, keys, clock)
        await clock.advance(6)
        assert not await _is_kept(index, keys, clock)


async def test_a_prefix_of_several_holders_counts_once(any_redis: redis.Redis) -> None:
    index, retention, _ = await _world(any_redis)
    keys, other = await _stored(index, 6), await _stored(index, 6)
    for holder in ("", "one", "two"):
        assert (await retention.retain(SPACE, keys, 60_000, holder))[0] == 6
    for holder in ("two", ""):
        assert await retention.end(SPACE, keys, holder) == 1
        with pytest.raises(QuotaExceeded):
            await retention.retain(SPACE, other, 60_000)
    assert await retention.end(SPACE, keys, "one") == 1
    assert (await retention.retain(SPACE, other, 60_000))[0] == 6


async def test_a_conversation_replaces_its_own_turns_alone(any_redis: redis.Redis) -> None:
    index, retention, _ = await _world(any_redis)
    keys = await _stored(index, 6)
    await retention.retain(SPACE, keys.run(0, 4), 60_000, "one")
    await retention.retain(SPACE, keys, 60_000, "two")
    assert await retention.end(SPACE, keys.run(0, 4), "one") == 1
    await retention.retain(SPACE, keys.run(0, 4), 60_000, "two")
    with pytest.raises(QuotaExceeded):
        await retention.retain(SPACE, await _stored(index, 1), 60_000, "three")


async def test_holders_of_a_prefix_are_bounded(any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holder is a pin on one chunk, for tenants with and without a limit, and for no tenant."""
    monkeypatch.setattr("quire_server.redis.retained.HOLDERS_MAX", 3)
    for space, limit in ((SPACE, LIMIT), (SPACE, 0), (Namespace("m", "1", LAYOUT), 0)):
        index, retention, clock = await _world(any_redis, limit)
        keys, other = await _stored(index, 2), await _stored(index, 2)
        for number in range(3):
            assert (await retention.retain(space, keys, 60_000, str(number)))[0] == 2
        with pytest.raises(QuotaExceeded):
            await retention.retain(space, keys, 60_000, "one more")
        assert (await retention.retain(space, keys, 90_000, "2"))[0] == 2, "those that hold it may go on"
        assert (await retention.retain(space, other, 60_000, "one more"))[0] == 2
        assert await index.pins(keys.at(0)) == 3
        await clock.advance(61)
        assert (await retention.retain(space, keys, 60_000, "one more"))[0] == 2
        for prefix in (keys, other):
            for holder in ("0", "1", "2", "one more"):
                await retention.end(space, prefix, holder)


async def test_a_holders_name_is_bounded(any_redis: redis.Redis) -> None:
    index, retention, _ = await _world(any_redis)
    keys = await _stored(index, 1)
    assert (await retention.retain(SPACE, keys, 60_000, "ä" * 128))[0] == 1
    with pytest.raises(InvalidRequest, match="holder"):
        await retention.retain(SPACE, keys, 60_000, "ä" * 129)
    with pytest.raises(InvalidRequest, match="holder"):
        await retention.end(SPACE, keys, "ä" * 129)


async def test_what_is_stored_later_is_not_retained_uncounted(any_redis: redis.Redis) -> None:
    index, retention, _ = await _world(any_redis)
    keys = _keys(10)
    assert (await retention.retain(SPACE, keys, 60_000))[0] == 0
    await index.register("a", records(keys, 0, 10), 0)
    assert await index.pins(keys.at(0)) == 0


def _prefix(key: bytes, until_ms: int) -> RetainedPrefix:
    """A prefix of one byte."""
    return RetainedPrefix(tenant="t", holder=b"", keys=[key], size=1, until_ms=until_ms)


async def test_retentions_are_bounded(any_redis: redis.Redis) -> None:
    """And nothing is left once the last one is over."""
    retained = RetainedBytes(any_redis)
    seconds, micros = await any_redis.time()
    now_ms = seconds * 1000 + micros // 1000
    for number in range(3):
        counted, _ = await retained.reserve(_prefix(bytes([number]) * 32, now_ms + 60_000), now_ms, 1 << 40)
        assert counted == number + 1
    assert RETENTIONS_MAX > 3
    assert (await retained.reserve(_prefix(b"x" * 32, now_ms + 1), now_ms + 120_000, 1 << 40))[0] == 1
    assert await any_redis.hlen("quire:retained:t") in (0, 1)
