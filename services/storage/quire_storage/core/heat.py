"""Read rates: bytes a second by chunk range, as decaying means."""

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
    """Bytes a second; a read counts half as much after each half-life."""

    value: float = 0.0
    at_s: float = 0.0

    def now(self, now_s: float) -> float:
        return self.value * math.exp2((self.at_s - now_s) / _HALF_LIFE_S)

    def add(self, size: int, now_s: float) -> None:
        self.value, self.at_s = self.now(now_s) + size * math.log(2) / _HALF_LIFE_S, now_s


@dataclass(slots=True)
class _Range:
    """`keys`: of the last read; `common`: how many of them most reads share, a mean."""

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
        range_ = self._ranges.pop(first, None)
        if range_ is None:
            range_ = _Range(packed, float(len(keys)), _Mean())
        elif range_.keys != packed:
            range_.common += (_common(range_.keys, packed) - range_.common) / 4
            range_.keys = packed
        else:
            range_.common += (len(keys) - range_.common) / 4
        range_.mean.add(size, now_s)
        self._ranges[first] = range_
        if len(self._ranges) > _RANGES_MAX:
            self._ranges.popitem(last=False)

    def total(self, now_s: float) -> float:
        """Bytes a second of all ranges."""
        return self._total.now(now_s)

    def of(self, first: bytes, now_s: float) -> float:
        """Bytes a second of the range with that first chunk."""
        range_ = self._ranges.get(first)
        return range_.mean.now(now_s) if range_ is not None else 0.0

    def above(self, bytes_per_s: float, now_s: float) -> list[Hot]:
        """Ranges that are read faster, the fastest first; of each what most of its readers read."""
        hot = [
            Hot(ChunkKeys(range_.keys[: KEY_BYTES * max(1, round(range_.common))]), range_.mean.now(now_s))
            for range_ in self._ranges.values()
            if range_.mean.now(now_s) > bytes_per_s
        ]
        return sorted(hot, key=lambda range_: -range_.bytes_per_s)


def _common(first: bytes, second: bytes) -> int:
    """Keys from the start on that are the same."""
    low, high = 0, min(len(first), len(second)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if first[: middle * KEY_BYTES] == second[: middle * KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
