"""Slots for chunks in one flat range of bytes, laid out so that a layer of neighbouring chunks is one piece.

The range is cut into slabs; a slab in use serves chunks of one shape, L layers of S bytes, and holds n = slab // (L·A)
of them, A being S rounded up to 4 KiB, which O_DIRECT needs. It is layer-major: slice l of slot k is at slab + (l·n +
k)·A. So slots that are taken in order give contiguous layers, which are read, checksummed and put as one range, while
each chunk still is an object of its own. Nothing is created or moved when a chunk is stored: a slot is taken from a
free list. A slab returns to all shapes when its last slot is free.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.errors import LayoutInvalid, PoolFull

ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a slab's slots: `num_layers` slices of `slice_bytes`."""

    num_layers: int
    slice_bytes: int

    @property
    def bytes(self) -> int:
        return self.num_layers * self.slice_bytes

    @property
    def slice_room(self) -> int:
        """A: bytes that a slice takes up."""
        return -(-self.slice_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def slot_bytes(self) -> int:
        """Bytes that a chunk takes up."""
        return self.num_layers * self.slice_room


@functools.lru_cache(maxsize=256)
def shape_of(num_layers: int, slice_bytes: int) -> Shape:
    """Return a shape, the same object as before."""
    return Shape(num_layers, slice_bytes)


@dataclass(slots=True)
class _Slab:
    """A slab in use: a heap of its free slots, so that the lowest is taken first, and which are taken."""

    shape: Shape
    free: list[int]
    taken: bytearray


class SlotAllocator:
    """Offsets of slice 0 of each slot in `capacity_bytes`, which are cut into slabs of `slab_bytes`."""

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        self._slab_bytes = slab_bytes
        self._free_slabs = list(range(capacity_bytes // slab_bytes))
        self._slabs: dict[int, _Slab] = {}
        self._open: dict[Shape, set[int]] = {}
        self.capacity_bytes = len(self._free_slabs) * slab_bytes
        self.used_bytes = 0

    def layer_stride(self, shape: Shape) -> int:
        """Distance in bytes between two layers of a slot. Raises `LayoutInvalid` for a chunk larger than a slab."""
        return self.slots_per_slab(shape) * shape.slice_room

    def slots_per_slab(self, shape: Shape) -> int:
        """Return how many slots a slab has. Raises `LayoutInvalid` for a chunk larger than a slab."""
        if shape.slot_bytes > self._slab_bytes:
            raise LayoutInvalid(
                f"a chunk of {shape.slot_bytes} bytes exceeds the node's slabs of {self._slab_bytes}", field="layout"
            )
        return self._slab_bytes // shape.slot_bytes

    def capacity(self, shape: Shape) -> int:
        """Return how many slots of a shape there are while nothing else is stored. Raises `LayoutInvalid`."""
        return self.capacity_bytes // self._slab_bytes * self.slots_per_slab(shape)

    def slot_of(self, offset: int, shape: Shape) -> tuple[int, int]:
        """(slab, slot) of an offset."""
        return offset // self._slab_bytes, offset % self._slab_bytes // shape.slice_room

    def offset_of(self, slab: int, slot: int, shape: Shape) -> int:
        """The reverse of `slot_of`."""
        return slab * self._slab_bytes + slot * shape.slice_room

    def allocate(self, shape: Shape, count: int) -> npt.NDArray[np.int64]:
        """`count` slots, ascending within a slab. All or none: raises `PoolFull`, or `LayoutInvalid`."""
        taken = self.take(shape, count)
        if len(taken) < count:
            self.free(taken.tolist())
            raise PoolFull(f"no room for {count} chunks of {shape.bytes} bytes ({self.used_bytes} bytes in use)")
        return taken

    def take(self, shape: Shape, count: int) -> npt.NDArray[np.int64]:
        """Up to `count` slots, as many as there are. Raises `LayoutInvalid`."""
        self.slots_per_slab(shape)
        taken: list[int] = []
        while len(taken) < count:
            index = self._slab_with_room(shape)
            if index is None:
                break
            slab = self._slabs[index]
            while slab.free and len(taken) < count:
                slot = heapq.heappop(slab.free)
                slab.taken[slot] = 1
                taken.append(self.offset_of(index, slot, shape))
            if not slab.free:
                self._open[shape].discard(index)
        self.used_bytes += len(taken) * shape.slot_bytes
        return np.array(taken, dtype=np.int64)

    def available(self, shape: Shape) -> int:
        """Slots of a shape that `take` would find. Raises `LayoutInvalid`."""
        per_slab = self.slots_per_slab(shape)
        free = sum(len(self._slabs[index].free) for index in self._open.get(shape, ()))
        return free + per_slab * len(self._free_slabs)

    def taken(self) -> set[int]:
        """Offsets of all slots in use."""
        return {
            self.offset_of(index, slot, slab.shape)
            for index, slab in self._slabs.items()
            for slot, taken in enumerate(slab.taken)
            if taken
        }

    def slab_of(self, offset: int) -> int:
        """The slab that an offset is in."""
        return offset // self._slab_bytes

    def adopt(self, slab: int, shape: Shape, slots: Iterable[int]) -> list[int]:
        """Take the very slots of recovered chunks; returns those that the geometry allows."""
        if slab in self._slabs or slab * self._slab_bytes >= self.capacity_bytes:
            return []
        if shape.slot_bytes > self._slab_bytes or not shape.num_layers or not shape.slice_bytes:
            return []
        self._add_slab(slab, shape)
        adopted = self._slabs[slab]
        sound = [slot for slot in slots if slot < len(adopted.taken)]
        for slot in sound:
            adopted.taken[slot] = 1
        adopted.free = [slot for slot, taken in enumerate(adopted.taken) if not taken]
        if not adopted.free:
            self._open[shape].discard(slab)
        self.used_bytes += sum(adopted.taken) * shape.slot_bytes
        return sound

    def settle(self) -> None:
        """End recovery: slots that were not adopted are free."""
        self._free_slabs = [slab for slab in self._free_slabs if slab not in self._slabs]

    def free(self, offsets: Iterable[int]) -> list[int]:
        """Give slots back; returns the slabs that this emptied."""
        emptied = []
        for offset in offsets:
            index = offset // self._slab_bytes
            slab = self._slabs[index]
            slot = offset % self._slab_bytes // slab.shape.slice_room
            assert slab.taken[slot], "a slot is freed once"
            slab.taken[slot] = 0
            heapq.heappush(slab.free, slot)
            self.used_bytes -= slab.shape.slot_bytes
            self._open[slab.shape].add(index)
            if len(slab.free) == len(slab.taken):
                self._open[slab.shape].discard(index)
                del self._slabs[index]
                heapq.heappush(self._free_slabs, index)
                emptied.append(index)
        return emptied

    def _slab_with_room(self, shape: Shape) -> int | None:
        if not self._open.setdefault(shape, set()):
            if not self._free_slabs:
                return None
            self._add_slab(heapq.heappop(self._free_slabs), shape)
        return min(self._open[shape])

    def _add_slab(self, index: int, shape: Shape) -> None:
        count = self.slots_per_slab(shape)
        self._slabs[index] = _Slab(shape, list(range(count)), bytearray(count))
        self._open.setdefault(shape, set()).add(index)
