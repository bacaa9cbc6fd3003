"""Slots for chunks in one flat range of bytes: slabs are given to chunk sizes, slots of a slab to chunks.

No chunk moves and nothing is created when one is stored: a slot is taken from a free list. A slab returns to all sizes
when its last slot is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from quire.errors import LayoutInvalid, PoolFull


@dataclass(slots=True)
class _Slab:
    """A slab in use: its chunk size and its free slots, highest first, so that `pop` takes the lowest."""

    slot_bytes: int
    free: list[int]
    slots: int


class SlotAllocator:
    """Offsets into `capacity_bytes`, which are cut into slabs of `slab_bytes`."""

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        self._slab_bytes = slab_bytes
        self._free_slabs = list(range(capacity_bytes // slab_bytes))[::-1]
        self._slabs: dict[int, _Slab] = {}
        self._open: dict[int, set[int]] = {}
        self.used_bytes = 0

    def allocate(self, slot_bytes: int, count: int) -> npt.NDArray[np.int64]:
        """Offsets of `count` slots, ascending within a slab. All or none: raises `PoolFull`, or `LayoutInvalid`."""
        if slot_bytes > self._slab_bytes:
            raise LayoutInvalid(
                f"a chunk of {slot_bytes} bytes exceeds the node's slabs of {self._slab_bytes}", field="layout"
            )
        taken: list[int] = []
        while len(taken) < count:
            slab_index = self._slab_with_room(slot_bytes)
            if slab_index is None:
                for offset in taken:
                    self.free(offset)
                raise PoolFull(f"no room for {count} chunks of {slot_bytes} bytes ({self.used_bytes} bytes in use)")
            slab = self._slabs[slab_index]
            while slab.free and len(taken) < count:
                taken.append(slab.free.pop())
                self.used_bytes += slot_bytes
            if not slab.free:
                self._open[slot_bytes].discard(slab_index)
        return np.array(taken, dtype=np.int64)

    def adopt(self, offset: int, slot_bytes: int) -> bool:
        """Take the very slot that a recovered chunk lies in; False if the geometry does not allow it."""
        index = offset // self._slab_bytes
        if index in self._free_slabs:
            self._free_slabs.remove(index)
            self._add_slab(index, slot_bytes)
        slab = self._slabs.get(index)
        if slab is None or slab.slot_bytes != slot_bytes or offset not in slab.free:
            return False
        slab.free.remove(offset)
        self.used_bytes += slot_bytes
        if not slab.free:
            self._open[slot_bytes].discard(index)
        return True

    def free(self, offset: int) -> None:
        """Give a slot back."""
        index = offset // self._slab_bytes
        slab = self._slabs[index]
        assert offset not in slab.free, "a slot is freed once"
        slab.free.append(offset)
        self.used_bytes -= slab.slot_bytes
        self._open[slab.slot_bytes].add(index)
        if len(slab.free) == slab.slots:
            self._open[slab.slot_bytes].discard(index)
            del self._slabs[index]
            self._free_slabs.append(index)

    def _slab_with_room(self, slot_bytes: int) -> int | None:
        if not self._open.setdefault(slot_bytes, set()):
            if not self._free_slabs:
                return None
            self._add_slab(self._free_slabs.pop(), slot_bytes)
        return min(self._open[slot_bytes])

    def _add_slab(self, index: int, slot_bytes: int) -> None:
        start, slots = index * self._slab_bytes, self._slab_bytes // slot_bytes
        offsets = [start + slot * slot_bytes for slot in range(slots)]
        self._slabs[index] = _Slab(slot_bytes, offsets[::-1], slots)
        self._open.setdefault(slot_bytes, set()).add(index)
