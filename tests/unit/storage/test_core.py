"""Decisions of the storage node: slots, plans, checksums, pins, pacing."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from quire.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.errors import ChunkMissing, DescriptorInvalid, LayoutInvalid, PoolFull
from quire.keys import ChunkKeys
from quire.metadata.index import ChunkRecord
from quire.outcome import ChunkRun
from quire_storage.core.checksums import combined, mismatches, slice_checksums
from quire_storage.core.chunks import Chunk, ChunkTable
from quire_storage.core.extents import extents
from quire_storage.core.pacing import Pacer
from quire_storage.core.plan import DeliveryPlan, choose_order
from quire_storage.core.slots import Shape, SlotAllocator

_CAPACITY, _SLAB = 1 << 16, 1 << 12


class SlotMachine(RuleBasedStateMachine):
    """Slots in use never overlap, in any mixture of shapes; what is freed can be used again."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(_CAPACITY, _SLAB)
        self.taken: dict[int, Shape] = {}

    @rule(target=slots, layers=st.integers(1, 4), size=st.sampled_from([64, 200, 512]))
    def take(self, layers: int, size: int) -> int | None:
        shape = Shape(layers, size)
        try:
            offset = int(self.allocator.allocate(shape, 1)[0])
        except PoolFull:
            return None
        self.taken[offset] = shape
        return offset

    @rule(offset=consumes(slots))
    def give_back(self, offset: int | None) -> None:
        if offset is not None:
            self.allocator.free(offset)
            del self.taken[offset]

    @invariant()
    def no_overlap(self) -> None:
        used = np.zeros(_CAPACITY, dtype=np.uint8)
        for offset, shape in self.taken.items():
            stride = self.allocator.layer_stride(shape)
            for layer in range(shape.num_layers):
                start = offset + layer * stride
                used[start : start + shape.slice_bytes] += 1
        assert used.max(initial=0) <= 1
        assert int(used.sum()) == self.allocator.used_bytes


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_allocation_is_all_or_nothing() -> None:
    allocator = SlotAllocator(_CAPACITY, _SLAB)
    with pytest.raises(PoolFull):
        allocator.allocate(Shape(4, 1024), 17)
    assert allocator.used_bytes == 0
    assert len(allocator.allocate(Shape(4, 1024), 16)) == 16
    with pytest.raises(LayoutInvalid, match="slab"):
        allocator.allocate(Shape(5, 1024), 1)


def test_adopted_slots_are_not_given_out_again() -> None:
    """After recovery the allocator knows the recovered slots, and refuses places that do not fit the geometry."""
    before = SlotAllocator(_CAPACITY, _SLAB)
    shape = Shape(2, 256)
    offsets = before.allocate(shape, 5).tolist()
    after = SlotAllocator(_CAPACITY, _SLAB)
    assert all(after.adopt(offset, shape) for offset in offsets)
    assert not after.adopt(offsets[0], shape)
    assert not after.adopt(offsets[0] + 1, shape)
    fresh = after.allocate(shape, _CAPACITY // shape.bytes - 5).tolist()
    assert not set(fresh) & set(offsets)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40, unique=True), st.integers(1, 9))
def test_extents_cover_the_list_in_order(slots: list[int], per_part: int) -> None:
    """Parts follow each other, each is contiguous, none is over its limit, and neighbours are not cut needlessly."""
    size = 64
    offsets = np.array(slots, dtype=np.int64) * size
    parts = extents(offsets, size, per_part * size)
    at = 0
    for part in parts:
        assert part.first == at and 1 <= part.count <= per_part
        expected = part.offset + np.arange(part.count) * size
        assert offsets[at : at + part.count].tolist() == expected.tolist()
        at += part.count
    assert at == len(slots)
    for left, right in pairwise(parts):
        assert left.count == per_part or right.offset != left.offset + left.count * size


@given(st.integers(1, 2000), st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 2**32))
def test_combined_checksum_is_that_of_the_range(size: int, counts: list[int], seed: int) -> None:
    """crc(A ‖ B ‖ …) from the checksums of A, B, … equals zlib's over the bytes."""
    total = sum(counts) + len(counts)
    arena = np.random.default_rng(seed).integers(0, 256, total * size, dtype=np.uint8)
    offsets: list[int] = []
    for count in counts:
        start = (offsets[-1] + 2 * size) if offsets else 0
        offsets += [start + index * size for index in range(count)]
    places = np.array(offsets, dtype=np.int64)
    parts = extents(places, size, 1 << 30)
    got = combined(slice_checksums(arena, places, size)[None, :], parts, size)[0]
    assert got.tolist() == [zlib.crc32(arena[p.offset : p.offset + p.count * size].tobytes()) for p in parts]


def _chunk(key: bytes, layers: int, size: int, offset: int, stride: int, arena: npt.NDArray[np.uint8]) -> Chunk:
    chunk = Chunk(ChunkRecord(key, b"", key, b""), layers, size, offset, stride, np.zeros(layers, dtype=np.uint32))
    chunk.checksums = slice_checksums(arena, chunk.slices(), size)
    return chunk


