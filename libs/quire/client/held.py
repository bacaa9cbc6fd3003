"""Memory that somebody who fell silent may still write to or read: held back until that can no more be."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from quire.client.buffers import Buffer
from quire.errors import ResourceExhausted

_HOLD_S: Final = 180.0  # longer than any deadline of a transfer
_HELD_MAX: Final = 64


class HeldBuffers:
    """Bounded: beyond 64 nothing new may be lent until the oldest are free."""

    def __init__(self) -> None:
        self._held: deque[tuple[float, Buffer]] = deque()

    def check(self) -> None:
        """Free what has been held for long enough. Raises `ResourceExhausted`."""
        while self._held and self._held[0][0] < time.monotonic():
            self._held.popleft()[1].close()
        if len(self._held) >= _HELD_MAX:
            raise ResourceExhausted(f"{len(self._held)} buffers may still be in use by peers that fell silent")

    def hold(self, buffer: Buffer) -> None:
        self._held.append((time.monotonic() + _HOLD_S, buffer))
