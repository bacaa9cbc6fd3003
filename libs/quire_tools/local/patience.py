"""Waiting for processes: a limit on the time in which they do nothing, since a busy machine lets them work slowly."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_WORKS: Final = 0.03
"""Share of a processor by which a process shows that it works; a service that only waits takes less."""
_FACTOR_MAX: Final = 10
"""After so many limits a process that only keeps busy is given up."""


class Patience:
    """A time limit that begins anew while a process works.

    Args:
        limit_s: How long it may do nothing.
        pid: Of the process.
    """

    def __init__(self, limit_s: float, pid: int) -> None:
        self.limit_s = limit_s
        self._pid = pid
        self._began_s = self._seen_s = time.monotonic()
        self._worked_s = _processor_s(self._pid)

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began_s

    @property
    def is_over(self) -> bool:
        """Whether the limit has passed. To be read now and then."""
        now_s = time.monotonic()
        if now_s - self._began_s > _FACTOR_MAX * self.limit_s:
            return True
        if now_s - self._seen_s <= self.limit_s / 2:
            return False
        worked_s = _processor_s(self._pid)
        if worked_s - self._worked_s >= _WORKS * (now_s - self._seen_s):
            self._seen_s, self._worked_s = now_s, worked_s
        return now_s - self._seen_s > self.limit_s


def _processor_s(pid: int) -> float:
    """Return the time of processors that a process has had; 0 where that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
