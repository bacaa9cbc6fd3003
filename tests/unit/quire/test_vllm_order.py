"""The order of copies and vLLM's own work, on a device that runs nothing before it has to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quire.client import Buffer, Lookup
from quire.integrations.staging import StagingPool
from quire.integrations.vllm.plan import LoadPlan, StorePlan
from quire.integrations.vllm.scheduler.load_cost import LinkTime
from quire.integrations.vllm.workers.blocks import KvBlocks
from quire.integrations.vllm.workers.loads import Loads
from quire.integrations.vllm.workers.stores import BlockStores
from quire.integrations.vllm.workers.worker import WorkerParts
from quire.model.durability import Durability
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.testing.devices import LateDevice
from quire.transport.memory import MemoryTransport
from tests.polling import until
from tests.unit.quire.late_engine import LIMIT_S, LoopClient, NoAfter, NoOrder, TooEarly

LAYERS, BLOCKS, SLAB = 3, 6, 4096
TAKEN = (4, 1)
OLD, NEW, LATER = 5, 7, 9
SPACE = Namespace("m", "w", KvLayout(LAYERS, 32, 2, 16, Dtype.BF16))


class _Engine:
    """vLLM's side: its blocks, filled with `OLD`, and a worker's parts."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.begin = device, device.engine.add
        self.memory = torch.full((LAYERS, BLOCKS, SLAB), OLD, dtype=torch.uint8)
        self.client = LoopClient(np.full((LAYERS, len(TAKEN), SLAB), NEW, dtype=np.uint8))
        self.pool = StagingPool(Buffer.allocate(MemoryTransport(), LAYERS * len(TAKEN) * SLAB))
        client: Any = self.client
        blocks = KvBlocks({f"layer.{number}": layer for number, layer in enumerate(self.memory)})
        self.parts = WorkerParts(
            client=client, blocks=blocks, pool=self.pool, copies=device, shard=0, count=lambda *_: None
        )

    def reading(self, layer: int) -> torch.Tensor:
        """Have vLLM read a layer's blocks; the result is there when its work has run."""
        read = torch.zeros(len(TAKEN), SLAB, dtype=torch.uint8)
        self.begin(lambda: read.copy_(self.memory[layer, list(TAKEN)]))
        return read

    def writing(self, layer: int, value: int) -> None:
        """Have vLLM write a layer's blocks."""
        self.begin(lambda: self.memory[layer].index_fill_(0, torch.tensor(TAKEN), value))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[_Engine]:
    running = _Engine(getattr(request, "param", LateDevice)())
    yield running
    running.client.close()


def _plan(*, asynchronous: bool) -> LoadPlan:
    lookups = (Lookup(SPACE, ChunkKeys(bytes(32 * len(TAKEN))), b"", (), {}, 0),)
    return LoadPlan(request_id="r", group=0, found=lookups, first=0, blocks=TAKEN, asynchronous=asynchronous)


def _load(engine: _Engine, *, asynchronous: bool) -> tuple[Loads, int]:
    free = engine.pool.free_bytes
    loads = Loads(engine.parts, direct=None, timeout_s=LIMIT_S, link=LinkTime(time.monotonic))
    loads.start(_plan(asynchronous=asynchronous))
    return loads, free


def _layerwise(engine: _Engine, *, engine_first: bool) -> None:
    """Load layer by layer: vLLM reads old bytes before and new ones behind, and staging memory is back.

    `engine_first`: vLLM is ahead of copies.
    """
    old_reads = [engine.reading(layer) for layer in range(LAYERS)]
    loads, free = _load(engine, asynchronous=False)
    new_reads = []
    for layer in range(LAYERS):
        loads.layer(layer)
        new_reads.append(engine.reading(layer))
    if engine_first:
        engine.device.engine.run_all()
    loads.finish_step()
    assert engine.pool.free_bytes == free
    engine.device.engine.run_all()
    engine.client.settle()
    assert all((read == OLD).all() for read in old_reads) and all((read == NEW).all() for read in new_reads)


