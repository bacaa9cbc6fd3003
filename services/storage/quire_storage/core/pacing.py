"""Pacing: bytes leave no faster than the granted rate. Pure; the caller sleeps."""

from __future__ import annotations

import math

_CATCH_UP_S = 0.02


class Pacer:
    """A bucket that fills at `rate_bytes_per_s`, which may change at any time; 0 stands still, for `stood_s` so far.

    A departure may begin while the bucket is not overdrawn, and takes its whole size out. After a late departure the
    next ones catch up, but never by more than 20 ms worth of bytes.
    """

    def __init__(self, rate_bytes_per_s: int, now_s: float) -> None:
        self._rate = rate_bytes_per_s
        self._at_s = now_s
        self._credit = 0.0
        self._granted_bytes = 0.0
        self._granted_s = 0.0
        self._left_bytes = 0
        self.stood_s = 0.0

    @property
    def rate_bytes_per_s(self) -> int:
        return self._rate

    @property
    def mean_bytes_per_s(self) -> float:
        """Mean rate up to the last look, waits for a rate excluded; the current one before the first."""
        return self._granted_bytes / self._granted_s if self._granted_s > 0 else float(self._rate)

    @property
    def kept(self) -> float:
        """What has left, as a share of what was granted: below 1 where something else was slower."""
        return self._left_bytes / self._granted_bytes if self._granted_bytes > 0 else 1.0

    def set_rate(self, rate_bytes_per_s: int, now_s: float) -> None:
        """The rate from now on; what came in until now came at the old one."""
        self._fill(now_s)
        self._rate = rate_bytes_per_s

    def wait_s(self, now_s: float) -> float:
        """How long until something may leave at the current rate; infinite while it is 0."""
        self._fill(now_s)
        if self._rate == 0:
            return math.inf
        return -self._credit / self._rate if self._credit < -1e-3 else 0.0  # less than that is rounding

    def leave(self, size: int) -> None:
        """Something has left."""
        self._credit -= size
        self._left_bytes += size

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._credit = min(self._credit + passed_s * self._rate, _CATCH_UP_S * self._rate)
        if self._rate:
            self._granted_bytes += passed_s * self._rate
            self._granted_s += passed_s
        else:
            self.stood_s += passed_s
