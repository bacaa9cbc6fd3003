"""When writes may go to the drives: inside windows in which no read waits (Tutti, §3.3). Pure; the ring asks.

A read says until when its consumer can do without it: the compute window of a request that is ahead. While every
outstanding read has more slack than it needs, or none is outstanding, writes go, a few MiB at a time, so that a
read which comes next waits for little. Writes never starve: those older than `age_s_max`, or more than
`backlog_bytes_max` of them, get a share of what the reads move whatever the reads need.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHING = 0.2
_SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True)
class SlackLimits:
    """Bounds of deferral. `quantum_bytes`: written at a time next to reads; `idle_bytes`: while none is outstanding."""

    quantum_bytes: int = 1 << 20
    idle_bytes: int = 8 << 20
    age_s_max: float = 1.0
    backlog_bytes_max: int = 256 << 20
    forced_share: float = 0.08


class WriteGate:
    """Counts outstanding reads and writes; `room` says how many bytes of writes may be issued now."""

    def __init__(self, limits: SlackLimits, *, enabled: bool = True) -> None:
        self._limits = limits
        self._enabled = enabled
        self._reads: dict[int, tuple[int, float]] = {}
        self._read_bytes = 0
        self._next = 0
        self._writing = 0
        self._credit = 0.0
        self._last_write_s = float("-inf")
        self._rate_bytes_per_s = 500e6
        self._sample_start_s = 0.0
        self._sample_bytes = 0

    def read_started(self, size: int, due_s: float, now_s: float) -> int:
        """Count a read whose consumer needs it at `due_s`; returns its number."""
        if not self._reads:
            self._sample_start_s, self._sample_bytes = now_s, 0
        self._next += 1
        self._reads[self._next] = (size, due_s)
        self._read_bytes += size
        return self._next

    def read_finished(self, number: int, now_s: float) -> None:
        """The read of that number has ended; the device's rate is learned from it."""
        size, _ = self._reads.pop(number)
        self._read_bytes -= size
        self._credit = min(self._credit + size * self._limits.forced_share, 2.0 * self._limits.quantum_bytes)
        self._sample_bytes += size
        elapsed_s = now_s - self._sample_start_s
        if elapsed_s >= _SAMPLE_S or (not self._reads and elapsed_s > 0):
            rate = self._sample_bytes / elapsed_s
            self._rate_bytes_per_s += _SMOOTHING * (rate - self._rate_bytes_per_s)
            self._sample_start_s, self._sample_bytes = now_s, 0

    def write_started(self, size: int, now_s: float) -> None:
        """Count bytes of writes that are on their way."""
        self._writing += size
        self._last_write_s = now_s
        if self._reads:
            self._credit = max(0.0, self._credit - size)

    def write_finished(self, size: int) -> None:
        """Count bytes of writes that have arrived."""
        self._writing -= size

    def room(self, now_s: float, backlog_bytes: int, oldest_s: float) -> int:
        """Bytes of writes that may be issued now; `oldest_s`: since when the oldest of the backlog waits."""
        if not self._enabled:
            return backlog_bytes
        if not self._reads:
            return max(0, self._limits.idle_bytes - self._writing)
        quantum = self._limits.quantum_bytes - self._writing
        if quantum <= 0:
            return 0
        if self._slack_s(now_s) * self._rate_bytes_per_s > self._limits.quantum_bytes:
            return quantum
        overdue = now_s - oldest_s > self._limits.age_s_max or backlog_bytes > self._limits.backlog_bytes_max
        starved = now_s - self._last_write_s > self._limits.age_s_max
        if overdue and (self._credit >= quantum or starved):
            return quantum
        return 0

    def _slack_s(self, now_s: float) -> float:
        """Return the time until the first outstanding read is due, less the time that all of them still take."""
        due_s = min(deadline_s for _, deadline_s in self._reads.values())
        return due_s - now_s - self._read_bytes / self._rate_bytes_per_s
