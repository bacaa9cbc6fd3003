"""The data plane's port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from quire.model.descriptor import RdmaTarget
from quire.model.errors import PeerLost, TargetInvalid
from quire.transport import Region, Transport

_BYTES = 1 << 20
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Scene:
    """A writer with a source region, a reader with a target region, and the reader's messages.

    `make`: another transport, not started.
    """

    make: Callable[[], Transport]
    writer: Transport
    reader: Transport
    source: Bytes
    target: Bytes
    region: Region
    remote_target: RdmaTarget
    heard: asyncio.Queue[bytes]


class TransportContract:
    """Fixture `transport`: makes one, not started."""

    @pytest.fixture
    async def scene(self, transport: Callable[[], Transport]) -> AsyncIterator[Scene]:
        """Fixture: a writer and a reader that are connected, with registered memory."""
        writer, reader = transport(), transport()
        await writer.start()
        await reader.start()
        messages: asyncio.Queue[bytes] = asyncio.Queue()
        reader.on_message(messages.put_nowait)
        source = np.random.default_rng(4).integers(0, 256, _BYTES, dtype=np.uint8)
        target = reader.allocate(_BYTES)
        region, target_region = writer.register(source), reader.register(target)
        remote_target = RdmaTarget(
            reader.address, target_region.address, target_region.length, target_region.remote_key
        )
        yield Scene(
            transport,
            writer,
            reader=reader,
            source=source,
            target=target,
            region=region,
            remote_target=remote_target,
            heard=messages,
        )
        await writer.close()
        await reader.close()

    async def test_announced_bytes_are_there(self, scene: Scene) -> None:
        """A message announced after bytes arrives after them; `then` runs by the time of the drain."""
        peer = scene.writer.connect(scene.remote_target.worker_address)
        remote = await peer.remote(scene.remote_target)
        stream = peer.stream(scene.region, remote)
        called: list[int] = []
        await stream.send(0, 1000, 5000)
        await stream.gather(np.array([8192, 0], dtype=np.int64), 4096, 100_000)
        stream.announce(b"first", lambda: called.append(1))
        async with asyncio.timeout(10):
            assert await scene.heard.get() == b"first"
        assert np.array_equal(scene.target[5000:6000], scene.source[:1000])
        assert np.array_equal(scene.target[100_000:104_096], scene.source[8192:12288])
        assert np.array_equal(scene.target[104_096:108_192], scene.source[:4096])
        await stream.drain(10)
        assert called == [1]
        assert stream.bytes_posted == 1000 + 2 * 4096
        remote.close()

    async def test_get_reads_the_peer(self, scene: Scene) -> None:
        """Get brings the peer's bytes to their place, and changes no other byte."""
        scene.target[:] = 7
        expected = scene.source.copy()
        expected[10:510] = 7
        peer = scene.writer.connect(scene.remote_target.worker_address)
        remote = await peer.remote(scene.remote_target)
        await peer.get(scene.region, 10, 500, remote, 20, timeout_s=10)
        assert np.array_equal(scene.source, expected), "these bytes, and no others"
        remote.close()

    @pytest.mark.parametrize(
        "offset,length,remote_offset", [(0, 100, _BYTES - 99), (_BYTES - 99, 100, 0), (0, 100, -1)]
    )
    async def test_transfers_outside_of_a_range_move_nothing(
        self, scene: Scene, offset: int, length: int, remote_offset: int
    ) -> None:
        peer = scene.writer.connect(scene.remote_target.worker_address)
        remote = await peer.remote(scene.remote_target)
        stream = peer.stream(scene.region, remote)
        with pytest.raises(TargetInvalid):
            await stream.send(offset, length, remote_offset)
        with pytest.raises(TargetInvalid):
            await stream.gather(np.array([0, offset], dtype=np.int64), length, remote_offset - length)
        await stream.drain(10)
        assert not scene.target.any()
        remote.close()

    async def test_unknown_key_is_refused(self, scene: Scene) -> None:
        peer = scene.writer.connect(scene.remote_target.worker_address)
        bad = RdmaTarget(scene.remote_target.worker_address, scene.remote_target.address, 10, b"nonsense")
        with pytest.raises(TargetInvalid):
            await peer.remote(bad)

    async def test_stopped_stream_sends_nothing_more(self, scene: Scene) -> None:
        peer = scene.writer.connect(scene.remote_target.worker_address)
        remote = await peer.remote(scene.remote_target)
        stream = peer.stream(scene.region, remote)
        stream.stop()
        with pytest.raises(PeerLost):
            await stream.send(0, 100, 0)
        await stream.drain(10)
        assert not scene.target.any()
        remote.close()

    async def test_peer_that_left_is_lost_and_others_go_on(self, scene: Scene) -> None:
        """After the reader closed, transfers to it raise PeerLost; a transfer to another reader works."""
        peer = scene.writer.connect(scene.remote_target.worker_address)
        remote = await peer.remote(scene.remote_target)
        stream = peer.stream(scene.region, remote)
        await stream.send(0, 100, 0)
        await stream.drain(10)
        loss: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        peer.on_failure(loss.set_result)
        await scene.reader.close()
        with pytest.raises(PeerLost):
            for _ in range(200):
                stream = peer.stream(scene.region, remote)
                await stream.send(0, 100, 0)
                stream.announce(b"late")
                await stream.drain(10)
                await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            assert isinstance(await loss, PeerLost)
        assert peer.reached, "it is the peer that has gone, and not the way to it"
        third = scene.make()
        await third.start()
        messages: asyncio.Queue[bytes] = asyncio.Queue()
        third.on_message(messages.put_nowait)
        scene.writer.connect(third.address).send(b"hello")
        async with asyncio.timeout(10):
            assert await messages.get() == b"hello"
        await third.close()
