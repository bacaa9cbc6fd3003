"""The bytes that tenants retain: a hash for each limited tenant, which expires with its last retention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors
from quire_server.redis.scripts import script

_KEY: Final = "quire:retained:"
RETENTIONS_MAX: Final = 16_384
"""Of a limited tenant."""


class RetainedBytes:
    """The retentions of tenants with limits; see `quire_gateway.kv.retention`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._reserve = client.register_script(script("retained_reserve"))
        self._forget = client.register_script(script("retained_forget"))

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
