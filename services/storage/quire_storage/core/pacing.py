"""Pacing: bytes leave no faster than the granted rate. Pure; the caller sleeps."""

from __future__ import annotations

import math

_CATCH_UP_S = 0.02
_BURST_S = 0.08
_HOLDS_S = 60.0


class Credit:
    """Credit of new deliveries before they have rates, shared: at the rate that was set, 80 ms worth at once.

    Nothing until it is set, nor a minute after it was set last: by then the scheduler gives it to other nodes.
    """

    def __init__(self) -> None:
        self._rate = self._burst_bytes = self._left_bytes = self._at_s = self._set_s = 0.0

    def set_rate(self, rate_bytes_per_s: float, now_s: float) -> None:
        """Set the rate from now on. The first one comes with its burst."""
        self._set_s = now_s
        if rate_bytes_per_s == self._rate:
            return
        self._fill(now_s)
        burst_bytes = _BURST_S * rate_bytes_per_s
        self._left_bytes = min(self._left_bytes, burst_bytes) if self._rate else burst_bytes
        self._rate, self._burst_bytes = rate_bytes_per_s, burst_bytes

    def take(self, wanted_bytes: int, now_s: float) -> int:
        """Take up to this number of bytes."""
        if now_s - self._set_s > _HOLDS_S:
            self.set_rate(0.0, now_s)
        self._fill(now_s)
        taken = int(min(wanted_bytes, self._left_bytes))
        self._left_bytes -= taken
        return taken

    def give_back(self, unused_bytes: int) -> None:
        """Give back a part of the bytes that were taken."""
        self._left_bytes = min(self._burst_bytes, self._left_bytes + unused_bytes)

    def _fill(self, now_s: float) -> None:
        self._left_bytes = min(self._burst_bytes, self._left_bytes + (now_s - self._at_s) * self._rate)
        self._at_s = now_s


class Pacer:
    """A bucket that fills at `rate_bytes_per_s`, which may change at any time; 0 stands still, for `stood_s` so far.

    While it is 0 `advance_bytes` may leave all the same; the rate then has to make up for them.

    A departure may begin while the bucket is not overdrawn, and takes its whole size out. After a late departure the
    next ones catch up, but never by more than 20 ms worth of bytes.
    """

    def __init__(self, rate_bytes_per_s: int, now_s: float, advance_bytes: int = 0) -> None:
        self._rate = rate_bytes_per_s
        self.advance_bytes = advance_bytes
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
        """Share of the granted bytes that were sent: below 1 if another limit was lower."""
        return self._left_bytes / self._granted_bytes if self._granted_bytes > 0 else 1.0

    def set_rate(self, rate_bytes_per_s: int, now_s: float) -> None:
        """Set the rate from now on; earlier bytes accrued at the old one."""
        self._fill(now_s)
        self._rate = rate_bytes_per_s

    def wait_s(self, now_s: float) -> float:
        """How long until something may leave at the current rate; infinite while it is 0."""
        self._fill(now_s)
        if self._rate == 0:
            return 0.0 if self.advance_bytes > 0 else math.inf
        return -self._credit / self._rate if self._credit < -1e-3 else 0.0  # less than that is rounding

    def leave(self, size: int) -> None:
        """Something has left."""
        if self._rate == 0:
            self.advance_bytes = max(0, self.advance_bytes - size)
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
