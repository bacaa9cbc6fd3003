"""A delivery's first layer goes out while it is being verified: no byte of it before it was looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire_storage.core.plan as plan_module
import quire_storage.delivery.delivery as delivery_module
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability
from quire.model.keys import ChunkKeys
from quire.model.outcome import NodeOutcome
from quire.model.policy import Theta
from quire.model.ranges import ChunkRange
from quire.model.transfers import DeliverOrder
from quire.transport import LayerReady, Message, Quiesced, SharedMemoryTransport, Transport, decode_message
from quire.transport.memory import MemoryTransport
from quire_server.clock import SystemClock
from quire_storage.core.plan import BatchPlan
from quire_storage.delivery.batches import ReadyBatch
from quire_storage.delivery.delivery import DeliveryParts, NodeDelivery
from quire_storage.delivery.fair_queue import Wire, WireQueue
from quire_storage.delivery.rates import Rates
from quire_storage.ports import AdmissionRequest, RateGrant
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import SHAPE, Engine, key_of, payload_of

_COUNT = 8


class _Scheduler:
    async def admit(self, request: AdmissionRequest, layers_left: int, held_bytes_per_s: int) -> RateGrant:
        return RateGrant(request.delivery, 1 << 30, 0.1)

    async def finish(self, delivery: str) -> None: ...


async def _deliver(engine: Engine, pair: Pair) -> tuple[NodeOutcome, np.ndarray[Any, Any], list[Message]]:
    """All chunks to a client: the outcome, its memory as (layers, chunks, bytes), and what it was told."""
    (node, client), told = pair, list[Message]()
    client.on_message(lambda raw: told.append(decode_message(raw)))
    memory = client.allocate(SHAPE.num_layers * _COUNT * SHAPE.slice_bytes)
    memory[:] = 0xEE
    theirs = client.register(memory)
    clock, source = SystemClock(), _Scheduler()
    rates: Any = source
    parts = DeliveryParts(
        config=engine.config,
        transport=node,
        reading=engine.reading,
        promotions=engine.promotions,
        region=node.register(engine.arena.view),
        rates=Rates(rates, clock, 1 << 30),
        clock=clock,
        wire=Wire(8 << 20),
        chunkwise=WireQueue(8),
        theta=Theta,
    )
    keys = ChunkKeys(b"".join(map(key_of, range(_COUNT))))
    target = RdmaTarget(client.address, theirs.address, memory.nbytes, theirs.remote_key)
    descriptor = Descriptor(keys, SHAPE.num_layers, 16, SHAPE.slice_bytes, DeliveryOrder.LAYERWISE, target)
    call = DeliverOrder(delivery_id=b"d" * 16, descriptor=descriptor, ranges=(ChunkRange("node", 0, _COUNT),))
    pinned = engine.tiers.pin(list(keys))
    async with asyncio.timeout(20):
        outcome = await NodeDelivery(parts, call, pinned.copies).run()
    engine.tiers.unpin(pinned)
    await parts.rates.close()
    async with asyncio.timeout(5):
        while not any(isinstance(message, Quiesced) for message in told):
            await asyncio.sleep(0.005)
    return outcome, memory.reshape(SHAPE.num_layers, _COUNT, SHAPE.slice_bytes), told


Pair = tuple[Transport, Transport]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """A node's transport and a client's."""
    async for each in _started(MemoryTransport(), MemoryTransport()):
        yield each


@pytest.fixture
async def shared_pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """The same on one host."""
    async for each in _started(SharedMemoryTransport(tmp_path), SharedMemoryTransport(tmp_path)):
        yield each


async def _started(node: Transport, client: Transport) -> AsyncIterator[Pair]:
    await node.start()
    await client.start()
    yield node, client
    await client.close()
    await node.close()


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With eight chunks in memory, which are verified and sent one by one."""
    monkeypatch.setattr(plan_module, "_VERIFY_BYTES", SHAPE.slice_bytes)
    monkeypatch.setattr(plan_module, "_CARRY_BYTES", SHAPE.slice_bytes)
    monkeypatch.setattr(delivery_module, "_PIECE_BYTES_MIN", 1)
    monkeypatch.setattr(delivery_module, "_FIRST_PIECE_BYTES", SHAPE.slice_bytes)
    engine = await Engine(SimDisk()).start()
    await engine.put(range(_COUNT), Durability.MEMORY)
    yield engine
    await engine.stop()


def _flip(engine: Engine, number: int, layer: int) -> None:
    held = engine.residency.look(key_of(number))
    assert held is not None
    entry = engine.residency.copies.entries[key_of(number)]
    assert entry.memory is not None
    engine.arena.view[entry.memory.offset + layer * entry.memory.layer_stride + 7] ^= 0x40


