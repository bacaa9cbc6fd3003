"""A stream of copies keeps its order towards the loop too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.transport.copying import CopyStream


class _AtOnce:
    """In the place of threads: one that is always done before the loop looks."""

    def submit(self, tenant: str, work: Callable[[], None]) -> None:
        work()


class _Peer:
    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def check(self) -> None:
        pass

    def send(self, message: bytes) -> None:
        self.heard.append(message)


async def test_what_follows_an_announcement_was_called_when_the_stream_is_drained() -> None:
    peer, threads, called = _Peer(), _AtOnce(), []
    memory = np.zeros(64, dtype=np.uint8)
    anything: Any = threads
    stream = CopyStream(peer, anything, np.arange(64, dtype=np.uint8), memory)
    await stream.send(0, 16, 32)
    stream.announce(b"there", lambda: called.append(memory[32:48].tolist()))
    await stream.drain(10)
    assert peer.heard == [b"there"]
    assert called == [list(range(16))]
