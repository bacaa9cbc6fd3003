"""What is read most: bytes a second by chunk range, as means that forget."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from quire.model.keys import KEY_BYTES, ChunkKeys

_HALF_LIFE_S: Final = 2.0
_RANGES_MAX: Final = 4096


@dataclass(slots=True)
class _Mean:
    """Bytes a second; what was read counts half as much after each half-life."""

    value: float = 0.0
    at_s: float = 0.0

    def now(self, now_s: float) -> float:
        return self.value * math.exp2((self.at_s - now_s) / _HALF_LIFE_S)

    def add(self, size: int, now_s: float) -> None:
        self.value, self.at_s = self.now(now_s) + size * math.log(2) / _HALF_LIFE_S, now_s


@dataclass(slots=True)
class _Range:
    """`keys`: what was read last; `common`: how many of them are read by most, a mean."""

    keys: bytes
    common: float
    mean: _Mean


@dataclass(frozen=True, slots=True)
class Hot:
    """A chunk range and how many bytes of it are read a second."""

    keys: ChunkKeys
    bytes_per_s: float


class Heat:
    """Ranges are known by their first chunk; those that were read least recently are forgotten beyond 4,096."""

    def __init__(self) -> None:
        self._ranges: OrderedDict[bytes, _Range] = OrderedDict()
        self._total = _Mean()

    def read(self, keys: ChunkKeys, size: int, now_s: float) -> None:
        """Consecutive chunks of one range were read, `size` bytes in all."""
        self._total.add(size, now_s)
        first, packed = keys.at(0), keys.packed
        found = self._ranges.pop(first, None)
        if found is None:
            found = _Range(packed, float(len(keys)), _Mean())
        elif found.keys != packed:
            found.common += (_common(found.keys, packed) - found.common) / 4
            found.keys = packed
        else:
            found.common += (len(keys) - found.common) / 4
        found.mean.add(size, now_s)
        self._ranges[first] = found
        if len(self._ranges) > _RANGES_MAX:
            self._ranges.popitem(last=False)

    def total(self, now_s: float) -> float:
        """Bytes a second of all ranges."""
        return self._total.now(now_s)

    def of(self, first: bytes, now_s: float) -> float:
        """Bytes a second of the range with that first chunk."""
        found = self._ranges.get(first)
        return found.mean.now(now_s) if found is not None else 0.0

    def above(self, bytes_per_s: float, now_s: float) -> list[Hot]:
        """Ranges that are read faster, the fastest first; of each what most of its readers read."""
        hot = [
            Hot(ChunkKeys(each.keys[: KEY_BYTES * max(1, round(each.common))]), each.mean.now(now_s))
            for each in self._ranges.values()
            if each.mean.now(now_s) > bytes_per_s
        ]
        return sorted(hot, key=lambda each: -each.bytes_per_s)


def _common(one: bytes, other: bytes) -> int:
    """Keys from the start on that are the same."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * KEY_BYTES] == other[: middle * KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
