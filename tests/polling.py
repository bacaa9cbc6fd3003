"""Waiting for what other tasks, threads and processes do."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Value = TypeVar("Value")


def until(
    condition: Callable[[], Value],
    failure: str | Callable[[], str] = "it has not happened",
    *,
    timeout_s: float = 15.0,
    pause_s: float = 0.02,
    ignored: tuple[type[Exception], ...] = (),
) -> Value:
    """Call `condition` until its value is true, and return that. For threads; `eventually` is for tasks.

    Args:
        condition: Is called again and again.
        failure: Text of the assertion, or what returns it.
        timeout_s: Seconds to wait.
        pause_s: Seconds between two calls.
        ignored: Exceptions of `condition` that count as not true.

    Raises:
        AssertionError: It was not true in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(*ignored):
            if value := condition():
                return value
        assert time.monotonic() < deadline_s, failure() if callable(failure) else failure
        time.sleep(pause_s)


async def eventually(
    condition: Callable[[], object | Awaitable[object]],
    failure: str = "it has not happened",
    *,
    timeout_s: float = 15.0,
    pause_s: float = 0.02,
) -> None:
    """Call `condition`, a function or a coroutine function, until its value is true.

    Raises:
        AssertionError: It was not true in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if await value if inspect.isawaitable(value) else value:
            return
        assert time.monotonic() < deadline_s, failure
        await asyncio.sleep(pause_s)
