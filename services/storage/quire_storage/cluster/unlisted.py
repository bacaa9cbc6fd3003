"""Chunks that the index does not list, until they are registered again: packed, in order."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from quire.model.keys import KEY_BYTES


class UnlistedChunks:
    """A queue of keys with generations. Millions of them are a few objects for the garbage collector."""

    def __init__(self) -> None:
        self._parts: deque[tuple[bytes, array[int]]] = deque()
        self._at = 0  # of the first part
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Sequence[bytes], generations: Sequence[int]) -> None:
        """Queue chunks, each with the generation under which it was listed last; 0 for none."""
        if keys:
            self._parts.append((b"".join(keys), array("Q", generations)))
            self._count += len(keys)

    def take(self, limit: int) -> list[tuple[bytes, int]]:
        """Return up to `limit` chunks from the front, which are queued no longer."""
        taken: list[tuple[bytes, int]] = []
        while self._parts and len(taken) < limit:
            packed, generations = self._parts[0]
            stop = min(len(generations), self._at + limit - len(taken))
            places = range(self._at, stop)
            taken += [(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES], generations[at]) for at in places]
            self._at = stop
            if stop == len(generations):
                self._parts.popleft()
                self._at = 0
        self._count -= len(taken)
        return taken

    def clear(self) -> None:
        self._parts.clear()
        self._at = self._count = 0
