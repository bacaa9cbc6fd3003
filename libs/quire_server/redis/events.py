"""Cache events in a Redis stream, which keeps the latest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio as redis

from quire.model.events import CacheEvent, EventKind, EventPage
from quire.model.keys import ChunkKeys
from quire_server.redis.connection import metadata_errors

_KEY: Final = "quire:events"
_START: Final = "0-0"


class CacheEvents:
    """`kept`: how many events at least, of up to 256 chunks each."""

    def __init__(self, client: redis.Redis, kept: int) -> None:
        self._client = client
        self._kept = kept

    async def publish(self, events: Sequence[CacheEvent]) -> None:
        """In order."""
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for each in events:
                fields: dict[Any, Any] = {
                    "k": each.kind.value,
                    "h": each.holder,
                    "c": each.keys.packed,
                    "p": each.parents,
                    "t": each.at_ms,
                }
                pipeline.xadd(_KEY, fields, maxlen=self._kept, approximate=True)
            await pipeline.execute()

    async def read(self, cursor: str, limit: int) -> EventPage:
        """What came after the cursor; "" stands for now, and is answered with a cursor alone.

        Raises `ValueError` for what is no cursor.
        """
        async with metadata_errors():
            if not cursor:
                latest: Any = await self._client.xrevrange(_KEY, count=1)
                return EventPage((), latest[0][0].decode() if latest else _START)
            after = _number(cursor)
            first: Any = await self._client.xrange(_KEY, count=1)
            found: Any = await self._client.xrange(_KEY, min=f"({cursor}", count=limit)
        # The cursor's event is no longer in the stream; events behind it may be missing too.
        lost = cursor != _START and (not first or _number(first[0][0].decode()) > after)
        return EventPage(tuple(_event(fields) for _, fields in found), found[-1][0].decode() if found else cursor, lost)


def _number(cursor: str) -> tuple[int, int]:
    left, _, right = cursor.partition("-")
    return int(left), int(right)


def _event(fields: dict[bytes, bytes]) -> CacheEvent:
    return CacheEvent(
        kind=EventKind(int(fields[b"k"])),
        holder=fields[b"h"].decode(),
        keys=ChunkKeys(fields[b"c"]),
        parents=fields[b"p"],
        at_ms=int(fields[b"t"]),
    )
