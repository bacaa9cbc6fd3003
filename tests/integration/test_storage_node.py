"""A storage node in this process, on the memory transport, with an index that misbehaves: who owns a slot, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import DeadlineExceeded, KeysInvalid, MetadataUnavailable, NodeUnavailable
from quire.model.index import Drop, Held, Listing, ObjectMark
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.nodes import Node, StorageInfo
from quire.model.outcome import NodeOutcome
from quire.model.policy import PolicyList
from quire.model.ranges import ChunkRange
from quire.model.records import ChunkRecord, ChunkRecords
from quire.model.transfers import DeliverOrder, IngestOrder
from quire.transport import LayerProduced, Quiesced, decode_message
from quire.transport.memory import MemoryStream, MemoryTransport
from quire.transport.messages import encode_message
from quire_server.clock import SystemClock
from quire_storage.adapters.block_io import choose_block_io
from quire_storage.adapters.drives import FileDrives
from quire_storage.config import StorageConfig
from quire_storage.core.pool.slots import Shape
from quire_storage.node import StorageNode
from quire_storage.ports import AdmissionRequest, Ports, RateGrant

LAYOUT = KvLayout(2, 16, 1, 32, Dtype.FP16)
ROOM = Shape(LAYOUT.num_layers, LAYOUT.slice_bytes).slot_bytes


@dataclass(slots=True)
class ScriptedIndex:
    """Answers `commit` from a script: a list of marks, or an exception; after its end everything is indexed."""

    script: list[list[bool] | Exception] = field(default_factory=list)
    committed: list[bytes] = field(default_factory=list)
    withdrawn: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)

    async def commit(
        self, node_id: str, records: Sequence[ChunkRecord], *, reporter: str, fresh: int = 0, wait_ms: int = 0
    ) -> list[int]:
        await asyncio.sleep(0)
        answer = self.script.pop(0) if self.script else [True] * len(records)
        if isinstance(answer, Exception):
            raise answer
        self.committed += [record.key for record, mark in zip(records, answer, strict=True) if mark]
        return [int(mark) for mark in answer]

    async def join(
        self, node_id: str, records: Sequence[ChunkRecord], generations: Sequence[int], *, only_in_object: bool
    ) -> list[bool]:
        return [True] * len(records)

    async def add_objects(
        self, records: Sequence[ChunkRecord], generations: Sequence[int], *, reporter: str
    ) -> list[ObjectMark]:
        return [ObjectMark.LISTED] * len(records)

    async def expect_objects(self, records: Sequence[ChunkRecord]) -> list[bool]:
        return [True] * len(records)

    async def object_generations(self, records: Sequence[ChunkRecord]) -> tuple[list[int], bool]:
        return [0] * len(records), True

    async def withdraw_in_object(self, node_id: str, records: Sequence[ChunkRecord]) -> list[bool]:
        return [True] * len(records)

    async def listing(self, node_id: str) -> Listing:
        return Listing()

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[Held], int]:
        return [], 0

    async def withdraw_held(self, node_id: str, held: Sequence[Held]) -> None: ...
    async def damaged(self, node_id: str) -> None: ...
    async def rebuilt(self, token: str) -> None: ...

    async def withdraw_surplus(
        self, node_id: str, records: Sequence[ChunkRecord], keepers: Sequence[str]
    ) -> list[bool]:
        return [False] * len(records)

    async def evict(self, node_id: str, records: Sequence[ChunkRecord]) -> list[bool]:
        self.evicted += [record.key for record in records]
        return [True] * len(records)

    async def locate(self, records: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        return [()] * len(records)

    async def policies(self) -> PolicyList:
        return PolicyList(storage_nodes=1)

    async def generations(self, node_id: str, records: Sequence[ChunkRecord]) -> list[int]:
        return [0] * len(records)

    async def drops(self, node_id: str, cursor: int) -> tuple[list[Drop], int]:
        return [], 0

    async def settle_drops(self, node_id: str, drops: Sequence[Drop]) -> None: ...

    async def withdraw(
        self, node_id: str, records: Sequence[ChunkRecord], *, reporter: str, hidden: bool = False
    ) -> None:
        self.withdrawn += [record.key for record in records]


class OpenValve:
    """A scheduler that grants whatever is asked."""

    async def admit(self, request: AdmissionRequest, layers_left: int, held_bytes_per_s: int) -> RateGrant:
        return RateGrant(request.delivery, 10**9, 1.0)

    async def renew(self, layers_left: dict[str, int]) -> list[RateGrant]:
        return [RateGrant(name, 10**9, 1.0) for name in layers_left]

    async def finish(self, delivery: str) -> None: ...
    async def observe(self, request: AdmissionRequest, rate_bytes_per_s: int, stall_s: float) -> None: ...


class Alone:
    """No other storage node."""

    async def storage_nodes(self) -> list[Node]:
        return []

    async def described(self) -> list[Node]:
        return []

    async def describe(self, node: Node, keys: ChunkKeys) -> list[bytes]:
        raise NodeUnavailable(node.node_id)

    async def deliver(self, node: Node, descriptor: Descriptor) -> NodeOutcome:
        raise NodeUnavailable(node.node_id)

    async def replicate(
        self,
        node: Node,
        generations: Mapping[bytes, int],
        source: Node,
        *,
        level: Durability = Durability.REPLICATED,
        hot: bool = False,
    ) -> list[int]:
        raise NodeUnavailable(node.node_id)


@dataclass(slots=True)
class Scene:
    node: StorageNode
    index: ScriptedIndex
    client: MemoryTransport
    node_address: bytes


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """Its parameter: seconds for which the index is asked."""
    timeout_s = getattr(request, "param", 30.0)
    config = StorageConfig(arena_bytes=1 << 20, slab_bytes=1 << 16, index_timeout_s=timeout_s, cluster_secret="s")
    index, transport, client = ScriptedIndex(), MemoryTransport(), MemoryTransport()
    ports = Ports(
        index=index,
        rates=OpenValve(),
        peers=Alone(),
        objects=None,
        drives=FileDrives,
        block_io=choose_block_io,
        clock=SystemClock(),
    )
    node = StorageNode(config, transport, ports, lambda: Node(node_id="storage-0", about=StorageInfo()), checked=1)
    await node.start()
    await client.start()
    yield Scene(node, index, client, transport.address)
    await node.close()
    await client.close()


def _listed(scene: Scene, *numbers: int) -> dict[bytes, int]:
    """The generations under which chunks are listed, or are about to be."""
    return {_key(number): scene.node._tiers.residency.recorded(_key(number)) or 1 for number in numbers}


def _key(index: int) -> bytes:
    return bytes([index]) * 32


async def _store(scene: Scene, chunks: int, payload: npt.NDArray[np.uint8], transfer: bytes = b"t" * 16) -> bytes:
    """Store chunks 0 … chunks-1; the outcome's marks."""
    region = scene.client.register(payload)
    source = RdmaTarget(scene.client.address, region.address, region.length, region.remote_key)
    records = [ChunkRecord(_key(i), _key(i - 1) if i else b"", _key(0), _key(0) if i else b"") for i in range(chunks)]
    call = IngestOrder(
        layout=LAYOUT,
        records=ChunkRecords.of(records),
        store_id=transfer,
        source=source,
        source_ranges=(ChunkRange("storage-0", 0, chunks),),
        source_chunks=chunks,
        node_index=0,
        durability=Durability.MEMORY,
        on_existing=OnExisting.SKIP,
    )
    for layer in range(LAYOUT.num_layers):
        scene.client.connect(scene.node_address).send(encode_message(LayerProduced(transfer, layer)))
    return (await scene.node.requests.ingest(call)).delivered


