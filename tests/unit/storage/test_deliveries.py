"""How many deliveries a node takes, and for how long a delivery's id is taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from quire.model.chunk_object import write_chunk_object
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.errors import DescriptorInvalid, LayoutInvalid, PeerLost, TooManyRequests, TransferRunning
from quire.model.index import OBJECT_TIER
from quire.model.keys import ChunkKeys
from quire.model.policy import TenantPolicy
from quire.model.ranges import ChunkRange
from quire.model.records import ChunkRecord, ChunkRecords
from quire.model.transfers import DeliverOrder
from quire.testing import FakeClock
from quire.testing.objects import MemoryObjects
from quire_storage.config import StorageConfig
from quire_storage.core.pool.slots import Shape
from quire_storage.delivery import deliveries as module
from quire_storage.delivery.deliveries import Deliveries
from quire_storage.delivery.object_loads import LoadParts, ObjectChunk, ObjectLoads
from quire_storage.delivery.transfers import Transfers
from quire_storage.ingest.arrivals import Arrivals
from quire_storage.tiers.object_tier import ChunkObjects
from quire_storage.tiers.tiers import Slots


class _Node:
    """Its tiers and loads: the object tier alone has the chunk, and answers once `found` is set."""

    objects: Any = None

    def __init__(self) -> None:
        self.found = asyncio.Event()
        self.unpinned = 0

    def pin(self, keys: Any) -> Any:
        return SimpleNamespace(copies=[], missing=keys)

    def find(self, *arguments: Any) -> Any:
        """No copy is here; or what the object tier has."""
        return self._in_object_tier(*arguments) if len(arguments) > 1 else None

    async def _in_object_tier(self, records: Any, shape: Shape) -> dict[bytes, ObjectChunk]:
        await self.found.wait()
        return {record.key: ObjectChunk(record.key, 1, shape) for record in records}

    def follow(self, *_: Any) -> list[int]:
        return []

    def check_shape(self, shape: Any) -> None:
        raise LayoutInvalid("a slice is larger than a staging block")

    def unpin(self, pinned: Any) -> None:
        self.unpinned += 1


class _Delivery:
    """Its puts are in flight until `quiet` is set, however it ends."""

    quiet: asyncio.Event
    peer = None

    def __init__(self, *_: Any) -> None:
        self._cancelled = asyncio.Event()

    @property
    def settled(self) -> bool:
        return self.quiet.is_set()

    async def layers(self) -> AsyncIterator[int]:
        yield 0

    async def run(self) -> Any:
        await self._cancelled.wait()
        return SimpleNamespace(bytes_moved=0, order=DeliveryOrder.LAYERWISE, scheduled=False, error_code="")

    def cancel(self) -> None:
        self._cancelled.set()

    async def linger(self) -> None:
        await self.quiet.wait()


def _call(number: int) -> DeliverOrder:
    target = RdmaTarget(b"w", 4096, 64, b"k")
    descriptor = Descriptor(ChunkKeys(bytes(32)), 1, 16, 64, DeliveryOrder.LAYERWISE, target)
    ranges = (ChunkRange("storage-0", 0, 1),)
    return DeliverOrder(delivery_id=bytes([number]) * 16, descriptor=descriptor, ranges=ranges)


async def _first(events: AsyncIterator[Any]) -> Any:
    return await anext(events)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> tuple[Deliveries, _Node]:
    tiers: Any = _Node()
    _Delivery.quiet = asyncio.Event()
    monkeypatch.setattr(module, "NodeDelivery", _Delivery)
    config = StorageConfig(cluster_secret="s", node_id="storage-0", deliveries_max=2)
    spawn: Any = lambda work, traced=False: asyncio.get_running_loop().create_task(work)  # noqa: E731
    reading = SimpleNamespace(reading=SimpleNamespace(loads=tiers), clock=FakeClock())
    parts: Any = {"config": config, "parts": reading, "tiers": tiers, "registry": None, "on_read": None}
    parts |= {"transfers": Transfers(FakeClock()), "arrivals": Arrivals()}
    return Deliveries(spawn=spawn, **parts), tiers


async def test_those_that_wait_for_a_slow_tier_count(node: tuple[Deliveries, _Node]) -> None:
    """All of them ran at once when the object tier had answered."""
    deliveries, _ = node
    waiting = [asyncio.create_task(_first(deliveries.deliver(_call(number)))) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests):
        await anext(deliveries.deliver(_call(2)))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not deliveries._room.taken, "one that is given up makes room"


async def test_a_shape_is_checked_before_a_load_of_the_object_tier(node: tuple[Deliveries, _Node]) -> None:
    """A slice that is larger than a staging block would be written over the blocks behind it."""
    deliveries, tiers = node
    none: Any = None
    loads = ObjectLoads(LoadParts(tiers=cast(Any, tiers), objects=none, threads=none, clock=none, heal=none))
    deliveries._parts.reading.loads = loads  # type: ignore[misc]
    with pytest.raises(LayoutInvalid):
        await anext(deliveries.deliver(_call(1)))
    assert tiers.unpinned == 1 and not deliveries._room.taken


async def test_one_tenant_leaves_room_to_others(node: tuple[Deliveries, _Node]) -> None:
    deliveries, _ = node

    def of(tenant: str, number: int) -> DeliverOrder:
        return replace(_call(number), tenant=TenantPolicy(tenant))

    waiting = [asyncio.create_task(_first(deliveries.deliver(of("greedy", 0))))]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests) as refused:
        await anext(deliveries.deliver(of("greedy", 1)))
    assert refused.value.retry_after_s
    waiting.append(asyncio.create_task(_first(deliveries.deliver(of("modest", 2)))))
    await asyncio.sleep(0)
    assert deliveries._room.taken == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_store_that_has_just_failed_is_not_waited_for(node: tuple[Deliveries, _Node]) -> None:
    """A follower comes when the store's announcement is not withdrawn yet."""
    deliveries, tiers = node
    keys, slots = [bytes(32)], Slots(1, Shape(1, 64), np.zeros(1, dtype=np.int64), 64)
    order: Any = SimpleNamespace(
        records=ChunkRecords.of(ChunkRecord(key, b"", key, b"") for key in keys), store_id=b"s" * 16
    )
    with pytest.raises(PeerLost), deliveries._arrivals.arriving(order, slots):
        raise PeerLost("its client has gone")
    tiers.found.set()
    _Delivery.quiet.set()
    call = replace(_call(1), arriving=_call(1).ranges, follow_s=1e9)
    async with asyncio.timeout(20), contextlib.aclosing(deliveries.deliver(call)) as events:  # type: ignore[type-var]
        assert await _first(events) == 0