def _whole() -> np.ndarray[Any, Any]:
    return np.stack([payload_of(each) for each in range(_COUNT)], axis=1)


async def test_every_layer_arrives_whole(engine: Engine, pair: Pair) -> None:
    outcome, memory, told = await _deliver(engine, pair)
    assert not outcome.error_code
    assert [message.layer for message in told if isinstance(message, LayerReady)] == list(range(SHAPE.num_layers))
    assert np.array_equal(memory, _whole())


@pytest.mark.parametrize("number", [0, 5, 7])
async def test_what_does_not_match_does_not_leave(engine: Engine, pair: Pair, number: int) -> None:
    """Those before it have left by then; the layer is never announced."""
    _flip(engine, number, 0)
    outcome, memory, told = await _deliver(engine, pair)
    assert outcome.error_code == "CorruptData" and not any(outcome.delivered)
    assert not [message for message in told if isinstance(message, LayerReady)]
    assert (memory[0, number:] == 0xEE).all(), "nothing from there on was sent"
    assert np.array_equal(memory[0, :number], _whole()[0, :number])


async def test_what_can_be_healed_is_sent_whole(engine: Engine, pair: Pair) -> None:
    _flip(engine, 3, 0)
    engine.copies[key_of(3)] = payload_of(3)
    outcome, memory, _ = await _deliver(engine, pair)
    assert not outcome.error_code
    assert np.array_equal(memory, _whole())


async def test_without_the_wait_wrong_bytes_would_leave(
    engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would say of it."""

    async def at_once(self: ReadyBatch, chunks: int) -> None:
        return

    monkeypatch.setattr(ReadyBatch, "until", at_once)
    _flip(engine, 5, 0)
    _, memory, _ = await _deliver(engine, pair)
    assert memory[0, 5, 7] == payload_of(5)[0, 7] ^ 0x40


# ---- on one host: verified and copied in one pass


async def test_every_layer_is_copied_whole(engine: Engine, shared_pair: Pair) -> None:
    outcome, memory, told = await _deliver(engine, shared_pair)
    assert not outcome.error_code and outcome.bytes_moved == memory.nbytes and not outcome.scheduled
    assert [message.layer for message in told if isinstance(message, LayerReady)] == list(range(SHAPE.num_layers))
    assert np.array_equal(memory, _whole())


@pytest.mark.parametrize("layer", [0, SHAPE.num_layers - 1])
@pytest.mark.parametrize("number", [0, 5, 7])
async def test_what_does_not_match_is_not_copied(engine: Engine, shared_pair: Pair, number: int, layer: int) -> None:
    _flip(engine, number, layer)
    outcome, memory, told = await _deliver(engine, shared_pair)
    assert outcome.error_code == "CorruptData" and not any(outcome.delivered)
    assert [message.layer for message in told if isinstance(message, LayerReady)] == list(range(layer))
    assert (memory[layer, number:] == 0xEE).all(), "nothing from there on was copied"
    assert np.array_equal(memory[layer, :number], _whole()[layer, :number])


@pytest.mark.parametrize("layer", [0, SHAPE.num_layers - 1])
async def test_what_can_be_healed_is_copied_whole(engine: Engine, shared_pair: Pair, layer: int) -> None:
    """The thread waits for it; what is announced is what was healed."""
    _flip(engine, 3, layer)
    engine.copies[key_of(3)] = payload_of(3)
    outcome, memory, told = await _deliver(engine, shared_pair)
    assert not outcome.error_code
    assert np.array_equal(memory, _whole())
    assert len([message for message in told if isinstance(message, LayerReady)]) == SHAPE.num_layers


async def test_copied_unseen_wrong_bytes_would_be_announced(
    engine: Engine, shared_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would say of it."""
    carry = BatchPlan.carry

    def unseen(self: BatchPlan, arena: Any, memory: Any, layer: int, shift: int, parts: Any, mend: Any) -> None:
        carry(self, arena, memory, layer, shift, parts, None)

    monkeypatch.setattr(BatchPlan, "carry", unseen)
    _flip(engine, 5, 0)
    _, memory, _ = await _deliver(engine, shared_pair)
    assert memory[0, 5, 7] == payload_of(5)[0, 7] ^ 0x40


async def test_from_drives_it_is_verified_on_the_way_too(shared_pair: Pair) -> None:
    disk = SimDisk()
    before = await Engine(disk).start()
    await before.put(range(_COUNT), Durability.LOCAL)
    await before.stop()
    engine = await Engine(disk).start()
    outcome, memory, _ = await _deliver(engine, shared_pair)
    assert not outcome.error_code and np.array_equal(memory, _whole())
    await engine.stop()