def _payload(chunks: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.payload_bytes(chunks), dtype=np.uint8)


async def test_an_index_that_fails_half_way_keeps_what_it_has_and_frees_the_rest_once(scene: Scene) -> None:
    """Two of three are indexed when Redis goes away: those two stay readable and keep their slots."""
    scene.index.script = [[True, True, False], MetadataUnavailable("gone")]
    with pytest.raises(MetadataUnavailable):
        await _store(scene, 3, _payload(3))
    assert scene.node.used_bytes == 2 * ROOM
    assert await scene.node.requests.drop(_listed(scene, 0, 1, 2)) == 2
    assert scene.node.used_bytes == 0


@pytest.mark.parametrize("scene", [0.3], indirect=True)
async def test_a_chunk_whose_parent_never_comes_is_not_acknowledged(scene: Scene) -> None:
    scene.index.script = [[True, False], *([False] for _ in range(1000))]
    assert await _store(scene, 2, _payload(2)) == b"\1\0"
    assert scene.node.used_bytes == ROOM


async def test_a_second_store_indexes_what_the_first_could_not(scene: Scene) -> None:
    """Chunks that are here but not in the index are indexed by the next store, not just acknowledged."""
    assert await _store(scene, 2, _payload(2)) == b"\1\1"
    scene.index.committed.clear()
    assert await _store(scene, 2, _payload(2), b"u" * 16) == b"\1\1"
    assert scene.index.committed == [_key(0), _key(1)]
    assert scene.node.used_bytes == 2 * ROOM


