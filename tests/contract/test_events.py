"""Cache events in a real Redis: in order, from a cursor on, and no loss goes unsaid."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio as redis

from quire.model.errors import InvalidRequest, TooManyRequests
from quire.model.events import CacheEvent, EventKind
from quire.model.keys import ChunkKeys
from quire_gateway.kv import watch as module
from quire_gateway.kv.watch import EventWatch
from quire_server.redis import CacheEvents


def _event(number: int) -> CacheEvent:
    key = number.to_bytes(32, "big")
    return CacheEvent(kind=EventKind.STORED, holder="a", keys=ChunkKeys(key), parents=bytes(32), at_ms=number)


async def test_events_come_in_order_behind_a_cursor(any_redis: redis.Redis) -> None:
    events = CacheEvents(any_redis, 1000)
    begun = (await events.read("", 10)).cursor
    await events.publish([_event(number) for number in range(5)])
    page = await events.read(begun, 3)
    assert [each.at_ms for each in page.events] == [0, 1, 2] and not page.lost
    page = await events.read(page.cursor, 3)
    assert [each.at_ms for each in page.events] == [3, 4] and not page.lost
    again = await events.read(page.cursor, 3)
    assert (again.events, again.cursor, again.lost) == ((), page.cursor, False)


async def test_a_watcher_from_the_beginning_hears_of_what_was_trimmed(any_redis: redis.Redis) -> None:
    """Its cursor was that of an empty stream, which nothing could be behind."""
    events = CacheEvents(any_redis, 10)
    begun = (await events.read("", 10)).cursor
    await events.publish([_event(number) for number in range(1000)])
    page = await events.read(begun, 2000)
    assert page.lost and 10 <= len(page.events) < 1000 and page.events[-1].at_ms == 999


async def test_a_stream_that_redis_lost_is_said_once(any_redis: redis.Redis) -> None:
    events = CacheEvents(any_redis, 10)
    await events.publish([_event(1)])
    begun = (await events.read("", 10)).cursor
    await any_redis.flushall()
    page = await events.read(begun, 10)
    assert page.lost
    assert not (await events.read(page.cursor, 10)).lost
    await events.publish([_event(2)])
    page = await events.read(page.cursor, 10)
    assert [each.at_ms for each in page.events] == [2] and not page.lost


async def test_a_gap_and_what_is_not_known_are_no_events(any_redis: redis.Redis) -> None:
    events = CacheEvents(any_redis, 10)
    begun = (await events.read("", 10)).cursor
    await any_redis.xadd("quire:events", {"k": 99, "h": "from a later release"})
    page = await events.read(begun, 10)
    assert not page.events and not page.lost
    await events.publish([_event(1)], gap=True)
    page = await events.read(page.cursor, 10)
    assert page.lost and [each.at_ms for each in page.events] == [1]


@pytest.mark.parametrize("cursor", ["soon", "1", "1-", "1_0-0", "-1-0", f"{1 << 64}-0", "١-0"])
async def test_what_is_no_cursor(any_redis: redis.Redis, cursor: str) -> None:
    with pytest.raises(InvalidRequest, match="cursor"):
        await CacheEvents(any_redis, 10).read(cursor, 10)


async def test_watchers_end_with_the_gateway_and_are_bounded(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WATCHERS_MAX", 1)
    monkeypatch.setattr(module, "_QUIET_S", 0.05)
    watching = EventWatch(CacheEvents(any_redis, 10))
    watcher: Any = watching.follow("")
    begun = await anext(watcher)
    again = await anext(watcher)
    assert (again.events, again.cursor) == ((), begun.cursor), "it says that it is there"
    with pytest.raises(TooManyRequests):
        await anext(watching.follow(""))
    coming = asyncio.create_task(anext(watcher, None))
    watching.end()
    async with asyncio.timeout(5):
        assert await coming is None
    await anext(EventWatch(CacheEvents(any_redis, 10)).follow(""))
