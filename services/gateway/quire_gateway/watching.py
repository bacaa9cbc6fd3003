"""Following cache events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, Protocol

from quire.model.errors import InvalidRequest
from quire.model.events import EventPage
from quire_server.clock import Clock

_LOOK_S: Final = 0.1
_PAGE: Final = 256


class EventSource(Protocol):
    """Where they are kept; see `quire_server.redis.CacheEvents`."""

    async def read(self, cursor: str, limit: int) -> EventPage: ...


class Watching:
    """Every iterator is one watcher's."""

    def __init__(self, source: EventSource, clock: Clock) -> None:
        self._source = source
        self._clock = clock

    async def follow(self, cursor: str) -> AsyncIterator[EventPage]:
        """Pages as they come, for ever; the first at once, with the cursor to begin with. Raises `InvalidRequest`."""
        first = True
        while True:
            try:
                page = await self._source.read(cursor, _PAGE)
            except ValueError:
                raise InvalidRequest(f"{cursor!r} is no cursor", field="after") from None
            if first or page.events or page.lost:
                yield page
            first, cursor = False, page.cursor
            if len(page.events) < _PAGE:
                await self._clock.sleep(_LOOK_S)
