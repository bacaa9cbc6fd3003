"""The bytes that tenants retain: a hash for each limited tenant, which expires with its last retention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import redis.asyncio as redis

from quire.model.keys import KEY_BYTES
from quire_server.redis.connection import metadata_errors
from quire_server.redis.scripts import script

_KEY: Final = "quire:retained:"
RETENTIONS_MAX: Final = 16_384
"""Of a tenant that is counted."""
HOLDERS_MAX: Final = 1_024
"""Of a prefix: each is a pin on its last chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedPrefix:
    """A prefix that a holder retains.

    Attributes:
        tenant: Name of the tenant.
        holder: Name of the holder; empty for the tenant itself.
        keys: Of the prefix.
        size: Bytes of the prefix.
        until_ms: End of the retention.
    """

    tenant: str
    holder: bytes
    keys: Sequence[bytes]
    size: int
    until_ms: int


class RetainedBytes:
    """The retentions of tenants with limits; see `quire_gateway.kv.retention`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._reserve = client.register_script(script("retained_reserve"))
        self._forget = client.register_script(script("retained_forget"))

    async def reserve(self, prefix: RetainedPrefix, now_ms: int, limit: int) -> tuple[int, dict[bytes, bytes]]:
        """Count the retention of a prefix, unless the tenant would exceed the limit.

        A prefix counts once, however many holders retain it. A retention that the holder has is not shortened.

        Args:
            prefix: The prefix and its holder.
            now_ms: The cluster's time.
            limit: Bytes that the tenant may retain.

        Returns:
            The tenant's retained bytes, above the limit if nothing was counted, -1 if that is so because there are too
            many retentions; and the holder's shorter retentions that end no later, by their last key.
        """
        tip, holder = prefix.keys[-1], prefix.holder
        inside = [key + holder for key in await self.known(prefix.tenant, prefix.keys, holder) if key != tip]
        args: list[Any] = [tip + holder, prefix.size, prefix.until_ms, now_ms, limit, RETENTIONS_MAX, HOLDERS_MAX]
        async with metadata_errors():
            retained, inner = await self._reserve(keys=[_KEY + prefix.tenant], args=[*args, *inside])
        tips = [name[:KEY_BYTES] for name in inner[::2]]
        return int(retained), dict(zip(tips, inner[1::2], strict=True))

    async def known(self, tenant: str, keys: Sequence[bytes], holder: bytes = b"") -> dict[bytes, bytes]:
        """Return the holder's counted retentions whose last key is among the keys."""
        async with metadata_errors():
            counted = cast(dict[bytes, bytes], await self._client.hgetall(_KEY + tenant))
        return {key: counted[key + holder] for key in keys if key + holder in counted}

    async def forget(self, tenant: str, retentions: Mapping[bytes, bytes], holder: bytes = b"") -> None:
        """Count the holder's retentions no longer, unless they have changed since they were read."""
        if retentions:
            args = [part for tip, about in retentions.items() for part in (tip + holder, about)]
            async with metadata_errors():
                await self._forget(keys=[_KEY + tenant], args=args)
