"""Neighbours in the arena, found once for a set of slots: they are the same in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Extent:
    """Slots first … first+count-1 of a list whose slices are contiguous, from `offset` in layer 0."""

    first: int
    count: int
    offset: int


def extents(offsets: npt.NDArray[np.int64], slice_bytes: int, bytes_max: int) -> list[Extent]:
    """The list cut where two slots are no neighbours, and into pieces of at most `bytes_max` (one slice at least)."""
    slots_max = max(1, bytes_max // slice_bytes)
    cuts = np.flatnonzero(np.diff(offsets) != slice_bytes) + 1
    return [
        Extent(first, min(slots_max, stop - first), int(offsets[first]))
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(offsets)], strict=True)
        for first in range(start, stop, slots_max)
    ]
