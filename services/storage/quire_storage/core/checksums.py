"""A checksum per slice: xxh3, 64 bits. Every path out verifies it; pure functions, called from a thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]


def slice_checksums(arena: Bytes, offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint64]:
    """Checksums of the slices of `length` bytes at `offsets`."""
    view, digest = memoryview(arena.data), xxhash.xxh3_64_intdigest
    return np.array([digest(view[at : at + length]) for at in offsets.tolist()], dtype=np.uint64)


def mismatches(
    arena: Bytes, offsets: npt.NDArray[np.int64], length: int, expected: npt.NDArray[np.uint64]
) -> list[int]:
    """Indices of the slices that do not have their expected checksum."""
    return [int(index) for index in np.flatnonzero(slice_checksums(arena, offsets, length) != expected)]
