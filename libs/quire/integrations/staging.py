"""Registered memory that stores and staged loads share: a first-fit pool over one range."""

from __future__ import annotations

import threading

from quire.client import Buffer

_ALIGN = 4096


class StagingPool:
    """Parts of one buffer. Safe from any thread."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._free = [(0, buffer.length)]
        self._lock = threading.Lock()

    def take(self, length: int) -> Buffer | None:
        """None where there is no room for it now."""
        length = -(-length // _ALIGN) * _ALIGN
        with self._lock:
            for at, (start, size) in enumerate(self._free):
                if size >= length:
                    self._free[at : at + 1] = [(start + length, size - length)] if size > length else []
                    return self._part(start, length)
        return None

    def give_back(self, part: Buffer) -> None:
        """Memory that no node touches any more."""
        start = part.target().address - self._buffer.target().address
        with self._lock:
            self._free = _joined([*self._free, (start, part.length)])

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(size for _, size in self._free)

    def _part(self, start: int, length: int) -> Buffer:
        return self._buffer.part(start, length)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, size in sorted(ranges):
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined
