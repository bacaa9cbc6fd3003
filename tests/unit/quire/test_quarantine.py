"""Memory that a silent peer may still use is kept; a refusal, or a peer that is not there, costs nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from quire.client.memory.buffers import Buffer
from quire.client.memory.quarantine import Quarantine, may_be_in_use
from quire.client.memory.remote_memory import PeerTransfers
from quire.model.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MetadataUnavailable,
    NoDecoder,
    NodeUnavailable,
    QuireError,
    ResourceExhausted,
)
from quire.transport.memory import MemoryTransport


@pytest.fixture
async def pair() -> AsyncIterator[tuple[MemoryTransport, MemoryTransport]]:
    mine, other = MemoryTransport(), MemoryTransport()
    await mine.start()
    await other.start()
    yield mine, other
    await mine.close()
    await other.close()


async def test_pushes_to_a_key_that_is_none_cost_no_memory(pair: tuple[MemoryTransport, MemoryTransport]) -> None:
    mine, other = pair
    remote_memory = PeerTransfers(mine)
    room = Buffer.allocate(other, 64)
    bad = replace(room.target(), remote_key=b"no such key")
    for _ in range(100):
        with pytest.raises(QuireError):
            await remote_memory.push(b"x" * 64, bad)
    await remote_memory.push(b"y" * 64, room.target())
    assert room.view is not None and bool((room.view[:64] == np.frombuffer(b"y", dtype=np.uint8)).all())


@pytest.mark.parametrize("error", [NoDecoder("none"), MetadataUnavailable("down"), InvalidRequest("no")])
async def test_who_refuses_uses_no_memory(error: QuireError, pair: tuple[MemoryTransport, MemoryTransport]) -> None:
    remote_memory = PeerTransfers(pair[0])
    for _ in range(100):
        with pytest.raises(type(error)), remote_memory.lend(b"data"):
            raise error


async def test_a_silent_peer_takes_its_own_share_only(pair: tuple[MemoryTransport, MemoryTransport]) -> None:
    quarantine = Quarantine()
    while True:
        try:
            quarantine.check(b"silent")
        except ResourceExhausted:
            break
        quarantine.add(Buffer.allocate(pair[0], 16), b"silent")
    quarantine.check(b"other")
    assert may_be_in_use(DeadlineExceeded("silent")) and may_be_in_use(NodeUnavailable("gone"))
    assert may_be_in_use(KeyboardInterrupt()), "whatever ended it here, the peer knows nothing of it"
