"""Slots for chunks in one flat range of bytes, laid out so that a layer of neighbouring chunks is one piece.

The range is cut into slabs; a slab in use serves chunks of one shape, L layers of S bytes, and holds n = slab // (L·S)
of them. It is layer-major: slice l of slot k lies at slab + (l·n + k)·S. So slots that are taken in order give
contiguous layers, which are read, checksummed and put as one range, while each chunk still is an object of its own.
Nothing is created or moved when a chunk is stored: a slot is taken from a free list. A slab returns to all shapes when
its last slot is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.errors import LayoutInvalid, PoolFull


@dataclass(frozen=True, slots=True)
class Shape:
    """What a slab's slots hold: `num_layers` slices of `slice_bytes`."""

    num_layers: int
    slice_bytes: int

    @property
    def bytes(self) -> int:
        return self.num_layers * self.slice_bytes


@dataclass(slots=True)
class _Slab:
    """A slab in use: the offsets of its free slots, highest first, so that `pop` takes the lowest."""

    shape: Shape
    free: list[int]


class SlotAllocator:
    """Offsets of slice 0 of each slot in `capacity_bytes`, which are cut into slabs of `slab_bytes`."""

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        self._slab_bytes = slab_bytes
        self._free_slabs = list(range(capacity_bytes // slab_bytes))[::-1]
        self._slabs: dict[int, _Slab] = {}
        self._open: dict[Shape, set[int]] = {}
        self.used_bytes = 0

    def layer_stride(self, shape: Shape) -> int:
        """Distance in bytes between two layers of a slot. Raises `LayoutInvalid` for a chunk larger than a slab."""
        return self._slots_per_slab(shape) * shape.slice_bytes

    def allocate(self, shape: Shape, count: int) -> npt.NDArray[np.int64]:
        """`count` slots, ascending within a slab. All or none: raises `PoolFull`, or `LayoutInvalid`."""
        self._slots_per_slab(shape)
        taken: list[int] = []
        while len(taken) < count:
            index = self._slab_with_room(shape)
            if index is None:
                for offset in taken:
                    self.free(offset)
                raise PoolFull(f"no room for {count} chunks of {shape.bytes} bytes ({self.used_bytes} bytes in use)")
            slab = self._slabs[index]
            while slab.free and len(taken) < count:
                taken.append(slab.free.pop())
                self.used_bytes += shape.bytes
            if not slab.free:
                self._open[shape].discard(index)
        return np.array(taken, dtype=np.int64)

    def adopt(self, offset: int, shape: Shape) -> bool:
        """Take the very slot that a recovered chunk lies in; False if the geometry does not allow it."""
        index = offset // self._slab_bytes
        if index in self._free_slabs and shape.bytes <= self._slab_bytes:
            self._free_slabs.remove(index)
            self._add_slab(index, shape)
        slab = self._slabs.get(index)
        if slab is None or slab.shape != shape or offset not in slab.free:
            return False
        slab.free.remove(offset)
        self.used_bytes += shape.bytes
        if not slab.free:
            self._open[shape].discard(index)
        return True

    def free(self, offset: int) -> None:
        """Give a slot back."""
        index = offset // self._slab_bytes
        slab = self._slabs[index]
        assert offset not in slab.free, "a slot is freed once"
        slab.free.append(offset)
        self.used_bytes -= slab.shape.bytes
        self._open[slab.shape].add(index)
        if len(slab.free) == self._slots_per_slab(slab.shape):
            self._open[slab.shape].discard(index)
            del self._slabs[index]
            self._free_slabs.append(index)

    def _slots_per_slab(self, shape: Shape) -> int:
        if shape.bytes > self._slab_bytes:
            raise LayoutInvalid(
                f"a chunk of {shape.bytes} bytes exceeds the node's slabs of {self._slab_bytes}", field="layout"
            )
        return self._slab_bytes // shape.bytes

    def _slab_with_room(self, shape: Shape) -> int | None:
        if not self._open.setdefault(shape, set()):
            if not self._free_slabs:
                return None
            self._add_slab(self._free_slabs.pop(), shape)
        return min(self._open[shape])

    def _add_slab(self, index: int, shape: Shape) -> None:
        start = index * self._slab_bytes
        offsets = [start + slot * shape.slice_bytes for slot in range(self._slots_per_slab(shape))]
        self._slabs[index] = _Slab(shape, offsets[::-1])
        self._open.setdefault(shape, set()).add(index)
