"""A lease that one of several processes holds: one string in Redis that expires."""

from __future__ import annotations

from typing import cast

import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors

# KEYS: lease, who took it last. ARGV: 1 name, 2 ttl ms. Takes or keeps the lease unless another has it; returns who
# has it, and who took it last before that.
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return {holder, holder} end
local last = redis.call('GET', KEYS[2]) or ''
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if last ~= ARGV[1] then redis.call('SET', KEYS[2], ARGV[1]) end
return {ARGV[1], last}
"""
# KEYS: lease. ARGV: 1 name.
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisLeaderLease:
    """`office`: what there is one of, e.g. "scheduler"."""

    def __init__(self, client: redis.Redis, office: str) -> None:
        self._key = f"quire:leader:{{{office}}}"
        self._hold = client.register_script(_HOLD)
        self._release = client.register_script(_RELEASE)

    async def hold(self, name: str, ttl_ms: int) -> tuple[str, str]:
        """Take or keep it for `ttl_ms` unless another has it; who has it now, and who took it last before."""
        async with metadata_errors():
            keys = [self._key, f"{self._key}:last"]
            holder, last = cast(list[bytes], await self._hold(keys=keys, args=[name, ttl_ms]))
            return holder.decode(), last.decode()

    async def release(self, name: str) -> None:
        """Give it up if it is held under that name."""
        async with metadata_errors():
            await self._release(keys=[self._key], args=[name])
