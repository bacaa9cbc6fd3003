"""For how long a Quire that did not answer is left alone, so that it costs requests no more waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_AWAY_S_MAX: Final = 30.0
_DOUBLINGS_MAX: Final = 8


class Absence:
    """Of one process. `away_s`: after the first failure; twice as long after each that follows, 30 s at most."""

    def __init__(self, away_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._away_s = away_s
        self._now_s = now_s
        self._until_s, self._failures = 0.0, 0

    def __bool__(self) -> bool:
        return self._now_s() < self._until_s

    def answered(self) -> None:
        """It is there."""
        self._failures = 0

    def failed(self) -> float:
        """It did not answer; for how many seconds it is left alone."""
        away_s = min(_AWAY_S_MAX, self._away_s * 2.0**self._failures)
        self._failures = min(self._failures + 1, _DOUBLINGS_MAX)
        self._until_s = self._now_s() + away_s
        return away_s