async def test_a_wait_for_a_store_is_stopped_with_the_delivery(node: tuple[Deliveries, _Node]) -> None:
    deliveries, _ = node
    call = replace(_call(1), arriving=_call(1).ranges, follow_s=1e9)
    waiting = asyncio.create_task(_first(deliveries.deliver(call)))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await deliveries._transfers.stop((call.delivery_id, call.node_index), 10.0)
    with pytest.raises(PeerLost, match="stopped"):
        await waiting
    assert not deliveries._room.taken


async def test_what_arrives_is_a_part_of_what_is_delivered(node: tuple[Deliveries, _Node]) -> None:
    deliveries, _ = node
    call = replace(_call(1), arriving=(ChunkRange("storage-0", 0, 2),), follow_s=1.0)
    with pytest.raises(DescriptorInvalid, match="arriving"):
        await anext(deliveries.deliver(call))


async def test_an_id_is_taken_until_nothing_is_in_flight(node: tuple[Deliveries, _Node]) -> None:
    """A second delivery of the id would write to the buffer after the first one's `Quiesced`."""
    deliveries, tiers = node
    tiers.found.set()
    first = deliveries.deliver(_call(1))
    async with contextlib.aclosing(first):  # type: ignore[type-var]
        assert await _first(first) == 0
    for _ in range(10):
        await asyncio.sleep(0)
    with pytest.raises(TransferRunning, match="delivery of this id"):
        await anext(deliveries.deliver(_call(1)))
    before = tiers.unpinned
    _Delivery.quiet.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert (before, tiers.unpinned) == (0, 1)
    async with contextlib.aclosing(deliveries.deliver(_call(1))) as again:  # type: ignore[type-var]
        assert await _first(again) == 0


async def test_an_object_that_has_come_since_is_not_withdrawn(node: tuple[Deliveries, _Node]) -> None:
    """A long fetch ends seconds after it has found one chunk missing: a store may have put and listed it meanwhile."""
    deliveries, _ = node
    records = [ChunkRecord(bytes([number]) * 32, b"", bytes(32), b"") for number in range(2)]
    withdrawn: list[Any] = []

    async def withdraw(which: Any, node_id: str) -> None:
        withdrawn.append((which, node_id))

    deliveries._registry = SimpleNamespace(withdraw=withdraw)  # type: ignore[assignment]
    tier = MemoryObjects()
    await tier.put((records[0].key, 1), write_chunk_object(np.zeros((1, 4096), dtype=np.uint8), bytes(4096)))
    await deliveries._withdraw_objects(ChunkObjects(tier, FakeClock(), 1.0), records)
    assert withdrawn == [([records[1]], OBJECT_TIER)]
