"""Decisions of the storage node: slots, plans, checksums, pins, pacing."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.errors import DescriptorInvalid, LayoutInvalid, PoolFull
from quire.model.keys import ChunkKeys
from quire.model.ranges import ChunkRange, clip
from quire.model.records import ChunkRecord
from quire_storage.core.checksums import combined, mismatches, slice_checksums
from quire_storage.core.chunks import Chunk, Copy, MemoryPlace
from quire_storage.core.drr import DeficitRoundRobin
from quire_storage.core.plan import BatchPlan, check_shapes, choose_order, places
from quire_storage.core.pool.extents import extents
from quire_storage.core.pool.slots import Shape, SlotAllocator

_CAPACITY, _SLAB = 1 << 20, 1 << 16


class SlotMachine(RuleBasedStateMachine):
    """Slots in use never overlap, in any mixture of shapes; what is freed can be used again."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(_CAPACITY, _SLAB)
        self.taken: dict[int, Shape] = {}

    @rule(target=slots, layers=st.integers(1, 4), size=st.sampled_from([64, 4096, 5000]))
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
            self.allocator.free([offset])
            del self.taken[offset]

    @invariant()
    def no_overlap(self) -> None:
        used = np.zeros(_CAPACITY, dtype=np.uint8)
        for offset, shape in self.taken.items():
            stride = self.allocator.layer_stride(shape)
            for layer in range(shape.num_layers):
                start = offset + layer * stride
                assert start % 4096 == 0, "O_DIRECT wants it"
                used[start : start + shape.slice_room] += 1
        assert used.max(initial=0) <= 1
        assert int(used.sum()) == self.allocator.used_bytes


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=30)


def test_allocation_is_all_or_nothing() -> None:
    allocator = SlotAllocator(_CAPACITY, _SLAB)
    with pytest.raises(PoolFull):
        allocator.allocate(Shape(4, 16384), 17)
    assert allocator.used_bytes == 0
    assert len(allocator.allocate(Shape(4, 16384), 16)) == 16
    with pytest.raises(LayoutInvalid, match="slab"):
        allocator.allocate(Shape(5, 16384), 1)


