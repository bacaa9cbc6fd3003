"""Memory that transfers have: those that meet are seen, and no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.client import Buffer
from quire.model.descriptor import DeliveryOrder, Descriptor
from quire.model.errors import DescriptorInvalid, TargetInvalid
from quire.model.keys import ChunkKeys
from quire.transport.memory import MemoryTransport

SIZE, LAYERS, BLOCKS = 64, 3, 40


def _descriptor(buffer: Buffer, blocks: list[int], stride: int, shift: int = 0) -> Descriptor:
    keys = ChunkKeys(b"".join(index.to_bytes(32, "big") for index in range(len(blocks))))
    offsets = (np.array(blocks, dtype="<u8") * SIZE + shift).astype("<u8").tobytes()
    order, target = DeliveryOrder.AUTO, buffer.target()
    return Descriptor(keys, LAYERS, 16, SIZE, order, target, layer_stride=stride, chunk_offsets=offsets)


def _touched(descriptor: Descriptor) -> set[int]:
    starts = [layer * descriptor.stride + int(at) for layer in range(LAYERS) for at in descriptor.offsets()]
    return {byte for start in starts for byte in range(start, start + SIZE)}


_BLOCKS = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=12, unique=True)


@given(_BLOCKS, _BLOCKS, st.integers(0, SIZE - 1), st.booleans())
def test_two_loans_are_refused_exactly_where_they_meet(one: list[int], two: list[int], shift: int, wide: bool) -> None:
    """By layers that are tensors of their own; where they are interleaved in blocks, none is missed."""
    stride = (BLOCKS + 1) * SIZE if wide else SIZE
    buffer = Buffer.allocate(MemoryTransport(), (BLOCKS + 1) * SIZE * (LAYERS + 1))
    first = _descriptor(buffer, one, stride)
    second = _descriptor(buffer, two, stride, shift)
    loan = buffer.lend("one", first)
    meet = bool(_touched(first) & _touched(second))
    try:
        buffer.lend("two", second).end()
    except TargetInvalid:
        assert meet or not wide
    else:
        assert not meet
    loan.end()
    buffer.lend("two", second)
    assert buffer.is_busy


def test_what_a_descriptor_says_of_places_is_checked() -> None:
    buffer = Buffer.allocate(MemoryTransport(), 8 * SIZE * LAYERS)
    good = _descriptor(buffer, [5, 0, 3], 8 * SIZE)
    assert Descriptor.from_header(good.to_header()) == good
    assert good.among(2).chunks == 2 and len(good.among(2).chunk_offsets) == 16
    for change, kind in (
        ({"chunk_offsets": good.chunk_offsets[:-1]}, DescriptorInvalid),
        ({"chunk_offsets": np.array([0, 10, 128], dtype="<u8").tobytes()}, DescriptorInvalid),
        ({"chunk_offsets": np.array([0, 64, 1 << 63], dtype="<u8").tobytes()}, DescriptorInvalid),
        ({"chunk_offsets": np.array([0, 64, 8 * SIZE + 1], dtype="<u8").tobytes()}, TargetInvalid),
        ({"layer_stride": SIZE - 1}, DescriptorInvalid),
        ({"layer_stride": 10 * SIZE}, TargetInvalid),
        ({"chunk_offsets": b"", "layer_stride": 2 * SIZE}, DescriptorInvalid),
        ({"first_chunk": 3}, DescriptorInvalid),
        ({"first_chunk": 1, "chunk_count": 3}, DescriptorInvalid),
    ):
        with pytest.raises(kind):
            replace(good, **change)
    with pytest.raises(DescriptorInvalid):
        replace(good, first_chunk=2, chunk_count=1, chunk_offsets=good.chunk_offsets[:8]).among(2)


def test_parts_stay_inside() -> None:
    buffer = Buffer.allocate(MemoryTransport(), 100)
    assert buffer.part(10, 50).part(10, 40).target().address == buffer.target().address + 20
    for offset, length in ((-1, 5), (0, 101), (100, 1), (5, 0)):
        with pytest.raises(TargetInvalid):
            buffer.part(offset, length)
