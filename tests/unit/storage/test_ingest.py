"""A store's bytes on their way into slots: what a thread is still at is not given back, and parts make up the whole."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire_storage.ingest.ingest as ingest_module
from quire.model.descriptor import RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import DeadlineExceeded
from quire.model.layout import Dtype, KvLayout
from quire.model.ranges import ChunkRange
from quire.model.records import ChunkRecord, ChunkRecords
from quire.model.transfers import IngestOrder
from quire.transport import SharedMemoryTransport, Transport
from quire.transport.fair_threads import FairThreads
from quire.transport.memory import MemoryTransport
from quire_storage.core.checksums import row_checksums, slice_checksums
from quire_storage.core.pool.slots import Shape
from quire_storage.errors import SlotsUnsettled
from quire_storage.ingest.announced_layers import AnnouncedLayers
from quire_storage.ingest.arrivals import Arrival
from quire_storage.ingest.ingest import pull
from quire_storage.tiers.tiers import Slots

LAYOUT = KvLayout(4, 2, 1, 128, Dtype.FP16)
_CHUNKS, _SLICE = 7, LAYOUT.slice_bytes


class _Scene:
    """A client with chunks in its memory, and an arena with slots for some of them, not in order."""

    def __init__(self, client: Transport, node: Transport) -> None:
        self.client, self.node = client, node
        self.arena = np.zeros(64 * _SLICE, dtype=np.uint8)
        self.memory = client.allocate(LAYOUT.payload_bytes(_CHUNKS))
        self.memory[:] = np.random.default_rng(1).integers(0, 256, self.memory.nbytes, dtype=np.uint8)
        self.layers = self.memory.reshape(LAYOUT.num_layers, _CHUNKS, _SLICE)
        self.threads = ThreadPoolExecutor(2)
        mine = client.register(self.memory)
        self.source = RdmaTarget(client.address, mine.address, mine.length, mine.remote_key)
        self.region = node.register(self.arena)

    def call(self) -> IngestOrder:
        """Chunks 1, 2, 4, 5, 6 of the seven."""
        runs = (ChunkRange("node", 1, 2), ChunkRange("node", 4, 3))
        keys = [bytes([each + 1]) * 32 for each in range(5)]
        return IngestOrder(
            layout=LAYOUT,
            records=ChunkRecords.of(ChunkRecord(key, b"", key, b"") for key in keys),
            store_id=b"s" * 16,
            source=self.source,
            source_ranges=runs,
            source_chunks=_CHUNKS,
            node_index=0,
            durability=Durability.MEMORY,
            on_existing=OnExisting.SKIP,
            source_complete=True,
        )

    def slots(self, count: int) -> Slots:
        offsets = np.array([3, 4, 0, 6, 7][:count], dtype=np.int64) * _SLICE
        return Slots(0, Shape(LAYOUT.num_layers, _SLICE), offsets, 10 * _SLICE)

    async def pull(self, call: IngestOrder, slots: Slots) -> list[Any]:
        self.arrival = Arrival([record.key for record in call.records], call.store_id, slots)
        return await pull(
            call,
            slots,
            self.arena,
            self.region,
            self.node,
            AnnouncedLayers(),
            FairThreads(self.threads),
            self.arrival,
            timeout_s=5,
            now_ms=0,
        )


@pytest.fixture(params=[MemoryTransport, SharedMemoryTransport])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    shared = request.param is SharedMemoryTransport
    client, node = ((SharedMemoryTransport(tmp_path) if shared else MemoryTransport()) for _ in range(2))
    await client.start()
    await node.start()
    yield _Scene(client, node)
    await client.close()
    await node.close()


async def test_every_slice_is_where_it_belongs_with_its_checksum(scene: _Scene) -> None:
    slots = scene.slots(5)
    chunks = await scene.pull(scene.call(), slots)
    for chunk, offset, source in zip(chunks, slots.offsets.tolist(), (1, 2, 4, 5, 6), strict=True):
        for layer in range(LAYOUT.num_layers):
            at = offset + layer * slots.layer_stride
            assert np.array_equal(scene.arena[at : at + _SLICE], scene.layers[layer, source])
        assert np.array_equal(chunk.checksums, row_checksums(scene.layers[:, source]))


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_groups_make_up_the_whole(size: int) -> None:
    call = _Scene(MemoryTransport(), MemoryTransport()).call()
    groups = call.groups(size)
    assert [record for group in groups for record in group.records] == list(call.records)
    places = [at for group in groups for run in group.source_ranges for at in range(run.first, run.stop)]
    assert places == [1, 2, 4, 5, 6]
    assert all(len(group.records) == sum(run.count for run in group.source_ranges) <= size for group in groups)


@pytest.mark.parametrize("ends", ["it lands", "its deadline passes"])
async def test_slots_are_kept_until_what_was_being_read_has_landed(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated seed 54: a store was cancelled, and its read landed on what had got the slot since."""
    scene = _Scene(MemoryTransport(), MemoryTransport())
    await scene.client.start()
    await scene.node.start()
    reading, go = asyncio.Event(), asyncio.Event()
    peer: Any = scene.node.connect(scene.client.address)
    get = peer.get

    async def slow(*arguments: Any, **options: Any) -> None:
        reading.set()
        await go.wait()
        if ends == "its deadline passes":
            raise DeadlineExceeded("the peer does not answer")
        await get(*arguments, **options)

    async def in_flight(timeout_s: float) -> None:
        raise DeadlineExceeded("transfers are in flight")

    monkeypatch.setattr(peer, "get", slow)
    monkeypatch.setattr(peer, "settle", in_flight)
    monkeypatch.setattr(scene.node, "connect", lambda address: peer)
    pulling = asyncio.create_task(scene.pull(scene.call(), scene.slots(5)))
    await reading.wait()
    for _ in range(2):
        pulling.cancel()
        await asyncio.sleep(0.05)
        assert not pulling.done(), "something is at the slots"
    go.set()
    with pytest.raises(asyncio.CancelledError if ends == "it lands" else SlotsUnsettled):
        await pulling


async def test_slots_are_kept_until_the_thread_has_let_go(scene: _Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is cancelled ends when nothing is at its slots any more."""
    begun, go = threading.Event(), threading.Event()
    real = slice_checksums

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(10)
        return real(*arguments)

    monkeypatch.setattr(ingest_module, "slice_checksums", slow)
    pulling = asyncio.create_task(scene.pull(scene.call(), scene.slots(5)))
    assert await asyncio.to_thread(begun.wait, 10)
    pulling.cancel()
    await asyncio.sleep(0.1)
    assert not pulling.done(), "a thread is at the slots"
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await pulling
