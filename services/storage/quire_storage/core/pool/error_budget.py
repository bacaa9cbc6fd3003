"""When a drive that fails reads is retired. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 600


class ErrorBudget:
    """Counts, for each drive, the seconds of the last ten minutes in which a read failed.

    Seconds and not errors: a path that is down for a moment fails every read under way, and its drive is sound; a drive
    that dies goes on failing.
    """

    def __init__(self, error_s_max: int) -> None:
        self._error_s_max = error_s_max
        self._seconds: dict[int, deque[int]] = {}

    def failed(self, drive: int, now_s: float) -> bool:
        """Record a failed read; whether the drive is over its budget."""
        seconds, second = self._seconds.setdefault(drive, deque()), int(now_s)
        if not seconds or seconds[-1] != second:
            seconds.append(second)
        while seconds[0] <= second - WINDOW_S:
            seconds.popleft()
        return len(seconds) > self._error_s_max
