"""The bytes that tenants retain: a hash for each limited tenant, which expires with its last retention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors

_KEY: Final = "quire:retained:"
RETENTIONS_MAX: Final = 16_384
"""Of a limited tenant."""

# KEYS: the tenant's retentions, by the last chunk's key: "until:bytes". ARGV: 1 the last chunk's key, 2 bytes, 3 until,
# 4 now, 5 limit, 6 most retentions, then the keys of chunks before it that are the last ones of other retentions.
# Returns the bytes that are retained with it, or that would be, negated.
_RESERVE: Final = """
local key, last, bytes, untl, now = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local inside, sum, count, latest = {}, bytes, 1, untl
for at = 7, #ARGV do inside[ARGV[at]] = true end
local all = redis.call('HGETALL', key)
for at = 1, #all, 2 do
    local other_until, other_bytes = string.match(all[at + 1], '(%d+):(%d+)')
    other_until = tonumber(other_until)
    if other_until <= now or (inside[all[at]] and other_until <= untl) then
        redis.call('HDEL', key, all[at])
    elseif all[at] ~= last then
        sum, count = sum + tonumber(other_bytes), count + 1
        latest = math.max(latest, other_until)
    end
end
if sum > tonumber(ARGV[5]) or count > tonumber(ARGV[6]) then return -sum end
redis.call('HSET', key, last, string.format('%d:%d', untl, bytes))
redis.call('PEXPIRE', key, latest - now)
return sum
"""


class RetainedBytes:
    """What limited tenants retain; see `Retention`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._reserve = client.register_script(_RESERVE)

    async def reserve(
        self, tenant: str, keys: Sequence[bytes], retained_bytes: int, until_ms: int, now_ms: int, limit: int
    ) -> int:
        """Count a retention of the prefix with these keys, in the place of shorter ones that end no later.

        Returns:
            The tenant's retained bytes, negated if they would exceed the limit: then nothing was counted.
        """
        name = _KEY + tenant
        async with metadata_errors():
            known = cast(list[bytes], await self._client.hkeys(name))
            inside = set(known).intersection(keys) - {keys[-1]}
            args: list[Any] = [keys[-1], retained_bytes, until_ms, now_ms, limit, RETENTIONS_MAX, *inside]
            return int(await self._reserve(keys=[name], args=args))

    async def end(self, tenant: str, keys: Sequence[bytes]) -> None:
        """Forget the retentions that end with one of these keys."""
        async with metadata_errors():
            name = _KEY + tenant
            ended = set(cast(list[bytes], await self._client.hkeys(name))).intersection(keys)
            if ended:
                await self._client.hdel(name, *ended)
