"""Publishes which chunks were stored and removed. Requests do not wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, Protocol

from quire.model.errors import QuireError
from quire.model.events import NO_PARENT, CacheEvent, EventKind
from quire.model.index import NO_NAMESPACE, ChunkRecord
from quire.model.keys import ChunkKeys
from quire.telemetry import background, logger
from quire_orchestrator.ports import Clock
from quire_server import tasks

_CHUNKS: Final = 256
_WAITING_MAX: Final = 4096
_AT_ONCE: Final = 64
_CLOSE_S: Final = 2.0


class EventLog(Protocol):
    """Port to published events; see `quire_server.redis.CacheEvents`."""

    async def publish(self, events: Sequence[CacheEvent], *, gap: bool = False) -> None: ...


class Announcements:
    """Publishes events, which are hints.

    An event that the log does not take, or that comes too fast for it, is left out, and the next one reports the gap.

    `log`: None publishes nothing.
    """

    def __init__(self, log: EventLog | None, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._waiting: deque[CacheEvent] = deque()
        self._gap = False
        self._telling: asyncio.Task[None] | None = None

    def stored(self, holder: str, chunks: Sequence[ChunkRecord]) -> None:
        """`holder` has stored these chunks."""
        for part in _parts(chunks):
            parents = b"".join(chunk.parent or NO_PARENT for chunk in part)
            self._tell(EventKind.STORED, holder, part, parents)

    def removed(self, holder: str, chunks: Sequence[ChunkRecord]) -> None:
        """`holder` has these chunks no longer."""
        for part in _parts(chunks):
            self._tell(EventKind.REMOVED, holder, part)

    def cleared(self, holder: str) -> None:
        """Announce that `holder` has lost everything."""
        self._tell(EventKind.CLEARED, holder, ())

    async def close(self) -> None:
        """Publish the waiting events, as far as that is quick."""
        if self._telling is not None:
            await asyncio.wait([self._telling], timeout=_CLOSE_S)
            await tasks.end([self._telling])

    def _tell(self, kind: EventKind, holder: str, part: Sequence[ChunkRecord], parents: bytes = b"") -> None:
        if self._log is None:
            return
        if len(self._waiting) >= _WAITING_MAX:
            self._waiting.popleft()
            self._gap = True
        keys = ChunkKeys(b"".join(chunk.key for chunk in part))
        namespace, now_ms = part[0].namespace if part else NO_NAMESPACE, self._clock.now_ms()
        self._waiting.append(
            CacheEvent(kind=kind, holder=holder, keys=keys, parents=parents, at_ms=now_ms, namespace=namespace)
        )
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._publish(self._log), context=background())

    async def _publish(self, log: EventLog) -> None:
        while self._waiting:
            events = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            gap, self._gap = self._gap, False
            try:
                await log.publish(events, gap=gap)
            except QuireError as error:
                self._gap = True
                logger().warning("cache events were not published", events=len(events), error=str(error))


def _parts(chunks: Sequence[ChunkRecord]) -> Iterable[Sequence[ChunkRecord]]:
    """Split chunks into events of one namespace each."""
    for _, alike in groupby(chunks, key=lambda chunk: chunk.namespace):
        part = list(alike)
        yield from (part[at : at + _CHUNKS] for at in range(0, len(part), _CHUNKS))