def test_adopted_slots_are_not_given_out_again() -> None:
    """After recovery the allocator knows the recovered slots, and refuses places that do not fit the geometry."""
    before = SlotAllocator(_CAPACITY, _SLAB)
    shape = Shape(2, 256)
    offsets = before.allocate(shape, 12).tolist()
    places = [before.slot_of(offset, shape) for offset in offsets]
    after = SlotAllocator(_CAPACITY, _SLAB)
    for slab in {slab for slab, _ in places}:
        mine = [slot for at, slot in places if at == slab]
        assert after.adopt(slab, shape, mine) == mine
        assert after.adopt(slab, shape, mine) == [], "once"
    assert after.adopt(10**6, shape, [0]) == [], "beyond the end"
    assert after.adopt(9, Shape(1000, 4096), [0]) == [], "larger than a slab"
    after.settle()
    assert after.used_bytes == before.used_bytes
    fresh = after.allocate(shape, _CAPACITY // shape.slot_bytes - 12).tolist()
    assert not set(fresh) & set(offsets)
    with pytest.raises(PoolFull):
        after.allocate(shape, 1)


@pytest.mark.parametrize(
    "layers,slice_bytes", [(61, 16 << 10), (27, 16 << 10), (61, 73_728), (32, 64 << 10), (80, 1 << 20)]
)
def test_layouts_of_real_models_waste_less_than_a_tenth(layers: int, slice_bytes: int) -> None:
    """Of a slab of 64 MiB (256 MiB for chunks of 80 MiB), MLA layers of 16 KiB included."""
    slab = 64 << 20 if layers * slice_bytes < 16 << 20 else 256 << 20
    shape = Shape(layers, slice_bytes)
    used = SlotAllocator(4 * slab, slab).slots_per_slab(shape) * shape.bytes
    assert used > 0.9 * slab


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


def _slices(copy: Copy) -> npt.NDArray[np.int64]:
    assert copy.memory is not None
    return copy.memory.offset + np.arange(copy.chunk.num_layers, dtype=np.int64) * copy.memory.layer_stride


def _copy(key: bytes, shape: Shape, offset: int, stride: int, arena: npt.NDArray[np.uint8]) -> Copy:
    slices = offset + np.arange(shape.num_layers, dtype=np.int64) * stride
    checksums = slice_checksums(arena, slices, shape.slice_bytes)
    chunk = Chunk(ChunkRecord(key, b"", key, b""), shape.num_layers, shape.slice_bytes, checksums)
    return Copy(offset, chunk, MemoryPlace(offset, stride), None)


def _scene(order: Sequence[int], layers: int, size: int) -> tuple[npt.NDArray[np.uint8], list[Copy], Descriptor, int]:
    """Chunks stored in slots taken in `order`, a descriptor for all of them, and the distance between layers."""
    count = len(order)
    allocator = SlotAllocator(1 << 21, 1 << 17)
    shape = Shape(layers, size)
    offsets = allocator.allocate(shape, count)[np.argsort(np.array(order))]
    arena = np.random.default_rng(5).integers(0, 256, 1 << 21, dtype=np.uint8)
    keys = [bytes([index]) * 32 for index in range(count)]
    stride = allocator.layer_stride(shape)
    chunks = [_copy(key, shape, int(offset), stride, arena) for key, offset in zip(keys, offsets, strict=True)]
    target = RdmaTarget(b"w", 4096, count * layers * size, b"k")
    descriptor = Descriptor(ChunkKeys(b"".join(keys)), layers, 16, size, DeliveryOrder.AUTO, target)
    return arena, chunks, descriptor, stride


def _plan(descriptor: Descriptor, ranges: Sequence[ChunkRange], chunks: Sequence[Copy]) -> BatchPlan:
    bases = np.array([int(_slices(chunk)[0]) for chunk in chunks], dtype=np.int64)
    checksums = np.stack([copy.chunk.checksums for copy in chunks], axis=1)
    return BatchPlan(descriptor, checksums, bases, places(descriptor, ranges))


@given(
    st.permutations(range(14)),
    st.integers(1, 5),
    st.sampled_from([100, 4096, 8192]),
    st.integers(1, 50_000),
    st.integers(0, 8),
    st.none() | st.permutations(range(20)),
    st.booleans(),
)
def test_pieces_assemble_the_payload_where_it_was_asked_for(
    order: list[int],
    layers: int,
    size: int,
    bytes_max: int,
    first: int,
    blocks: list[int] | None,
    strided: bool,
) -> None:
    """Executed literally, the pieces of two nodes' ranges put every slice at l·stride + offset_i, and nothing else.

    From any chunk on, back to back or in an engine's blocks, which are in any order.
    """
    arena, chunks, descriptor, stride = _scene(order, layers, size)
    count = len(order) - first
    offsets = np.array(blocks[:count] if blocks else range(count), dtype="<u8") * (size + 64 * bool(blocks))
    apart = int(offsets.max()) + size + 128 * strided
    descriptor = replace(
        descriptor,
        first_chunk=first,
        layer_stride=apart if strided or blocks else 0,
        chunk_offsets=offsets.tobytes() if blocks else b"",
        target=replace(descriptor.target, length=layers * apart),
    )
    got = np.zeros(layers * apart, dtype=np.uint8)
    written = np.zeros(layers * apart, dtype=np.uint8)
    whole = (ChunkRange("a", 0, 3), ChunkRange("b", 3, 6), ChunkRange("a", 9, 5))
    for node in "ab":
        ranges = clip([each for each in whole if each.node_id == node], first, 14)
        for each in ranges:
            plan = _plan(descriptor, [each], chunks[each.first : each.stop])
            for layer in range(layers):
                assert plan.checks.corrupt(arena, layer, layer * stride) == []
                for piece in plan.pieces(layer, layer * stride, bytes_max):
                    at = piece.remote_offset
                    assert piece.bytes <= max(bytes_max, size)
                    assert piece.remote_offset - layer * descriptor.stride >= 0 and piece.stop <= each.count
                    for offset in piece.offsets.tolist():
                        got[at : at + piece.length] = arena[offset : offset + piece.length]
                        written[at : at + piece.length] += 1
                        at += piece.length
    expected, wanted = np.zeros_like(got), np.zeros_like(written)
    for position, chunk in enumerate(chunks[first:]):
        for layer, at in enumerate(_slices(chunk).tolist()):
            here = layer * descriptor.stride + int(offsets[position])
            expected[here : here + size] = arena[at : at + size]
            wanted[here : here + size] += 1
    assert np.array_equal(written, wanted), "every byte is written once, and none besides"
    assert np.array_equal(got, expected)


@given(st.permutations(range(9)), st.integers(0, 8), st.integers(0, 2), st.integers(0, 699))
def test_one_flipped_bit_is_found_where_it_is(order: list[int], victim: int, layer: int, position: int) -> None:
    arena, chunks, descriptor, stride = _scene(order, 3, 4096)
    plan = _plan(descriptor, (ChunkRange("", 0, 9),), chunks)
    arena[int(_slices(chunks[victim])[layer]) + position] ^= 1 << position % 8
    for each in range(3):
        checks, shift = plan.checks, each * stride
        assert checks.corrupt(arena, each, shift) == ([victim] if each == layer else [])
        for at, part in enumerate(checks.parts):
            has_victim = each == layer and part.first <= victim < part.first + part.count
            assert checks.is_sound(arena, each, shift, at) is not has_victim


def test_plan_refuses_another_shape() -> None:
    arena, chunks, descriptor, _ = _scene(range(3), 2, 100)
    chunks[1] = replace(chunks[1], chunk=replace(chunks[1].chunk, slice_bytes=50))
    with pytest.raises(DescriptorInvalid, match="layers of"):
        check_shapes(descriptor, chunks)
    assert mismatches(arena, _slices(chunks[0]), 100, chunks[0].chunk.checksums) == []


def test_order_by_threshold() -> None:
    """Below Θ chunkwise, from Θ on layerwise (Eq. 2); the client's wish goes first."""
    assert choose_order(DeliveryOrder.AUTO, 99, 100) is DeliveryOrder.CHUNKWISE
    assert choose_order(DeliveryOrder.AUTO, 100, 100) is DeliveryOrder.LAYERWISE
    assert choose_order(DeliveryOrder.CHUNKWISE, 10**9, 100) is DeliveryOrder.CHUNKWISE


@given(
    st.lists(st.tuples(st.floats(0.5, 8), st.integers(1, 50)), min_size=2, max_size=6),
    st.integers(0, 2**16),
)
def test_turns_go_by_weight(flows: list[tuple[float, int]], seed: int) -> None:
    """While all flows have something queued, each gets its weight's part of the bytes, within two of its pieces."""
    rng, queue, taken = random.Random(seed), DeficitRoundRobin[int](), [0.0] * len(flows)

    def push(flow: int) -> None:
        weight, size_max = flows[flow]
        queue.push(str(flow), weight, rng.randint(1, size_max), flow)

    for flow in range(len(flows)):
        push(flow)
        push(flow)
    for _ in range(400):
        size, flow = queue.pop()
        taken[flow] += size
        push(flow)
    total_weight = sum(weight for weight, _ in flows)
    rounds = sum(taken) / total_weight
    for (weight, size_max), got in zip(flows, taken, strict=True):
        slack = 2 * size_max + 2 * weight * max(size / weight for weight, size in flows)
        assert abs(got - rounds * weight) <= slack


def test_of_a_flow_the_higher_priority_comes_first() -> None:
    queue = DeficitRoundRobin[str]()
    for name, priority in (("usual", 0), ("late", -1), ("urgent", 5), ("usual too", 0)):
        queue.push("flow", 1.0, 10, name, priority=priority)
    assert [queue.pop()[1] for _ in range(4)] == ["urgent", "usual", "usual too", "late"]


def test_of_a_flow_the_item_that_has_waited_longest_has_a_tenth_of_the_turns() -> None:
    queue = DeficitRoundRobin[str]()
    queue.push("flow", 1.0, 10, "late", priority=-1)
    turns = []
    for _ in range(20):
        queue.push("flow", 1.0, 10, "urgent", priority=5)
        queue.push("flow", 1.0, 10, "urgent", priority=5)
        turns.append(queue.pop()[1])
    assert turns.index("late") == 9


def test_a_flow_that_was_idle_saved_nothing_up() -> None:
    queue = DeficitRoundRobin[str]()
    for _ in range(10):
        queue.push("busy", 1.0, 10, "busy")
    for _ in range(8):
        queue.pop()
    for _ in range(4):
        queue.push("late", 1.0, 10, "late")
    assert [queue.pop()[1] for _ in range(4)].count("late") == 2
    assert len(queue) == 2
