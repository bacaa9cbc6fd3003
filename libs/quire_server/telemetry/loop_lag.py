"""Event-loop lag: how long a callback that is ready waits until it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from quire.telemetry import meter, names

_TICK_S: Final = 0.02
_TICKS_MAX: Final = 1000


class Lateness:
    """How late this process' loop ran. `total_s`: seconds in which a callback that was due did not run, added up."""

    def __init__(self) -> None:
        self.total_s = 0.0


lateness = Lateness()
"""Of this process. What is timed on the loop subtracts what was added meanwhile: it is no delay of others."""


@contextlib.asynccontextmanager
async def loop_lag() -> AsyncIterator[None]:
    """Measure it while the block runs."""
    histogram = meter().create_histogram(
        names.LOOP_LAG, "s", "how late the event loop runs", explicit_bucket_boundaries_advisory=names.LAG_SECONDS
    )
    ticks = _Ticks(histogram.record, asyncio.get_running_loop())
    try:
        yield
    finally:
        ticks.stop()


class _Ticks:
    """Measured by a timer, which costs far less than a task."""

    def __init__(self, record: Callable[[float], None], loop: asyncio.AbstractEventLoop) -> None:
        self._record = record
        self._loop = loop
        self._begin()

    def _begin(self) -> None:
        self._due_s = self._loop.time() + _TICK_S
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        behind_s = max(0.0, self._loop.time() - self._due_s)
        lateness.total_s += behind_s
        for late_s in samples(behind_s):
            self._record(late_s)
        self._begin()

    def stop(self) -> None:
        self._timer.cancel()


def samples(late_s: float) -> list[float]:
    """Return the lags of one late tick and of the ticks that were due while it was late."""
    return [late_s - number * _TICK_S for number in range(min(_TICKS_MAX, int(late_s / _TICK_S) + 1))]
