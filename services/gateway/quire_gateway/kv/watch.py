"""Following cache events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final, Protocol

from quire.model.errors import TooManyRequests
from quire.model.events import EventPage

_LOOK_S: Final = 0.1
_QUIET_S: Final = 5.0
"""After that a page without events says that the connection lives."""
_PAGE: Final = 64
_WATCHERS_MAX: Final = 64


class EventSource(Protocol):
    """Port to the stored events; see `quire_server.redis.CacheEvents`."""

    async def read(self, cursor: str, limit: int) -> EventPage: ...


class EventWatch:
    """Every iterator is one watcher's."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._ended = asyncio.Event()
        self._watchers = 0

    def end(self) -> None:
        """End the iterators of all watchers: the gateway stops."""
        self._ended.set()

    async def follow(self, cursor: str) -> AsyncIterator[EventPage]:
        """Yield pages as they arrive, until `end`; the first at once, with the cursor to begin with.

        Raises `InvalidRequest` for an invalid cursor, `TooManyRequests`.
        """
        if self._watchers >= _WATCHERS_MAX:
            raise TooManyRequests(f"{self._watchers} watchers at this gateway; try another one")
        self._watchers += 1
        try:
            said_s = 0.0
            while not self._ended.is_set():
                page = await self._source.read(cursor, _PAGE)
                now_s = asyncio.get_running_loop().time()
                if page.events or page.lost or now_s - said_s > _QUIET_S:
                    said_s = now_s
                    yield page
                cursor = page.cursor
                if len(page.events) < _PAGE:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._ended.wait(), _LOOK_S)
        finally:
            self._watchers -= 1
