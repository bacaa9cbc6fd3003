"""Saying what came and went: behind the requests, in order, and never at their cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.model.errors import MetadataUnavailable
from quire.model.events import CacheEvent, EventKind
from quire.model.keys import ChunkKeys
from quire.model.records import records
from quire.testing.clock import FakeClock
from quire_orchestrator.announcements import Announcements

KEYS = ChunkKeys(b"".join(number.to_bytes(32, "big") for number in range(1, 301)))


class _Log:
    """`away`: it takes nothing."""

    def __init__(self) -> None:
        self.heard: list[CacheEvent] = []
        self.away = False
        self.gaps: list[int] = []

    async def publish(self, events: Sequence[CacheEvent], *, gap: bool = False) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise MetadataUnavailable("Redis is away")
        if gap:
            self.gaps.append(len(self.heard))
        self.heard += events


async def test_what_is_said_comes_in_order_and_in_parts() -> None:
    log = _Log()
    announcements = Announcements(log, FakeClock())
    announcements.stored("a", records(KEYS, 0, 300))
    announcements.removed("a", records(KEYS, 299, 1))
    assert not log.heard, "published behind the request"
    await announcements.close()
    assert [(each.kind, len(each.keys)) for each in log.heard] == [
        (EventKind.STORED, 256),
        (EventKind.STORED, 44),
        (EventKind.REMOVED, 1),
    ]
    assert log.heard[0].parents[:64] == bytes(32) + KEYS.at(0) and log.heard[1].parents[:32] == KEYS.at(255)


async def test_what_the_log_does_not_take_is_left_out() -> None:
    log = _Log()
    announcements = Announcements(log, FakeClock())
    log.away = True
    announcements.stored("a", records(KEYS, 0, 2))
    await announcements.close()
    log.away = False
    announcements.stored("a", records(KEYS, 2, 1))
    await announcements.close()
    assert [each.keys.packed for each in log.heard] == [KEYS.at(2)]
    assert log.gaps == [0], "and the next one says that something is missing"


async def test_too_much_at_once_loses_the_oldest() -> None:
    log = _Log()
    announcements = Announcements(log, FakeClock())
    for number in range(5000):
        announcements.removed(str(number), records(KEYS, 0, 1))
    await announcements.close()
    assert len(log.heard) == 4096 and log.heard[-1].holder == "4999"
    assert log.gaps == [0]
    Announcements(None, FakeClock()).stored("a", records(KEYS, 0, 1))  # publishes nothing
