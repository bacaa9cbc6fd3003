"""Registered memory that stores and staged loads share: a first-fit pool over one range.

Ranges that a storage node may still touch stay out of it; the engine's own memory is never waited for then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from quire.client import Buffer
from quire.model.errors import ResourceExhausted

Arrived = TypeVar("Arrived")
_ALIGN: Final = 4096
_LOOK_S: Final = 0.005
_running: Final[set[asyncio.Task[Any]]] = set()


class StagingPool:
    """Parts of one buffer. Safe from any thread."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._free = [(0, buffer.length)]
        self._lock = threading.Lock()

    def take(self, length: int) -> Buffer | None:
        """Take a range; None if there is no room for it now."""
        length = -(-length // _ALIGN) * _ALIGN
        with self._lock:
            for at, (start, size) in enumerate(self._free):
                if size >= length:
                    self._free[at : at + 1] = [(start + length, size - length)] if size > length else []
                    return self._part(start, length)
        return None

    async def take_soon(self, length: int, timeout_s: float) -> Buffer:
        """Take a range once there is room. Raises `ResourceExhausted`: at once for more than the whole pool."""
        if length > self._buffer.length:
            raise ResourceExhausted(f"{length} bytes, staging memory has {self._buffer.length}; raise staging_bytes")
        until_s = time.monotonic() + timeout_s
        while (part := self.take(length)) is None:
            if time.monotonic() > until_s:
                raise ResourceExhausted(f"no staging memory for {length} bytes; raise staging_bytes")
            await asyncio.sleep(_LOOK_S)
        return part

    def give_back_when_idle(self, part: Buffer) -> None:
        """Give a range back on a loop, once no node touches it."""

        async def wait() -> None:
            while part.is_busy:
                await asyncio.sleep(_LOOK_S)
            self.give_back(part)

        _beside(wait())

    def give_back(self, part: Buffer) -> None:
        """Take back memory that no node uses."""
        start = part.target().address - self._buffer.target().address
        with self._lock:
            self._free = _joined([*self._free, (start, part.length)])

    @property
    def free_bytes(self) -> int:
        """Bytes that are free now."""
        with self._lock:
            return sum(size for _, size in self._free)

    def _part(self, start: int, length: int) -> Buffer:
        return self._buffer.part(start, length)


async def staged(
    pool: StagingPool,
    length: int,
    timeout_s: float,
    arrive: Callable[[Buffer], Awaitable[Arrived]],
    take: Callable[[Buffer, Arrived], None],
) -> Arrived | None:
    """Take the bytes that `arrive` brings into staging memory; None if they do not arrive in time.

    `arrive` ends when every node has stopped writing to the memory; until then the pool lacks it. Raises its errors.
    """
    part, awaited = await pool.take_soon(length, timeout_s), True

    async def run() -> Arrived:
        try:
            arrived = await arrive(part)
            if awaited:
                take(part, arrived)
            return arrived
        finally:
            pool.give_back(part)

    running = _beside(run())
    done, _ = await asyncio.wait([running], timeout=timeout_s)
    awaited = False
    return running.result() if done else None


def _beside(work: Coroutine[Any, Any, Arrived]) -> asyncio.Task[Arrived]:
    """A task that goes on though nothing waits for it."""
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, size in sorted(ranges):
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return merged
