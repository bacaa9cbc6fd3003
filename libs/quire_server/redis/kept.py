"""A value that expires."""

from __future__ import annotations

from typing import cast

import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors


class Kept:
    """One, by its name."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._key = f"quire:kept:{name}"

    async def put(self, value: bytes, ttl_s: int) -> None:
        """In place of what is kept."""
        async with metadata_errors():
            await self._client.set(self._key, value, ex=ttl_s)

    async def get(self) -> bytes:
        """What is kept; empty for nothing."""
        async with metadata_errors():
            return cast(bytes | None, await self._client.get(self._key)) or b""
