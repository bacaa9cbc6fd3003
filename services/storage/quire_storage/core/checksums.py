"""A checksum per slice, CRC-32, and the checksum of neighbouring slices as one range.

CRC-32 because it can be combined: crc(A ‖ B) follows from crc(A), crc(B) and the length of B. So a layer of many
neighbouring slices is verified in one call of several MiB, without the GIL, instead of in one call per slice; only
when that fails are the slices looked at one by one. The code comes from ISA-L and runs at memory speed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from quire_storage.core.pool.extents import Extent

Bytes = npt.NDArray[np.uint8]
Checksums = npt.NDArray[np.uint32]
_Columns = npt.NDArray[np.uint32]
"""A linear operator on checksums, as the images of the 32 unit vectors: (32,)."""
_POLYNOMIAL: Final = 0xEDB88320  # of CRC-32, reflected


def slice_checksums(arena: Bytes, offsets: npt.NDArray[np.int64], length: int) -> Checksums:
    """Checksums of the slices of `length` bytes at `offsets`."""
    view, crc = memoryview(arena.data), isal_zlib.crc32
    return np.array([crc(view[at : at + length]) for at in offsets.tolist()], dtype=np.uint32)


def row_checksums(rows: Bytes) -> Checksums:
    """Checksums of the rows of a (n, S) array."""
    return np.array([isal_zlib.crc32(row) for row in np.ascontiguousarray(rows)], dtype=np.uint32)


def mismatches(arena: Bytes, offsets: npt.NDArray[np.int64], length: int, expected: Checksums) -> list[int]:
    """Indices of the slices that do not have their expected checksum."""
    return [int(index) for index in np.flatnonzero(slice_checksums(arena, offsets, length) != expected)]


def combined(checksums: Checksums, parts: list[Extent], length: int) -> Checksums:
    """Checksums of each part as one range. `checksums`: (layers, slices of `length` bytes) → (layers, parts)."""
    total: Checksums = np.empty((len(checksums), len(parts)), dtype=np.uint32)
    by_count: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        by_count.setdefault(part.count, []).append(index)
    for count, indices in by_count.items():
        first = np.array([parts[index].first for index in indices])
        total[:, indices] = _joined(checksums[:, first[:, None] + np.arange(count)], length)
    return total


def _joined(checksums: Checksums, length: int) -> Checksums:
    """Combine the checksums of neighbours: (…, n) of `length` bytes each → (…).

    By halves: as many steps as n has binary digits.
    """
    count = checksums.shape[-1]
    if count == 1:
        return checksums[..., 0]
    if count % 2:
        return _shift(_joined(checksums[..., :-1], length), length) ^ checksums[..., -1]
    return _joined(_shift(checksums[..., 0::2], length) ^ checksums[..., 1::2], 2 * length)


def _shift(checksums: Checksums, length: int) -> Checksums:
    """The checksums' contribution once `length` more bytes follow."""
    tables = _shift_tables(length)
    shifted: Checksums = tables[0][checksums & 0xFF] ^ tables[1][checksums >> 8 & 0xFF]
    shifted ^= tables[2][checksums >> 16 & 0xFF] ^ tables[3][checksums >> 24]
    return shifted


@lru_cache(maxsize=64)
def _shift_tables(length: int) -> npt.NDArray[np.uint32]:
    """Multiplication by x^(8·length) modulo the polynomial, which is linear, by each byte of the checksum: (4, 256)."""
    operator, power, bits = _IDENTITY, _ONE_BIT, 8 * length
    while bits:
        if bits & 1:
            operator = _images(power, operator)
        power = _images(power, power)
        bits >>= 1
    values = np.arange(256, dtype=np.uint32)
    return np.stack([_images(operator, values << np.uint32(8 * byte)) for byte in range(4)])


_IDENTITY: Final[_Columns] = np.uint32(1) << np.arange(32, dtype=np.uint32)
_ONE_BIT: Final[_Columns] = np.array([_POLYNOMIAL, *_IDENTITY[:31].tolist()], dtype=np.uint32)
"""The operator of one more zero bit."""


def _images(operator: _Columns, values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Images of the values, (n,) → (n,)."""
    has_bit = (values[:, None] & _IDENTITY) != 0
    images: npt.NDArray[np.uint32] = np.bitwise_xor.reduce(np.where(has_bit, operator, np.uint32(0)), axis=1)
    return images
