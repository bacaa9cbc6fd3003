"""Fingerprints of chunk keys: what the index knows chunks by."""

from __future__ import annotations

import struct
from typing import Final, cast

import numpy as np

from quire.model.keys import KEY_BYTES

PRINT_BYTES: Final = 8
_FACTORS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_LAST: Final = 0xFF51AFD7ED558CCD
_MASK: Final = (1 << 64) - 1
_ARRAYS_FROM: Final = 8
"""Keys from which arrays are quicker."""
_words: Final = struct.Struct("<4Q").unpack


def fingerprint(key: bytes) -> bytes:
    """Return the fingerprint of a key of 32 bytes, 8 bytes.

    Different keys have different ones, but for one pair in 2^64.
    """
    first, second, third, fourth = cast(tuple[int, int, int, int], _words(key))
    by_first, by_second, by_third, by_fourth = _FACTORS
    mixed = (first * by_first + second * by_second + third * by_third + fourth * by_fourth) & _MASK
    mixed = ((mixed ^ (mixed >> 32)) * _LAST) & _MASK
    return (mixed ^ (mixed >> 29)).to_bytes(8, "big")


def fingerprints(packed: bytes) -> bytes:
    """Return the fingerprints of packed keys, 8 bytes each, packed."""
    if len(packed) < _ARRAYS_FROM * KEY_BYTES:
        return b"".join(fingerprint(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))
    words = np.frombuffer(packed, dtype="<u8").reshape(-1, KEY_BYTES // 8)
    mixed = (words * np.array(_FACTORS, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(_LAST)
    return bytes((mixed ^ (mixed >> np.uint64(29))).astype(">u8").tobytes())
