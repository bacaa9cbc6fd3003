"""A value that expires."""

from __future__ import annotations

from typing import cast

import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors


class StoredValue:
    """A value, by its name."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._key = f"quire:kept:{name}"

    async def put(self, value: bytes, ttl_s: int) -> None:
        """Replace the value."""
        async with metadata_errors():
            await self._client.set(self._key, value, ex=ttl_s)

    async def get(self) -> bytes:
        """Return the value; empty for none."""
        async with metadata_errors():
            return cast(bytes | None, await self._client.get(self._key)) or b""
