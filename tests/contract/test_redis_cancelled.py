"""Commands of Redis whose task is cancelled, at any moment."""

from __future__ import annotations

import asyncio
import sys

import pytest
import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors

_TRIES, _TURNS = 40, 12


async def _lost_cancellations(client: redis.Redis, *, guarded: bool) -> int:
    """Cancel commands in each turn of the loop that one takes; return how many went on in spite of it."""

    async def command() -> None:
        pipeline = client.pipeline(transaction=False)
        pipeline.hmget("one", ["a", "b"])
        pipeline.hmget("other", ["a", "b"])
        if not guarded:
            await pipeline.execute()
            return
        async with metadata_errors():
            await pipeline.execute()

    count = 0
    for turns in [*range(1, _TURNS)] * _TRIES:
        task = asyncio.create_task(command())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.cancel():
            await asyncio.wait([task])
            count += not task.cancelled()
    return count


async def test_no_cancellation_is_lost(redis_client: redis.Redis) -> None:
    """A load that was given up went on at the gateway, and its memory stayed lent until its deadline."""
    assert await _lost_cancellations(redis_client, guarded=True) == 0


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio.wait_for loses none")
async def test_redis_py_alone_loses_some(redis_client: redis.Redis) -> None:
    """The fault put back."""
    assert await _lost_cancellations(redis_client, guarded=False) > 0
