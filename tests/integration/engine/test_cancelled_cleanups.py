"""What frees memory goes on to its end, whoever waits for it is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability
from quire.model.keys import ChunkKeys
from quire.model.ranges import ChunkRange
from quire_storage.core.residency.invariants import under_way
from quire_storage.delivery.batches import Batches
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import SHAPE, Engine, key_of

NUMBERS = list(range(8))


@pytest.mark.parametrize("after", range(1, 7))
async def test_a_promotion_ends_though_its_reader_is_cancelled(after: int) -> None:
    """Finding D12: cancelled while its reads were being stopped, it kept its slots for ever."""
    disk = SimDisk()
    engine = await Engine(disk).start()
    await engine.put(NUMBERS, Durability.LOCAL)
    await engine.stop()
    engine = await Engine(disk).start()
    free = engine.arena.slots.used_bytes
    keys = ChunkKeys(b"".join(map(key_of, NUMBERS)))
    target = RdmaTarget(b"w", 4096, len(NUMBERS) * SHAPE.bytes, b"k")
    descriptor = Descriptor(keys, SHAPE.num_layers, 1, SHAPE.slice_bytes, DeliveryOrder.LAYERWISE, target)
    held = engine.tiers.pin(list(keys))
    batches = Batches(engine.reading, engine.promotions, descriptor, (ChunkRange("", 0, len(NUMBERS)),), held.copies)
    assert any(batch.promotion for batch in batches.batches), "it reads into slots of its own"
    disk.delay_s = 0.2
    reading = [asyncio.create_task(batches.prepare(batch, 0, 0.0)) for batch in batches.batches]
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(batches.close())
    for _ in range(after):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, *reading, return_exceptions=True)
    engine.tiers.unpin(held)
    async with asyncio.timeout(20):
        while under_way(engine.residency):
            await asyncio.sleep(0.01)
    assert engine.arena.slots.used_bytes == free
    assert engine.arena.free_blocks == engine.arena._blocks
    await engine.stop()
