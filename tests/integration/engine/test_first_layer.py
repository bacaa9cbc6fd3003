"""A delivery's first layer goes out while it is being verified: no byte of it before it was looked at."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import quire_storage.core.plan as plan_module
import quire_storage.delivery as delivery_module
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability
from quire.model.keys import ChunkKeys
from quire.model.outcome import NodeOutcome
from quire.model.ranges import ChunkRange
from quire.transport import LayerReady, Message, decode_message
from quire.transport.memory import MemoryTransport
from quire_server.clock import SystemClock
from quire_storage.batches import Reading, ReadyBatch
from quire_storage.delivery import DeliverCall, Delivery, DeliveryParts
from quire_storage.fair_queue import FairQueue, Wire
from quire_storage.ports import AdmissionRequest, Grant
from quire_storage.rates import Rates
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import SHAPE, Engine, key_of, payload_of

_COUNT = 8


class _Scheduler:
    async def admit(self, request: AdmissionRequest, layers_left: int, held_bytes_per_s: int) -> Grant:
        return Grant(request.delivery, 1 << 30, 0.1)

    async def finish(self, delivery: str) -> None: ...


async def _deliver(engine: Engine) -> tuple[NodeOutcome, np.ndarray[Any, Any], list[Message]]:
    """All chunks to a client: the outcome, its memory as (layers, chunks, bytes), and what it was told."""
    node, client, told = MemoryTransport(), MemoryTransport(), list[Message]()
    await node.start()
    await client.start()
    client.on_message(lambda raw: told.append(decode_message(raw)))
    memory = np.full(SHAPE.num_layers * _COUNT * SHAPE.slice_bytes, 0xEE, dtype=np.uint8)
    theirs = client.register(memory)
    clock, source = SystemClock(), _Scheduler()
    rates: Any = source
    reading = Reading(
        tiers=engine.tiers,
        ring=engine.ring,
        threads=engine._threads,
        heal=engine.integrity.heal,
        on_corrupt=engine.integrity.give_up,
    )
    parts = DeliveryParts(
        config=engine.config,
        transport=node,
        reading=reading,
        promotions=engine.promotions,
        region=node.register(engine.arena.view),
        rates=Rates(rates, clock, 1 << 30),
        clock=clock,
        wire=Wire(8 << 20),
        chunkwise=FairQueue(8),
        theta_bytes=lambda: 0,
    )
    keys = ChunkKeys(b"".join(map(key_of, range(_COUNT))))
    target = RdmaTarget(client.address, theirs.address, memory.nbytes, theirs.remote_key)
    descriptor = Descriptor(keys, SHAPE.num_layers, 16, SHAPE.slice_bytes, DeliveryOrder.LAYERWISE, target)
    call = DeliverCall(delivery_id=b"d" * 16, descriptor=descriptor, ranges=(ChunkRange("node", 0, _COUNT),))
    pinned = await engine.tiers.pin_all(list(keys))
    async with asyncio.timeout(20):
        outcome = await Delivery(parts, call, pinned.copies).run()
    engine.tiers.unpin(pinned)
    await parts.rates.close()
    return outcome, memory.reshape(SHAPE.num_layers, _COUNT, SHAPE.slice_bytes), told


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With eight chunks in memory, which are verified and sent one by one."""
    monkeypatch.setattr(plan_module, "_VERIFY_BYTES", SHAPE.slice_bytes)
    monkeypatch.setattr(delivery_module, "_PIECE_BYTES_MIN", 1)
    monkeypatch.setattr(delivery_module, "_FIRST_PIECE_BYTES", SHAPE.slice_bytes)
    engine = await Engine(SimDisk()).start()
    await engine.put(range(_COUNT), Durability.MEMORY)
    yield engine
    await engine.stop()


def _flip(engine: Engine, number: int, layer: int) -> None:
    held = engine.residency.look(key_of(number))
    assert held is not None
    entry = engine.residency._entries[key_of(number)]
    assert entry.memory is not None
    engine.arena.view[entry.memory.offset + layer * entry.memory.layer_stride + 7] ^= 0x40


async def test_every_layer_arrives_whole(engine: Engine) -> None:
    outcome, memory, told = await _deliver(engine)
    assert not outcome.error_code
    assert [message.layer for message in told if isinstance(message, LayerReady)] == list(range(SHAPE.num_layers))
    assert np.array_equal(memory, np.stack([payload_of(each) for each in range(_COUNT)], axis=1))


@pytest.mark.parametrize("number", [0, 5, 7])
async def test_what_does_not_match_does_not_leave(engine: Engine, number: int) -> None:
    """Those before it have left by then; the layer is never announced."""
    _flip(engine, number, 0)
    outcome, memory, told = await _deliver(engine)
    assert outcome.error_code == "CorruptData" and not any(outcome.delivered)
    assert not [message for message in told if isinstance(message, LayerReady)]
    assert (memory[0, number:] == 0xEE).all(), "nothing from there on was sent"
    expected = np.stack([payload_of(each) for each in range(_COUNT)], axis=1)
    assert np.array_equal(memory[0, :number], expected[0, :number])


async def test_what_can_be_healed_is_sent_whole(engine: Engine) -> None:
    _flip(engine, 3, 0)
    engine.copies[key_of(3)] = payload_of(3)
    outcome, memory, _ = await _deliver(engine)
    assert not outcome.error_code
    assert np.array_equal(memory, np.stack([payload_of(each) for each in range(_COUNT)], axis=1))


async def test_without_the_wait_wrong_bytes_would_leave(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would say of it."""

    async def at_once(self: ReadyBatch, chunks: int) -> None:
        return

    monkeypatch.setattr(ReadyBatch, "until", at_once)
    _flip(engine, 5, 0)
    _, memory, _ = await _deliver(engine)
    assert memory[0, 5, 7] == payload_of(5)[0, 7] ^ 0x40