async def test_a_drop_while_the_index_is_asked_frees_the_slot_once(scene: Scene) -> None:
    """A chunk is readable before it is indexed; a drop in between takes its slot, the store must not free it again."""
    scene.index.script = [[False]] * 5
    storing = asyncio.create_task(_store(scene, 1, _payload(1)))
    async with asyncio.timeout(20):
        while scene.node.used_bytes == 0 or not len(scene.index.script) < 5:
            await asyncio.sleep(0.005)
    assert await scene.node.requests.drop(_listed(scene, 0)) == 1
    await storing
    assert scene.node.used_bytes == 0
    assert await _store(scene, 1, _payload(1), b"v" * 16) == b"\1"
    assert scene.node.used_bytes == ROOM


async def test_a_store_with_a_repeated_key_is_refused_before_anything_is_taken(scene: Scene) -> None:
    """Finding 1: the second copy's slot was freed while the table still listed it, and went to another client."""
    region = scene.client.register(_payload(2))
    source = RdmaTarget(scene.client.address, region.address, region.length, region.remote_key)
    twice = [ChunkRecord(_key(0), b"", _key(0), b"")] * 2
    with pytest.raises(KeysInvalid, match="twice"):
        IngestOrder(
            layout=LAYOUT,
            records=ChunkRecords.of(twice),
            store_id=b"t" * 16,
            source=source,
            source_ranges=(ChunkRange("storage-0", 0, 2),),
            source_chunks=2,
            node_index=0,
            durability=Durability.MEMORY,
            on_existing=OnExisting.SKIP,
        )
    assert scene.node.used_bytes == 0


def _descriptor(scene: Scene, target: npt.NDArray[np.uint8]) -> Descriptor:
    region = scene.client.register(target)
    return Descriptor(
        ChunkKeys(_key(0)),
        LAYOUT.num_layers,
        16,
        LAYOUT.slice_bytes,
        DeliveryOrder.CHUNKWISE,
        RdmaTarget(scene.client.address, region.address, region.length, region.remote_key),
    )


async def test_a_delivery_whose_writes_are_in_flight_does_not_say_quiesced(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 5: `quiesced` gives the buffer back, so it is said only once nothing is in flight."""
    await _store(scene, 1, _payload(1))

    async def never(stream: MemoryStream, timeout_s: float) -> None:
        await asyncio.sleep(0.01)
        raise DeadlineExceeded("puts are still in flight")

    monkeypatch.setattr(MemoryStream, "drain", never)
    heard: list[bytes] = []
    scene.client.on_message(heard.append)
    descriptor = _descriptor(scene, np.zeros(LAYOUT.payload_bytes(1), dtype=np.uint8))
    call = DeliverOrder(delivery_id=b"d" * 16, descriptor=descriptor, ranges=(ChunkRange("storage-0", 0, 1),))
    events = [event async for event in scene.node.deliveries.deliver(call)]
    outcome = events[-1]
    assert isinstance(outcome, NodeOutcome)
    assert outcome.error_code == "DeadlineExceeded"
    assert not outcome.quiesced
    assert not any(isinstance(decode_message(raw), Quiesced) for raw in heard)
