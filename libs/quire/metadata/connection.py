"""Connecting to Redis, and its errors in Quire's words."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import redis.asyncio as redis
from redis.exceptions import RedisError

from quire.errors import MetadataUnavailable


def connect(url: str, timeout_s: float = 5.0) -> redis.Redis:
    """A client for `redis://`, `rediss://` or `unix://`. Connects at the first command; each has a deadline."""
    return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, max_connections=64)


@contextlib.asynccontextmanager
async def metadata_errors() -> AsyncIterator[None]:
    """Turn what redis-py raises into `MetadataUnavailable`."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise MetadataUnavailable(f"Redis: {error or type(error).__name__}") from error
