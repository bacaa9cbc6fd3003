"""A drive of a pool, in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.keys import KEY_BYTES
from quire_storage.core.pool.format import PAGE_BYTES, UNIT_BYTES, DriveGeometry, place_of
from quire_storage.core.pool.slots import SlotAllocator

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

    def keys(self, first: int, stop: int) -> list[bytes]:
        """Return the keys whose newest header starts in one of these units."""
        at = first + np.flatnonzero(self.current[first:stop])
        packed = self.image.reshape(-1, UNIT_BYTES)[at, _KEY_AT : _KEY_AT + KEY_BYTES].tobytes()
        return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]
