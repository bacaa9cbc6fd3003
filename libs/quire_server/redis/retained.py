"""The bytes that tenants retain: a hash for each limited tenant, which expires with its last retention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors

_KEY: Final = "quire:retained:"
RETENTIONS_MAX: Final = 16_384
"""Of a limited tenant."""

# KEYS: the tenant's retentions, by the last chunk's key (its tip): "until:bytes". ARGV: 1 the tip, 2 bytes, 3 until,
# 4 now, 5 limit, 6 most retentions, then tips within the prefix. Returns the bytes that are retained with it, or would
# be if that is above the limit, and the shorter retentions that it replaces: they are not counted here, and remain
# until they are unpinned.
_RESERVE: Final = """
local key, tip, bytes, untl, now = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local inside, inner, sum, count, latest = {}, {}, bytes, 1, untl
for at = 7, #ARGV do inside[ARGV[at]] = true end
local all = redis.call('HGETALL', key)
for at = 1, #all, 2 do
    local other, ends, size = all[at], string.match(all[at + 1], '(%d+):(%d+)')
    ends = tonumber(ends)
    if ends <= now then
        redis.call('HDEL', key, other)
    elseif other ~= tip then
        latest = math.max(latest, ends)
        if inside[other] and ends <= untl then
            inner[#inner + 1] = other
            inner[#inner + 1] = all[at + 1]
        else
            sum, count = sum + tonumber(size), count + 1
        end
    end
end
local limit = tonumber(ARGV[5])
if count > tonumber(ARGV[6]) then return {math.max(sum, limit + 1), {}} end
if sum > limit then return {sum, {}} end
redis.call('HSET', key, tip, string.format('%d:%d', untl, bytes))
redis.call('PEXPIRE', key, latest - now)
return {sum, inner}
"""


# KEYS: the tenant's retentions. ARGV: pairs of a tip and its known value.
_FORGET: Final = """
for at = 1, #ARGV, 2 do
    if redis.call('HGET', KEYS[1], ARGV[at]) == ARGV[at + 1] then redis.call('HDEL', KEYS[1], ARGV[at]) end
end
"""


class RetainedBytes:
    """The retentions of tenants with limits; see `quire_gateway.kv.retention`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._reserve = client.register_script(_RESERVE)
        self._forget = client.register_script(_FORGET)

    async def reserve(
        self, tenant: str, keys: Sequence[bytes], retained_bytes: int, until_ms: int, now_ms: int, limit: int
    ) -> tuple[int, dict[bytes, bytes]]:
        """Count the retention of a prefix, unless the tenant would exceed the limit.

        Args:
            tenant: Name of the tenant.
            keys: Of the prefix.
            retained_bytes: Size of the prefix.
            until_ms: End of the retention.
            now_ms: The cluster's time.
            limit: Bytes that the tenant may retain.

        Returns:
            The tenant's retained bytes, above the limit if nothing was counted; and the shorter retentions that end no
            later, by their last key.
        """
        inside = [tip for tip in await self.known(tenant, keys) if tip != keys[-1]]
        args: list[Any] = [keys[-1], retained_bytes, until_ms, now_ms, limit, RETENTIONS_MAX, *inside]
        async with metadata_errors():
            retained, inner = await self._reserve(keys=[_KEY + tenant], args=args)
        return int(retained), dict(zip(inner[::2], inner[1::2], strict=True))

    async def known(self, tenant: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the counted retentions whose last key is among the keys."""
        async with metadata_errors():
            counted = cast(dict[bytes, bytes], await self._client.hgetall(_KEY + tenant))
        return {tip: counted[tip] for tip in set(counted).intersection(keys)}

    async def forget(self, tenant: str, retentions: Mapping[bytes, bytes]) -> None:
        """Count retentions no longer, unless they have changed since they were read."""
        if retentions:
            args = [part for retention in retentions.items() for part in retention]
            async with metadata_errors():
                await self._forget(keys=[_KEY + tenant], args=args)