def _received(engine: _Engine) -> None:
    """Load while steps go on: received blocks are complete."""
    old_reads = [engine.reading(layer) for layer in range(LAYERS)]
    loads, free = _load(engine, asynchronous=True)
    assert until(loads.received, timeout_s=LIMIT_S) == {"r": True}
    assert (engine.memory[:, list(TAKEN)] == NEW).all() and engine.pool.free_bytes == free
    engine.client.settle()
    assert all((read == OLD).all() for read in old_reads)


def _stored(engine: _Engine, *, engine_first: bool) -> None:
    """Store the blocks of a step; vLLM then writes others there. `engine_first`: vLLM is ahead of copies."""
    engine.device.copies.is_queried = not engine_first
    stores = BlockStores(engine.parts, Durability.MEMORY)
    stores.start(
        StorePlan(
            request_id="r",
            group=0,
            namespaces=(SPACE,),
            keys=(ChunkKeys(bytes(64)),),
            known=0,
            first=0,
            blocks=TAKEN,
        )
    )
    for layer in range(LAYERS):
        engine.writing(layer, NEW)
        stores.layer(layer)
    stores.finish_step()
    for layer in range(LAYERS):
        engine.writing(layer, LATER)
    if not engine_first:
        engine.client.settle()
    engine.device.engine.run_all()
    engine.device.copies.run_all()
    engine.client.settle()
    assert len(engine.client.sent) == LAYERS and all((sent == NEW).all() for sent in engine.client.sent)
    assert (engine.memory[:, list(TAKEN)] == LATER).all()


@pytest.mark.parametrize("engine_first", [True, False])
def test_layers_are_in_the_blocks_when_vllm_reads_them(engine: _Engine, engine_first: bool) -> None:
    _layerwise(engine, engine_first=engine_first)


def test_a_load_is_received_when_its_copies_have_run(engine: _Engine) -> None:
    _received(engine)


def test_nodes_write_to_blocks_that_vllm_reads_no_more(engine: _Engine) -> None:
    """Straight into the blocks: no copy waits for vLLM's work, so the delivery does."""
    engine.begin(lambda: engine.client.log.append("read"))
    memory = Buffer.allocate(MemoryTransport(), LAYERS * len(TAKEN) * SLAB)
    direct = (memory, SLAB, np.arange(BLOCKS, dtype=np.int64) * SLAB)
    loads = Loads(engine.parts, direct=direct, timeout_s=LIMIT_S, link=LinkTime(time.monotonic))
    loads.start(_plan(asynchronous=True))
    assert until(loads.received, timeout_s=LIMIT_S) == {"r": True}
    assert engine.client.log == ["read", "fetch"]


@pytest.mark.parametrize("engine_first", [True, False])
def test_what_is_sent_is_what_the_step_computed(engine: _Engine, engine_first: bool) -> None:
    _stored(engine, engine_first=engine_first)


@pytest.mark.parametrize(("engine", "engine_first"), [(NoOrder, True), (NoAfter, False)], indirect=["engine"])
def test_a_layerwise_load_with_a_fault_is_found(engine: _Engine, engine_first: bool) -> None:
    with pytest.raises(AssertionError):
        _layerwise(engine, engine_first=engine_first)


@pytest.mark.parametrize("engine", [NoAfter, TooEarly], indirect=True)
def test_an_asynchronous_load_with_a_fault_is_found(engine: _Engine) -> None:
    with pytest.raises(AssertionError):
        _received(engine)


@pytest.mark.parametrize(
    ("engine", "engine_first"),
    [(NoOrder, True), (NoAfter, False), (TooEarly, True), (TooEarly, False)],
    indirect=["engine"],
)
def test_a_store_with_a_fault_is_found(engine: _Engine, engine_first: bool) -> None:
    with pytest.raises(AssertionError):
        _stored(engine, engine_first=engine_first)
