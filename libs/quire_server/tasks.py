"""Tasks: the end of background tasks, and where all of them wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from quire.telemetry import logger

_AGAIN_S: Final = 2.0
_TOLD_MAX: Final = 30


async def end(tasks: Iterable[asyncio.Task[Any] | None], again_s: float = _AGAIN_S) -> None:
    """Cancel tasks, and return when they have ended; their errors are dropped.

    One that goes on is cancelled again: before Python 3.12 `asyncio.wait_for`, by which redis-py sends, loses a
    cancellation that comes as it ends (cpython 86296). `again_s`: more than a task needs to clean up.
    """
    all_of_them = [task for task in tasks if task is not None]
    pending = set(all_of_them)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=again_s)
    await asyncio.gather(*all_of_them, return_exceptions=True)


def say_where(event: str) -> None:
    """Log where the tasks are, each from inside outwards, and how many are there; the places with most tasks first.

    Those of gRPC itself have no places.
    """
    places = [_places(task.get_coro()) for task in asyncio.all_tasks()]
    counts = Counter(" < ".join(reversed(frames)) for frames in places if frames)
    lines = [f"{count} × {place}" if count > 1 else place for place, count in counts.most_common(_TOLD_MAX)]
    logger().warning(event, waiting=lines, tasks=counts.total())


def _places(coroutine: Any) -> list[str]:
    """Return the frames in which it waits, from outside inwards."""
    places = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and frame.f_lineno:
            places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return places[-4:]
