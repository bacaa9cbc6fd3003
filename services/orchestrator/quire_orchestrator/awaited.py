"""Registrations that wait for the chunks before theirs, which other nodes register."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Set
from typing import Final

from quire.model.records import ChunkRecords

_WAITING_MAX: Final = 256


class AwaitedChunks:
    """Chunks that are about to be registered, and the registrations that wait for them.

    A store over several nodes is registered range by range: each node would have to look again and again whether the
    range before its own is there.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[asyncio.Event]] = {}
        self._count = 0

    @property
    def has_room(self) -> bool:
        """Whether one more may wait. Those that wait take up requests of the server."""
        return self._count < _WAITING_MAX

    def registered(self, chunks: ChunkRecords) -> None:
        """Wake the registrations that wait for any of these chunks."""
        for key in chunks.key_list() if self._waiting else ():
            for arrived in self._waiting.get(key, ()):
                arrived.set()

    @contextlib.contextmanager
    def awaited(self, parents: Set[bytes]) -> Iterator[asyncio.Event]:
        """While inside: the event is set when one of these chunks is registered here. `parents`: their keys."""
        arrived = asyncio.Event()
        for parent in parents:
            self._waiting.setdefault(parent, []).append(arrived)
        self._count += 1
        try:
            yield arrived
        finally:
            self._count -= 1
            for parent in parents:
                self._waiting[parent].remove(arrived)
                if not self._waiting[parent]:
                    del self._waiting[parent]
