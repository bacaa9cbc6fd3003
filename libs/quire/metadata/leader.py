"""A lease that one of several processes holds: one string in Redis that expires."""

from __future__ import annotations

from typing import cast

import redis.asyncio as redis

from quire.metadata.connection import metadata_errors

# KEYS: lease. ARGV: 1 name, 2 ttl ms. Takes or keeps the lease unless another has it; returns who has it.
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""
# KEYS: lease. ARGV: 1 name.
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisLeaderLease:
    """`office`: what there is one of, e.g. "scheduler"."""

    def __init__(self, client: redis.Redis, office: str) -> None:
        self._key = f"quire:leader:{office}"
        self._hold = client.register_script(_HOLD)
        self._release = client.register_script(_RELEASE)

    async def hold(self, name: str, ttl_ms: int) -> str:
        """Take or keep it for `ttl_ms` unless somebody else has it; who has it now."""
        async with metadata_errors():
            return cast(bytes, await self._hold(keys=[self._key], args=[name, ttl_ms])).decode()

    async def release(self, name: str) -> None:
        """Give it up if it is held under that name."""
        async with metadata_errors():
            await self._release(keys=[self._key], args=[name])
