"""The secret that keys are derived with: the same for all gateways, through a change of the cluster's secret."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio as redis

from quire.model.errors import ConfigInvalid
from quire_server.redis import key_secret

OLD, NEW = b"o" * 32, b"n" * 32


async def test_all_gateways_have_the_same(any_redis: redis.Redis) -> None:
    assert len({*await asyncio.gather(*(key_secret(any_redis, OLD) for _ in range(8)))}) == 1


async def test_it_stays_when_the_clusters_secret_is_replaced(any_redis: redis.Redis) -> None:
    first = await key_secret(any_redis, OLD)
    for secrets in ((OLD, NEW), (NEW, OLD), (OLD, NEW), (NEW, OLD), (NEW,)):
        assert await key_secret(any_redis, *secrets) == first
    with pytest.raises(ConfigInvalid, match="QUIRE_CLUSTER_SECRET_ALSO"):
        await key_secret(any_redis, OLD)


async def test_a_redis_that_lost_everything_gets_the_same(any_redis: redis.Redis) -> None:
    first = await key_secret(any_redis, OLD)
    await any_redis.delete("quire:key-secret")
    assert await key_secret(any_redis, OLD) == first


async def test_it_does_not_lie_in_the_open(any_redis: redis.Redis) -> None:
    secret = await key_secret(any_redis, OLD)
    value = await any_redis.get("quire:key-secret")
    assert value and secret not in value and OLD not in value
