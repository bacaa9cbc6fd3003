"""Connecting to Redis, and its errors in Quire's words."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import redis.asyncio as redis
from redis.exceptions import RedisError

from quire.model.errors import MetadataUnavailable


def connect(url: str, timeout_s: float = 5.0) -> redis.Redis:
    """A client for `redis://`, `rediss://` or `unix://`. Connects at the first command; each has a deadline.

    At most 64 connections: a burst of commands waits for one, as long as a command may take, and is not refused.
    """
    pool = redis.BlockingConnectionPool.from_url(
        url, max_connections=64, timeout=timeout_s, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
    )
    return redis.Redis.from_pool(pool)


@contextlib.asynccontextmanager
async def metadata_errors() -> AsyncIterator[None]:
    """Turn what redis-py raises into `MetadataUnavailable`."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise MetadataUnavailable(f"Redis: {error or type(error).__name__}") from error
