"""Publishes which chunks were stored and removed. Requests do not wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from quire.model.errors import QuireError
from quire.model.events import CacheEvent, EventKind
from quire.model.keys import ChunkKeys
from quire.model.policy import NAMESPACE_TAG_BYTES
from quire.model.records import NO_NAMESPACE, ChunkRecord, ChunkRecords
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
        for part in _parts(ChunkRecords.of(chunks)):
            self._tell(EventKind.STORED, holder, part, part.parents)

    def removed(self, holder: str, chunks: Sequence[ChunkRecord]) -> None:
        """`holder` has these chunks no longer."""
        for part in _parts(ChunkRecords.of(chunks)):
            self._tell(EventKind.REMOVED, holder, part)

    def cleared(self, holder: str) -> None:
        """Announce that `holder` has lost everything."""
        self._tell(EventKind.CLEARED, holder, ChunkRecords.of(()))

    async def close(self) -> None:
        """Publish the waiting events, as far as that is quick."""
        if self._telling is not None:
            await asyncio.wait([self._telling], timeout=_CLOSE_S)
            await tasks.end([self._telling])

    def _tell(self, kind: EventKind, holder: str, part: ChunkRecords, parents: bytes = b"") -> None:
        if self._log is None:
            return
        if len(self._waiting) >= _WAITING_MAX:
            self._waiting.popleft()
            self._gap = True
        keys, now_ms = ChunkKeys(part.keys), self._clock.now_ms()
        namespace = part.namespaces[:NAMESPACE_TAG_BYTES] or NO_NAMESPACE
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


def _parts(chunks: ChunkRecords) -> Iterable[ChunkRecords]:
    """Split chunks into events of one namespace each."""
    for first, stop in chunks.runs(chunks.namespaces):
        yield from (chunks[at : min(stop, at + _CHUNKS)] for at in range(first, stop, _CHUNKS))
