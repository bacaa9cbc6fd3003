"""Pacing: bytes leave no faster than the granted rate. Pure; the caller sleeps."""

from __future__ import annotations

_CATCH_UP_S = 0.005


class Pacer:
    """A schedule of departures at `rate_bytes_per_s`, which may change at any time.

    After a late departure the next ones catch up, but never by more than 5 ms worth of bytes.
    """

    def __init__(self, rate_bytes_per_s: int, now_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self._due_s = now_s

    def delay_s(self, size: int, now_s: float) -> float:
        """Book `size` bytes; how long to wait before sending them."""
        start = max(self._due_s, now_s - _CATCH_UP_S)
        self._due_s = start + size / self.rate_bytes_per_s
        return max(0.0, start - now_s)
