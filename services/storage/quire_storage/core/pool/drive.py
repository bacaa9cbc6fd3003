"""A drive of a pool, in memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.keys import KEY_BYTES
from quire_storage.core.pool.format import PAGE_BYTES, UNIT_BYTES, DriveGeometry, place_of
from quire_storage.core.pool.slots import Shape, SlotAllocator

_KEY_AT: Final = place_of("key")


@dataclass(slots=True)
class MappedDrive:
    """A drive: its slots, and which header page serves which slots of which slab."""

    geometry: DriveGeometry
    image: npt.NDArray[np.uint8]
    slots: SlotAllocator
    free_pages: list[int]
    pages: dict[int, dict[int, int]] = field(default_factory=dict)  # slab → place in the slab → page
    pages_used: int = 0
    salt: int = 0
    failed: bool = False
    index_generations: npt.NDArray[np.uint64] = field(init=False)
    in_object: npt.NDArray[np.bool_] = field(init=False)
    current: npt.NDArray[np.bool_] = field(init=False)
    """Of each unit of the header region: the newest header of a key starts there."""

    def __post_init__(self) -> None:
        headers = self.geometry.header_pages * PAGE_BYTES // UNIT_BYTES
        self.current = np.zeros(headers, dtype=np.bool_)
        self.index_generations = np.zeros(headers, dtype=np.uint64)
        self.in_object = np.zeros(headers, dtype=np.bool_)

    def take(self, shape: Shape, count: int, header_size: int) -> list[tuple[int, int]]:
        """Take up to `count` slots, as many as there are with room for their headers; offset and header of each."""
        taken, bare, is_new_slab = list[tuple[int, int]](), list[int](), False
        while len(taken) < count and not is_new_slab:
            offsets = self.slots.take(shape, count - len(taken)).tolist()
            if not offsets:
                break
            for offset in offsets:
                header = self._header_at(*self.slots.slot_of(offset, shape), header_size)
                if header is not None:
                    taken.append((offset, header))
                else:  # bytes are left, headers are not, but for slots whose page is there
                    bare.append(offset)
                    is_new_slab = is_new_slab or not self.pages[self.slots.slab_of(offset)]
        self.free(bare)
        return taken

    def free(self, offsets: Iterable[int]) -> int:
        """Free slots, and the header pages of slabs that this empties; returns how many slabs those are."""
        emptied = self.slots.free(offsets)
        for slab in emptied:
            for page in self.pages.pop(slab, {}).values():
                heapq.heappush(self.free_pages, page)
        return len(emptied)

    def _header_at(self, slab: int, slot: int, size: int) -> int | None:
        """Return where the header of a slot goes; None if no page is left for it."""
        per_page, pages = PAGE_BYTES // size, self.pages.setdefault(slab, {})
        page = pages.get(slot // per_page)
        if page is None:
            if not self.free_pages:
                return None
            page = pages[slot // per_page] = heapq.heappop(self.free_pages)
            self.pages_used = max(self.pages_used, page + 1)
        return page * PAGE_BYTES + slot % per_page * size

    def keys(self, first: int, stop: int) -> list[bytes]:
        """Return the keys whose newest header starts in one of these units."""
        at = first + np.flatnonzero(self.current[first:stop])
        packed = self.image.reshape(-1, UNIT_BYTES)[at, _KEY_AT : _KEY_AT + KEY_BYTES].tobytes()
        return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]