def _scene(
    order: Sequence[int], layers: int, size: int
) -> tuple[npt.NDArray[np.uint8], list[Chunk], Descriptor, SlotAllocator]:
    """Chunks stored in slots taken in `order`, and a descriptor for all of them."""
    count = len(order)
    allocator = SlotAllocator(1 << 20, 1 << 14)
    shape = Shape(layers, size)
    offsets = allocator.allocate(shape, count)[np.argsort(np.array(order))]
    arena = np.random.default_rng(5).integers(0, 256, 1 << 20, dtype=np.uint8)
    keys = [bytes([index]) * 32 for index in range(count)]
    stride = allocator.layer_stride(shape)
    chunks = [_chunk(key, layers, size, int(offset), stride, arena) for key, offset in zip(keys, offsets, strict=True)]
    target = RdmaTarget(b"w", 4096, count * layers * size, b"k")
    descriptor = Descriptor(ChunkKeys(b"".join(keys)), layers, 16, size, DeliveryOrder.AUTO, target)
    return arena, chunks, descriptor, allocator


@given(st.permutations(range(14)), st.integers(1, 5), st.sampled_from([100, 700]), st.integers(1, 5000))
def test_pieces_assemble_the_layer_major_payload(order: list[int], layers: int, size: int, bytes_max: int) -> None:
    """Executed literally, the pieces of two nodes' runs give the reference payload: layer, chunk, slice."""
    arena, chunks, descriptor, _ = _scene(order, layers, size)
    payload = np.zeros(descriptor.payload_bytes, dtype=np.uint8)
    written = np.zeros(descriptor.payload_bytes, dtype=np.uint8)
    for runs in ((ChunkRun(0, 3), ChunkRun(9, 5)), (ChunkRun(3, 6),)):
        mine = [chunk for run in runs for chunk in chunks[run.first : run.first + run.count]]
        plan = DeliveryPlan(descriptor, runs, mine)
        for layer in range(layers):
            assert plan.corrupt(arena, layer) == []
            for piece in plan.pieces(layer, bytes_max):
                at = piece.remote_offset
                assert piece.bytes <= max(bytes_max, size)
                for offset in piece.offsets.tolist():
                    payload[at : at + piece.length] = arena[offset : offset + piece.length]
                    written[at : at + piece.length] += 1
                    at += piece.length
    reference = np.stack(
        [np.stack([arena[at : at + size] for at in chunk.slices().tolist()]) for chunk in chunks], axis=1
    )
    assert (written == 1).all(), "every byte is written once"
    assert np.array_equal(payload, reference.reshape(-1))


@given(st.permutations(range(9)), st.integers(0, 8), st.integers(0, 2), st.integers(0, 699))
def test_one_flipped_bit_is_found_where_it_is(order: list[int], victim: int, layer: int, position: int) -> None:
    arena, chunks, descriptor, _ = _scene(order, 3, 700)
    plan = DeliveryPlan(descriptor, (ChunkRun(0, 9),), chunks)
    arena[int(chunks[victim].slices()[layer]) + position] ^= 1 << position % 8
    for each in range(3):
        assert plan.corrupt(arena, each) == ([victim] if each == layer else [])


def test_plan_refuses_another_shape() -> None:
    arena, chunks, descriptor, _ = _scene(range(3), 2, 100)
    chunks[1].slice_bytes = 50
    with pytest.raises(DescriptorInvalid, match="layers of"):
        DeliveryPlan(descriptor, (ChunkRun(0, 3),), chunks)
    assert mismatches(arena, chunks[0].slices(), 100, chunks[0].checksums) == []


def test_order_by_threshold() -> None:
    """Below Θ chunkwise, from Θ on layerwise (Eq. 2); the client's wish goes first."""
    assert choose_order(DeliveryOrder.AUTO, 99, 100) is DeliveryOrder.CHUNKWISE
    assert choose_order(DeliveryOrder.AUTO, 100, 100) is DeliveryOrder.LAYERWISE
    assert choose_order(DeliveryOrder.CHUNKWISE, 10**9, 100) is DeliveryOrder.CHUNKWISE


def test_dropped_chunk_keeps_its_slot_until_unpinned() -> None:
    """A delivery that reads a chunk is not hurt by its eviction: the slot is freed by the last unpin."""
    table = ChunkTable()
    arena = np.zeros(1000, dtype=np.uint8)
    for name in (b"a", b"b"):
        table.add(_chunk(name * 32, 1, 10, 0, 10, arena))
    first, second = (table.pin(ChunkKeys(b"a" * 32)) for _ in range(2))
    dropped = table.drop(b"a" * 32)
    assert dropped is not None and not dropped[1]
    with pytest.raises(ChunkMissing):
        table.pin(ChunkKeys(b"a" * 32))
    assert table.unpin(first) == []
    assert table.unpin(second) == second
    freed = table.drop(b"b" * 32)
    assert freed is not None and freed[1]
    assert table.drop(b"b" * 32) is None


@given(st.lists(st.integers(1, 10**6), min_size=5, max_size=60), st.integers(10**5, 10**9))
def test_pacer_keeps_the_rate(sizes: list[int], rate: int) -> None:
    """Obeyed exactly, departures never run ahead of the rate, and end within one piece of it."""
    now, pacer, sent = 10.0, Pacer(rate, 10.0), 0
    for size in sizes:
        now += pacer.delay_s(size, now)
        assert sent / rate <= now - 10.0 + 1e-9
        sent += size
    assert now - 10.0 == pytest.approx((sent - sizes[-1]) / rate)


def test_pacer_catches_up_a_little_only() -> None:
    """After a pause of a second no more than 5 ms worth of bytes go out at once."""
    pacer = Pacer(1_000_000, 0.0)
    assert pacer.delay_s(1000, 1.0) == 0.0
    burst = 1000
    while pacer.delay_s(1000, 1.0) == 0.0:
        burst += 1000
    assert burst <= 7000
