"""Cache events in a Redis stream, which keeps the latest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio as redis

from quire.model.errors import InvalidRequest
from quire.model.events import CacheEvent, EventKind, EventPage
from quire.model.keys import ChunkKeys
from quire.model.records import NO_NAMESPACE
from quire_server.redis.connection import metadata_errors

_KEY: Final = "quire:events"
_CURSOR: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_GAP: Final = 0
"""The kind of an entry that says that events are missing. It also begins a stream, so that its cursor is an entry's."""


class CacheEvents:
    """`kept`: how many events at least, of up to 256 chunks each."""

    def __init__(self, client: redis.Redis, kept: int = 0) -> None:
        self._client = client
        self._kept = kept

    async def publish(self, events: Sequence[CacheEvent], *, gap: bool = False) -> None:
        """Publish events in order. `gap`: events before these were not published."""
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            if gap:
                pipeline.xadd(_KEY, {"k": _GAP}, maxlen=self._kept, approximate=True)
            for event in events:
                fields: dict[Any, Any] = {
                    "k": event.kind.value,
                    "h": event.holder,
                    "c": event.keys.packed,
                    "p": event.parents,
                    "t": event.at_ms,
                    "n": event.namespace,
                }
                pipeline.xadd(_KEY, fields, maxlen=self._kept, approximate=True)
            await pipeline.execute()

    async def read(self, cursor: str, limit: int) -> EventPage:
        """Return the events after the cursor; "" stands for now, and returns a cursor alone.

        Raises `InvalidRequest` for an invalid cursor.
        """
        if not cursor:
            async with metadata_errors():
                latest: Any = await self._client.xrevrange(_KEY, count=1)
                return EventPage((), latest[0][0].decode() if latest else await self._begin())
        number = _number(cursor)
        async with metadata_errors():
            rows: Any = await self._client.xrange(_KEY, min=f"({cursor}", count=limit)
            first: Any = await self._client.xrange(
                _KEY, count=1
            )  # not before: what is trimmed meanwhile counts as lost
            if not first:  # Redis lost the stream
                return EventPage((), await self._begin(), lost=True)
        # The cursor's event is no longer in the stream; events behind it may be missing too.
        is_lost = _number(first[0][0].decode()) > number or any(int(fields[b"k"]) == _GAP for _, fields in rows)
        events = tuple(event for _, fields in rows if (event := _event(fields)) is not None)
        return EventPage(events, rows[-1][0].decode() if rows else cursor, is_lost)

    async def _begin(self) -> str:
        """Add an entry to an empty stream, and return its cursor."""
        cursor: Any = await self._client.xadd(_KEY, {"k": _GAP})
        return str(cursor.decode())


def _number(cursor: str) -> tuple[int, int]:
    match = _CURSOR.fullmatch(cursor)
    milliseconds, right = (int(part) for part in match.groups()) if match else (1 << 64, 0)
    if max(milliseconds, right) >= 1 << 64:
        raise InvalidRequest(f"{cursor!r} is no cursor", field="after")
    return milliseconds, right


def _event(fields: dict[bytes, bytes]) -> CacheEvent | None:
    """Parse an event; None for a gap, and for an event of a newer release."""
    kind = int(fields[b"k"])
    if kind not in {member.value for member in EventKind}:
        return None
    return CacheEvent(
        kind=EventKind(kind),
        holder=fields[b"h"].decode(),
        keys=ChunkKeys(fields[b"c"]),
        parents=fields[b"p"],
        at_ms=int(fields[b"t"]),
        namespace=fields.get(b"n", NO_NAMESPACE),
    )
