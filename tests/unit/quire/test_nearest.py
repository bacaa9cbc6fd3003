"""Where shared memory is there, UCX that gets nowhere ends nothing; where UCX is what is used, it does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.model.descriptor import RdmaTarget
from quire.model.errors import PeerLost
from quire.transport import AutoTransport, SharedMemoryTransport
from quire.transport.memory import MemoryPeer, MemoryTransport


class _Failing(MemoryTransport):
    """As UCX, whose connections can fail after they were begun."""

    def __init__(self, *, reached: bool) -> None:
        super().__init__()
        self._reached = reached
        self.fail: Callable[[], None] = lambda: None

    def connect(self, address: bytes) -> Any:
        transport, peer = self, super().connect(address)

        class Peer(MemoryPeer):
            reached = transport._reached

            def on_failure(self, callback: Callable[[PeerLost], None]) -> Callable[[], None]:
                transport.fail = lambda: callback(PeerLost("no device leads there"))
                return lambda: None

        assert isinstance(peer, MemoryPeer)
        return Peer(peer._fabric, peer._address)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[AutoTransport]:
    transport = AutoTransport(MemoryTransport(), SharedMemoryTransport(tmp_path, ()))
    await transport.start()
    yield transport
    await transport.close()


@pytest.fixture(params=[False, True], ids=["unreached", "reached"])
async def client(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[AutoTransport, _Failing]]:
    ucx = _Failing(reached=request.param)
    transport = AutoTransport(ucx, SharedMemoryTransport(tmp_path, ()), wary=True)
    await transport.start()
    yield transport, ucx
    await transport.close()


async def test_shared_memory_goes_on_where_ucx_was_never_through(
    node: AutoTransport, client: tuple[AutoTransport, _Failing]
) -> None:
    transport, ucx = client
    peer = transport.connect(node.address)
    lost: list[PeerLost] = []
    peer.on_failure(lost.append)
    ucx.fail()
    if ucx._reached:
        assert lost and peer.error is not None and peer.reached
        return
    assert not lost and peer.error is None and peer.reached
    assert "no device leads there" in transport.why_not
    assert len(transport.address) < len(node.address), "nodes are not told of a way back by UCX"
    peer.send(b"by shared memory")


async def test_memory_that_ucx_alone_reaches_is_lost_with_it(
    node: AutoTransport, client: tuple[AutoTransport, _Failing]
) -> None:
    transport, ucx = client
    own = np.zeros(64, dtype=np.uint8)  # not allocated by the node's transport: no other process can map it
    region = node.register(own)
    peer = transport.connect(node.address)
    await peer.remote(RdmaTarget(node.address, region.address, region.length, region.remote_key))
    ucx.fail()
    assert peer.error is not None
    assert peer.reached is ucx._reached
