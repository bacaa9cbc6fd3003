"""A lease that one of several processes holds: one string in Redis that expires."""

from __future__ import annotations

from typing import cast

import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors
from quire_server.redis.scripts import script


class RedisLeaderLease:
    """`office`: what there is one of, e.g. "scheduler"."""

    def __init__(self, client: redis.Redis, office: str) -> None:
        self._key = f"quire:leader:{{{office}}}"
        self._hold = client.register_script(script("leader_hold"))
        self._release = client.register_script(script("leader_release"))

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
