"""What the prefix index of releases before 0.2 left in Redis."""

from __future__ import annotations

from typing import Final

import redis.asyncio as redis

_TTL_S: Final = 24 * 3600


async def let_old_format_expire(client: redis.Redis) -> None:
    """Within a day: storage nodes register anew, as the epoch is another. Services of such a release may still read it
    while they are replaced.
    """
    if not await client.expire("quire:epoch", _TTL_S):
        return
    for name in ("quire:listings", "quire:objects-due", "quire:nodes", "quire:nodes-until"):
        await client.expire(name, _TTL_S)
    for pattern in ("quire:index:*", "quire:pins:*", "quire:objects:*"):
        async for key in client.scan_iter(match=pattern, count=1000):
            await client.expire(key, _TTL_S)
