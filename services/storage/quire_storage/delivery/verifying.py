"""A layer that is verified while it is sent: by a thread, and by the sender where the thread has not begun.

The sender takes its turn because a thread's answer costs a switch of threads, which on busy processors takes longer
than the checksum of a mebibyte.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine

import numpy as np
import numpy.typing as npt

from quire_storage.core.plan import SliceChecks


class Verifying:
    """A layer of a batch in memory. Each part is taken once, in order, by `work` or by `until`.

    Attributes:
        found_corrupt: A part does not match; which slices of it is to be found out.
    """

    def __init__(self, checks: SliceChecks, arena: npt.NDArray[np.uint8], layer: int, shift: int) -> None:
        self._checks = checks
        self._arena = arena
        self._layer = layer
        self._shift = shift
        self._lock = threading.Lock()
        self._taken = 0
        self._is_sound = [False] * len(checks.parts)
        self._sound_parts = self._sound_chunks = 0
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.found_corrupt = False

    def begin(self, verifying: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start what runs `work` in a thread, and heals slices that do not match; all are sound when it has ended."""
        self._task = asyncio.get_running_loop().create_task(verifying)
        self._task.add_done_callback(lambda _: self._news.set())
        return self._task

    def work(self) -> None:
        """Verify the parts that are left. For a thread."""
        while (part := self._take()) is not None:
            is_sound = self._check(part)
            self._loop.call_soon_threadsafe(self._note, part, is_sound)

    async def until(self, chunks: int) -> None:
        """Wait until the first `chunks` match. Raises `CorruptData` for chunks that cannot be healed."""
        assert self._task is not None, "it has begun"
        while self._sound_chunks < chunks:
            if self._task.done():
                self._task.result()
                return
            if (part := self._take()) is not None:
                self._note(part, self._check(part))
                await asyncio.sleep(0)
            else:
                self._news.clear()
                await self._news.wait()

    def _take(self) -> int | None:
        """Return the next part for the caller to verify; none once one is known not to match."""
        with self._lock:
            if self.found_corrupt or self._taken == len(self._is_sound):
                return None
            self._taken += 1
            return self._taken - 1

    def _check(self, part: int) -> bool:
        is_sound = self._checks.is_sound(self._arena, self._layer, self._shift, part)
        if not is_sound:
            self.found_corrupt = True
        return is_sound

    def _note(self, part: int, is_sound: bool) -> None:
        self._is_sound[part] = is_sound
        while self._sound_parts < len(self._is_sound) and self._is_sound[self._sound_parts]:
            extent = self._checks.parts[self._sound_parts]
            self._sound_parts += 1
            self._sound_chunks = extent.first + extent.count
        self._news.set()
