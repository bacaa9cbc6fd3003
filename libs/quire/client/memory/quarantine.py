"""Memory that a peer which fell silent may still write to or read: not used again until that can no more be."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from typing import Final

from quire.client.memory.buffers import Buffer
from quire.model.errors import (
    DeadlineExceeded,
    InternalError,
    MetadataUnavailable,
    NoDecoder,
    NoStorageNode,
    QuireError,
    ResourceExhausted,
    Unavailable,
)

_HOLD_S: Final = 180.0  # longer than any deadline of a transfer
_BUFFERS_MAX: Final = 64
_OF_ONE_PEER_MAX: Final = 8


class Ended(asyncio.CancelledError):
    """The request was cancelled, and the peers that had the address have reported that they no longer use it."""


def may_be_in_use(error: BaseException) -> bool:
    """Return whether a peer that was to receive an address may be using the memory after this failure of the request.

    Not if it has refused, nor if there was no peer.
    """
    if isinstance(error, NoDecoder | NoStorageNode | MetadataUnavailable | Ended):
        return False
    return not isinstance(error, QuireError) or isinstance(error, Unavailable | DeadlineExceeded | InternalError)


class Quarantine:
    """Bounded: beyond 64 buffers in all, or 8 of one peer, nothing new may be lent until the oldest are free."""

    def __init__(self) -> None:
        self._buffers: deque[tuple[float, Buffer, bytes]] = deque()
        self._by_peer: Counter[bytes] = Counter()

    def check(self, peer: bytes = b"") -> None:
        """Free the memory that has been here for long enough. Raises `ResourceExhausted`.

        `peer`: address of the one that will use the memory; b"" where it is not known before.
        """
        while self._buffers and self._buffers[0][0] < time.monotonic():
            _, buffer, owner = self._buffers.popleft()
            self._by_peer[owner] -= 1
            buffer.close()
        if len(self._buffers) >= _BUFFERS_MAX or (peer and self._by_peer[peer] >= _OF_ONE_PEER_MAX):
            raise ResourceExhausted(f"{len(self._buffers)} buffers may still be in use by peers that fell silent")

    @property
    def buffers(self) -> list[Buffer]:
        """Memory in quarantine."""
        return [buffer for _, buffer, _ in self._buffers]

    def add(self, buffer: Buffer, peer: bytes = b"") -> None:
        """Put memory into quarantine."""
        self._buffers.append((time.monotonic() + _HOLD_S, buffer, peer))
        self._by_peer[peer] += 1
