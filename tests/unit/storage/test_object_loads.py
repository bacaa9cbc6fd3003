"""Loads of chunks of the object tier: into slots, piece by piece, with chunks that fail, and stopped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quire.model.chunk_object import ObjectRange
from quire.model.errors import ChunkMissing, CorruptData, MetadataUnavailable, QuireError
from quire.model.records import ChunkRecord
from quire.testing.objects import MemoryObjects
from quire.transport.fair_threads import FairThreads
from quire_server.clock import SystemClock
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.core.object_reads import Hedging
from quire_storage.core.pool.slots import Shape
from quire_storage.delivery import object_loads
from quire_storage.delivery.object_loads import LoadParts, ObjectChunk, ObjectLoad, ObjectLoads
from quire_storage.ports import ObjectName
from quire_storage.tiers.object_tier import ChunkObjects, pack_object
from quire_storage.tiers.tiers import Slots

SHAPE = Shape(8, 4096)
Bytes = npt.NDArray[np.uint8]


def _key(number: int) -> bytes:
    return bytes([number]) * 32


def _payload(number: int) -> Bytes:
    return np.random.default_rng(number).integers(1, 256, (SHAPE.num_layers, SHAPE.slice_bytes), dtype=np.uint8)


def _chunk(number: int, payload: Bytes) -> Chunk:
    key = _key(number)
    return Chunk(ChunkRecord(key, b"", key, b""), len(payload), payload.shape[1], row_checksums(payload))


class _Objects(MemoryObjects):
    """Counts the bytes that are read of each object. `stuck`: later layers wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes: Counter[bytes] = Counter()
        self.requests = 0
        self.stuck: asyncio.Event | None = None

    async def read(self, name: ObjectName, start: int, stop: int, *, described: bool = True) -> ObjectRange | None:
        if self.stuck is not None and start:
            await self.stuck.wait()
        part = await super().read(name, start, stop, described=described)
        self.requests += 1
        if part is not None and start < SHAPE.bytes:
            self.read_bytes[name[0]] += len(part.data)
        return part


class World:
    """A node with an object tier. `kept`: keys that loads have ended with; `others`: sound bytes of other nodes."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.objects = _Objects()
        self.kept: list[list[bytes]] = []
        self.others: dict[bytes, Bytes] = {}
        self.slots_free = 64
        arena = SimpleNamespace(
            view=np.full(4 << 20, 255, dtype=np.uint8),  # another tenant's
            slots=SimpleNamespace(capacity_bytes=64 * SHAPE.slot_bytes),
            block_bytes=16 * SHAPE.slice_room,
            staging_bytes=64 * SHAPE.slice_room,
        )
        self.arena = arena
        self.listed: dict[bytes, int] = {}
        self.index_error: QuireError | None = None
        tiers: Any = SimpleNamespace(
            arena=arena, reserve_now=self._reserve, end_load=self._end, list_brought=self._list_brought
        )
        self.chunk_objects = ChunkObjects(self.objects, SystemClock(), 5.0)
        self.loads = ObjectLoads(
            LoadParts(
                tiers=tiers,
                objects=self.chunk_objects,
                threads=FairThreads(pool),
                clock=SystemClock(),
                heal=self._heal,
            )
        )

    async def put(self, number: int, *, generation: int = 7) -> bytes:
        payload = _payload(number)
        raw = pack_object(_chunk(number, payload), payload)
        await self.objects.put((_key(number), generation), raw)
        return raw

    async def damage(self, number: int, at: int) -> None:
        raw = bytearray(await self.put(number))
        raw[at] ^= 1
        await self.objects.put((_key(number), 7), bytes(raw))

    def layer(self, load: ObjectLoad, at: int, layer: int) -> Bytes:
        assert load.slots is not None
        start = int(load.slots.offsets[at]) + layer * load.slots.layer_stride
        row: Bytes = self.arena.view[start : start + SHAPE.slice_bytes]
        return row

    def _reserve(self, shape: Shape, count: int) -> Slots | None:
        if count > self.slots_free:
            return None
        return Slots(1, shape, np.arange(count, dtype=np.int64) * shape.slot_bytes, shape.slice_room)

    def _end(self, slots: Slots, read: list[tuple[int, Chunk]]) -> None:
        self.kept.append([chunk.key for _, chunk in read])

    async def _list_brought(self, generations: dict[bytes, int]) -> None:
        assert set(generations) <= {key for keys in self.kept for key in keys}, "only what is there is listed"
        if self.index_error is not None:
            raise self.index_error
        self.listed |= generations

    async def _heal(self, chunk: Chunk) -> Bytes | None:
        return self.others.get(chunk.key)


@pytest.fixture(autouse=True)
def unhedged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and requests are counted: those that a slow machine sends a second time would be, too."""
    monkeypatch.setattr(Hedging, "take", lambda _: False)


