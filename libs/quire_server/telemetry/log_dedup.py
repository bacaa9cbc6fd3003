"""Failures that repeat are logged once, then by their count, and once more when they have ended."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

_LEVELS: Final = ("warning", "error", "critical")
_AGAIN_S: Final = 60.0
_ENDED_S: Final = 10.0
_KEPT_MAX: Final = 1000
_NUMBERS: Final = re.compile(r"\d+")
_SAYS: Final = (
    "event",
    "level",
    "error",
    "why",
    "node",
    "method",
    "path",
    "folder",
    "drive",
    "link",
    "logger",
    "exception",
)
"""What makes two lines the same, numbers aside; other fields may differ."""

Event = MutableMapping[str, Any]
Same = tuple[str, ...]


@dataclass(slots=True)
class _Seen:
    """`left_out`: lines since one was written. `last`: the last of them."""

    written_s: float
    last_s: float
    last: dict[str, Any] = field(default_factory=dict)
    left_out: int = 0


class LogDedup:
    """A processor of structlog, and what writes of those that have ended: `look`, every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Same, _Seen] = {}

    def __call__(self, _: Any, __: str, event: Event) -> Event:
        """Drop, by `structlog.DropEvent`, a line like one that was written less than a minute ago."""
        if event.get("level") not in _LEVELS or "repeated" in event:
            return event
        now_s, same = self._clock(), _same(event)
        record = self._seen.get(same)
        if record is None:
            if len(self._seen) < _KEPT_MAX:
                self._seen[same] = _Seen(now_s, now_s)
            return event
        record.last_s = now_s
        if now_s - record.written_s < _AGAIN_S:
            record.left_out += 1
            record.last = dict(event)
            raise structlog.DropEvent
        event["repeated"], record.left_out, record.written_s = record.left_out + 1, 0, now_s
        return event

    def ended(self) -> list[dict[str, Any]]:
        """Return the last line of each that has not come again for ten seconds.

        It has the number of lines that were left out since one was written; a line that came once is forgotten
        silently.
        """
        now_s = self._clock()
        over = [same for same, record in list(self._seen.items()) if now_s - record.last_s >= _ENDED_S]
        popped = (self._seen.pop(same, None) for same in over)  # None: popped by another thread
        ended = [record for record in popped if record is not None]
        return [record.last | {"repeated": record.left_out, "ended": True} for record in ended if record.left_out]


def _same(event: Event) -> Same:
    # The end of each value: of a traceback it is the part that matters.
    return tuple(_NUMBERS.sub("#", str(event.get(name, "")))[-200:] for name in _SAYS)
