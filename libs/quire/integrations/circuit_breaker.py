"""Leaves a Quire that did not answer alone for a time, so that it costs later requests no waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from quire.model.errors import ConfigInvalid, InvalidRequest
from quire.telemetry import logger

_AWAY_S_MAX: Final = 30.0
_DOUBLINGS_MAX: Final = 8
_OWN_FAULTS: Final = (InvalidRequest, ConfigInvalid, ValueError)


class CircuitBreaker:
    """Decides for one process whether to ask Quire.

    Args:
        away_s: Pause after the first failure, seconds; each further failure doubles it, up to 30 s.
        engine: Name of the engine for the log.
        now_s: Monotonic clock, seconds.
    """

    def __init__(self, away_s: float, engine: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._away_s = away_s
        self._engine = engine
        self._now_s = now_s
        self._until_s, self._failures = 0.0, 0

    def __bool__(self) -> bool:
        return self._now_s() < self._until_s

    def answered(self) -> None:
        """Quire has answered."""
        self._failures = 0

    def failed(self, error: BaseException) -> None:
        """Leave Quire alone for a while, unless the request itself was at fault: then only that is a miss."""
        if isinstance(error, _OWN_FAULTS):
            logger().warning("a request cannot be looked up; it is a miss", engine=self._engine, error=repr(error))
            return
        away_s = min(_AWAY_S_MAX, self._away_s * 2.0**self._failures)
        self._failures = min(self._failures + 1, _DOUBLINGS_MAX)
        self._until_s = self._now_s() + away_s
        logger().warning(
            "Quire does not answer; the engine goes on without it", engine=self._engine, error=repr(error), for_s=away_s
        )