@pytest.fixture(params=[[range(8)], [range(1), range(1, 2), range(2, 4), range(4, 8)]], ids=["at once", "in runs"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(object_loads, "layer_ranges", lambda *_, **__: request.param)
    with ThreadPoolExecutor(2) as pool:
        yield World(pool)


def _wanted(*numbers: int, generation: int = 7) -> list[ObjectChunk]:
    return [ObjectChunk(_key(number), generation, SHAPE) for number in numbers]


async def _read(load: ObjectLoad) -> None:
    for layer in range(SHAPE.num_layers):
        await load.layer(layer)


async def test_layers_arrive_in_order_and_the_chunks_stay(world: World) -> None:
    for number in range(12):
        await world.put(number)
    places = world.loads.join(_wanted(*range(12)), "t", None)
    load = places[0][0]
    assert [at for _, at in places] == list(range(12))
    for layer in range(SHAPE.num_layers):
        await load.layer(layer)
        for number in range(12):
            assert np.array_equal(world.layer(load, number, layer), _payload(number)[layer])
    await world.loads.leave(load)
    assert world.kept == [[_key(number) for number in range(12)]] and not load.failed
    assert set(world.objects.read_bytes.values()) == {SHAPE.bytes}, "each byte once"


async def test_whoever_comes_later_joins(world: World) -> None:
    for number in range(4):
        await world.put(number)
    first = world.loads.join(_wanted(0, 1, 2), "t", None)
    await first[0][0].layer(2)
    second = world.loads.join(_wanted(1, 2, 3), "u", None)
    assert second[0] == first[1] and second[1] == first[2] and second[2][0] is not first[0][0]
    for load, at in second:
        await _read(load)
        assert not load.failed and at in (0, 1, 2)
    await world.loads.leave(first[0][0])
    assert world.kept == [], "another delivery reads it"
    for load in {id(load): load for load, _ in second}.values():
        await world.loads.leave(load)
    assert sorted(key for keys in world.kept for key in keys) == [_key(number) for number in range(4)]
    assert set(world.objects.read_bytes.values()) == {SHAPE.bytes}


async def test_none_joins_a_load_that_ends(world: World) -> None:
    """The one before has just left: its slots are given back, and may be another chunk's."""
    await world.put(0)
    ((load, _),) = world.loads.join(_wanted(0), "t", None)
    await _read(load)
    leaving = asyncio.create_task(world.loads.leave(load))
    await asyncio.sleep(0)
    ((second, _),) = world.loads.join(_wanted(0), "t", None)
    assert second is not load
    await leaving
    await _read(second)
    await world.loads.leave(second)
    assert world.kept == [[_key(0)], [_key(0)]]


async def test_a_chunk_that_has_failed_is_read_anew(world: World) -> None:
    ((load, _),) = world.loads.join(_wanted(0), "t", None)
    await _read(load)
    assert list(load.failed) == [0]
    await world.put(0)
    ((second, _),) = world.loads.join(_wanted(0), "t", None)
    await _read(second)
    assert second is not load and not second.failed
    await world.loads.leave(load)
    await world.loads.leave(second)


@pytest.mark.parametrize("parts", [[(0, 5)], [(0, 2), (2, 3)]])
async def test_without_slots_layers_are_copied_piece_by_piece(world: World, parts: list[tuple[int, int]]) -> None:
    """Several batches take from one load if chunks in memory lie between its chunks (simulated seed 28)."""
    world.slots_free = 0
    for number in range(5):
        await world.put(number)
    (load, _), *_ = world.loads.join(_wanted(*range(5)), "t", None)
    for layer in range(SHAPE.num_layers):
        await load.layer(layer)
        for first, count in parts:
            await load.take(layer, first, count, 0, SHAPE.slice_room)
            rows = [world.arena.view[at * SHAPE.slice_room :][: SHAPE.slice_bytes] for at in range(count)]
            assert all(np.array_equal(row, _payload(first + at)[layer]) for at, row in enumerate(rows))
    assert not load._held
    await world.loads.leave(load)
    assert world.kept == []


async def test_a_chunk_that_fails_costs_itself_alone(world: World) -> None:
    """The chunk's bytes are zeros from the unsound layer on: the slot has another tenant's."""
    for number in range(3):
        await world.put(number)
    await world.damage(1, 5 * SHAPE.slice_bytes + 9)
    (load, _), *_ = world.loads.join(_wanted(0, 1, 2), "t", None)
    await _read(load)
    assert isinstance(load.failed.pop(1), CorruptData) and not load.failed
    load.failed[1] = CorruptData("as before")
    for number in (0, 2):
        assert all(np.array_equal(world.layer(load, number, layer), _payload(number)[layer]) for layer in range(8))
    assert all(not world.layer(load, 1, layer).any() for layer in (5, 6, 7))
    await world.loads.leave(load)
    assert world.kept == [[_key(0), _key(2)]]


async def test_unsound_layers_are_taken_from_another_copy(world: World) -> None:
    await world.damage(1, 5 * SHAPE.slice_bytes + 9)
    world.others[_key(1)] = _payload(1)
    (load, _), *_ = world.loads.join(_wanted(1), "t", None)
    await _read(load)
    assert not load.failed
    assert all(np.array_equal(world.layer(load, 0, layer), _payload(1)[layer]) for layer in range(8))
    await world.loads.leave(load)


@pytest.mark.parametrize("generation", [9, 0])
async def test_an_object_of_another_generation_will_do(world: World, generation: int) -> None:
    """An index that was rebuilt lists objects under new entries."""
    await world.put(1)
    (load, _), *_ = world.loads.join(_wanted(1, generation=generation), "t", None)
    await _read(load)
    assert not load.failed and np.array_equal(world.layer(load, 0, 7), _payload(1)[7])
    await world.loads.leave(load)


@pytest.mark.parametrize("fault", ["missing", "truncated", "another's", "another shape", "no header"])
async def test_what_is_not_the_chunk_is_not_delivered(world: World, fault: str) -> None:
    await world.put(0)
    if fault != "missing":
        raw = await world.put(1)
        objects = {
            "truncated": raw[:-5000],
            "another's": await world.put(2),
            "another shape": pack_object(_chunk(1, _payload(1)[:4]), _payload(1)[:4]),
            "no header": raw[: SHAPE.bytes] + bytes(len(raw) - SHAPE.bytes),
        }
        await world.objects.put((_key(1), 7), objects[fault])
    (load, _), *_ = world.loads.join(_wanted(0, 1), "t", None)
    await _read(load)
    assert isinstance(load.failed[1], ChunkMissing) and list(load.failed) == [1]
    assert not any(world.layer(load, 1, layer).any() for layer in range(8))
    assert world.chunk_objects.found_absent([_key(0), _key(1)]) == {_key(1)}
    await world.loads.leave(load)
    assert world.kept == [[_key(0)]]


async def test_a_load_that_none_wants_any_more_stops(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        await world.put(number)
    world.objects.stuck = asyncio.Event()
    monkeypatch.setattr(object_loads, "layer_ranges", lambda *_, **__: [range(1), range(1, 8)])
    (load, _), *_ = world.loads.join(_wanted(0, 1, 2), "t", None)
    await asyncio.sleep(0.05)
    await world.loads.leave(load)
    assert world.kept == [[]] and not world.loads._running
    world.objects.stuck = None
    (second, _), *_ = world.loads.join(_wanted(0, 1, 2), "t", None)
    assert second is not load
    await _read(second)
    await world.loads.leave(second)
    assert world.kept[1] == [_key(number) for number in range(3)]


async def test_chunks_are_brought_as_far_as_there_is_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that fails is not counted, and one that is being loaded is read once."""
    monkeypatch.setattr(object_loads, "_SHARE_MAX", 1.0)
    for number in range(40):
        await world.put(number)
    await world.damage(3, 0)
    ((load, _),) = world.loads.join(_wanted(5), "", None)
    reserve, groups = world.loads._parts.tiers.reserve_now, iter([True, True, False])
    monkeypatch.setattr(world.loads._parts.tiers, "reserve_now", lambda *of: reserve(*of) if next(groups) else None)
    brought = await world.loads.bring(_wanted(*range(40)), 0.0)
    assert brought == {_key(number) for number in range(33) if number != 3}, "5, and two groups of 16"
    await world.loads.leave(load)
    assert world.objects.read_bytes[_key(5)] == SHAPE.bytes and not world.loads._running


@pytest.mark.parametrize("late_s", [-60.0, 0.0])
async def test_a_prefetch_that_is_late_brings_chunks_all_the_same(late_s: float) -> None:
    """Neither of two loads is left behind, nor a slot."""
    with ThreadPoolExecutor(2) as pool:
        world = World(pool)
        for number in range(20):
            await world.put(number)
        until_s = SystemClock().monotonic_s() + late_s
        assert len(await world.loads.bring(_wanted(*range(20)), until_s)) == 20
        assert len(world.kept) == 2 and sum(map(len, world.kept)) == 20 and not world.loads._running


async def test_what_a_prefetch_brings_is_listed_also_if_a_delivery_reads_it(world: World) -> None:
    """When its load ends; not what failed, nor what no entry is known of, nor what deliveries alone have brought."""
    for number in range(6):
        await world.put(number)
    await world.damage(2, 0)
    ((delivered, _),) = world.loads.join(_wanted(0), "", None)
    ((shared, _),) = world.loads.join(_wanted(1), "", None)
    chunks = [*_wanted(1, 2, 3), *_wanted(4, generation=0)]
    assert await world.loads.bring(chunks, 0.0) == {_key(1), _key(3), _key(4)}
    assert world.listed == {_key(3): 7}, "the delivery still uses the load of the first one"
    await _read(delivered)
    for load in (delivered, shared):
        await world.loads.leave(load)
    assert world.listed == {_key(1): 7, _key(3): 7}
    world.index_error = MetadataUnavailable("no index")
    assert await world.loads.bring(_wanted(5), 0.0) == {_key(5)}, "it is in memory all the same"


async def test_staged_loads_of_a_node_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load takes half of what the others leave, and one layer at least; loads that end give their part back."""
    runs = list[int]()

    def planned(layers: int, *_: Any, layers_max: int = 1 << 30, **__: Any) -> list[range]:
        runs.append(layers_max)
        return [range(at, min(layers, at + layers_max)) for at in range(0, layers, layers_max)]

    monkeypatch.setattr(object_loads, "layer_ranges", planned)
    with ThreadPoolExecutor(2) as pool:
        world = World(pool)
        world.slots_free = 0
        for number in range(40):
            await world.put(number)
        room = world.arena.staging_bytes // SHAPE.slice_room
        deliveries = [world.loads.join(_wanted(*range(8 * at, 8 * at + 8)), "", None) for at in range(5)]
        bounds = [at for at in runs if at < 1 << 30]
        assert bounds == [8, 4, 2, 1, 1] and 8 * sum(bounds) <= 2 * room
        for places in deliveries:
            for load in {load for load, _ in places}:
                await world.loads.leave(load)
        world.loads.join(_wanted(0), "", None)
        assert runs[-1] == room, "all of it again"
