"""Tasks that run beside the requests: how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

_AGAIN_S: Final = 2.0


async def end(tasks: Iterable[asyncio.Task[Any] | None], again_s: float = _AGAIN_S) -> None:
    """Cancel tasks, and return when they have ended; what they raise is dropped.

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
