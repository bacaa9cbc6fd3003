"""How late the event loop runs: the time that whatever becomes ready waits for its turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from quire.telemetry import meter, names

_TICK_S: Final = 0.01
_TICKS_MAX: Final = 1000


@contextlib.asynccontextmanager
async def loop_lag() -> AsyncIterator[None]:
    """Measure it while the block runs."""
    histogram = meter().create_histogram(
        names.LOOP_LAG, "s", "how late the event loop runs", explicit_bucket_boundaries_advisory=names.LAG_SECONDS
    )
    watch = asyncio.create_task(_watch(histogram.record))
    try:
        yield
    finally:
        watch.cancel()


async def _watch(record: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + _TICK_S
        await asyncio.sleep(_TICK_S)
        for late_s in samples(max(0.0, loop.time() - due_s)):
            record(late_s)


def samples(late_s: float) -> list[float]:
    """What a tick that comes so late stands for: those that were due meanwhile were late, too."""
    return [late_s - number * _TICK_S for number in range(min(_TICKS_MAX, int(late_s / _TICK_S) + 1))]
