"""Rates of use, learnt from similar items.

The rate of use is a hazard: uses per event of a thing that was used n times, by its last gap between two uses, and the
time since its last use. Ordering by it keeps the most hits that any rule can which does not know the future (Panigrahy
et al., "A New Upper Bound on Cache Hit Rate", 2022); learning it is LHD's way (Beckmann et al., NSDI '18). Time is
counted in uses: the result holds for any load.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

import numpy as np

_COUNTS: Final = 10
_GAPS: Final = 8
_CLASSES: Final = _COUNTS * _GAPS
_REFRESH: Final = 256
_PRIOR: Final = 2.0
"""Uses that a class is taken to have had at the rate of its kin."""

Item = TypeVar("Item", bound=Hashable)


class Reuse(Generic[Item]):
    """Rates of items of `kinds` kinds, which are learnt apart. Remembers the last `history` uses, a power of two."""

    def __init__(self, history: int, kinds: int) -> None:
        if history < 16 or history & (history - 1) or kinds < 1:
            raise ValueError(f"a history of {history}, {kinds} kinds")
        self._history = history
        self._ages = history.bit_length() - 1  # logarithmic: of an age from 2^i to 2^(i+1) uses
        self._kinds = kinds
        self._ring: list[Item | None] = [None] * history
        self._now = 0
        self._last: dict[Item, int] = {}
        self._count: dict[Item, int] = {}
        self._class: dict[Item, int] = {}
        # By age and class: how many uses came, and how long items were there for them to come.
        self._uses = [[0.0] * (kinds * _CLASSES) for _ in range(self._ages + 1)]
        self._exposure = [[0.0] * (kinds * _CLASSES) for _ in range(self._ages + 1)]
        self._rates: list[list[float]] = []
        self._unknown = 0.0
        self._learn()

    def __len__(self) -> int:
        """Items that are remembered."""
        return len(self._last)

    def use(self, item: Item, kind: int) -> None:
        """Note a request for it, whether it was kept or not."""
        tick = self._now
        self._age(tick)
        last = self._last.get(item)
        gap = _GAPS - 1
        count = 1
        if last is not None:
            since = tick - last
            age = since.bit_length() - 1
            old_class = self._class[item]
            self._uses[age][old_class] += 1
            self._exposure[age][old_class] += since - (1 << age) + 1
            count = self._count[item] + 1
            gap = min(_GAPS - 1, age * _GAPS // self._ages)
        self._count[item] = count
        self._class[item] = kind * _CLASSES + _count_class(count) * _GAPS + gap
        self._last[item] = tick
        self._ring[tick & (self._history - 1)] = item
        self._now = tick + 1
        if self._now % _REFRESH == 0:
            if self._now % self._history == 0:
                self._fade()
            self._learn()

    def rate(self, item: Item) -> float:
        """Return the expected uses per event now.

        An unremembered item is treated as the rarest of those used longest ago.
        """
        last = self._last.get(item)
        if last is None:
            return self._unknown
        since = self._now - last
        age = since.bit_length() - 1 if since < self._history else self._ages - 1
        return self._rates[age][self._class[item]]

    def _age(self, tick: int) -> None:
        """Age the items that were used last 2^i uses ago; those of before the history are forgotten."""
        ring, mask, last = self._ring, self._history - 1, self._last
        oldest = ring[tick & mask]
        if oldest is not None and last.get(oldest) == tick - self._history:
            self._exposure[self._ages - 1][self._class[oldest]] += self._history >> 1
            del last[oldest], self._class[oldest], self._count[oldest]
        age, since = 1, 2
        while since < self._history and since <= tick:
            item = ring[(tick - since) & mask]
            if item is not None and last.get(item) == tick - since:
                self._exposure[age - 1][self._class[item]] += since >> 1
            age += 1
            since <<= 1

    def _learn(self) -> None:
        """Rates; a class of which little is known is like its kin: the same count with any gap, then any count."""
        shape = (self._ages + 1, self._kinds, _COUNTS, _GAPS)
        uses, exposure = np.array(self._uses).reshape(shape), np.array(self._exposure).reshape(shape)
        width = (1 << np.arange(self._ages + 1))[:, None]
        of_kind = (uses.sum((2, 3)) + 0.5) / (exposure.sum((2, 3)) + width)
        of_count = (uses.sum(3) + _PRIOR) / (exposure.sum(3) + _PRIOR / of_kind[:, :, None])
        rates = (uses + _PRIOR) / (exposure + _PRIOR / of_count[..., None])
        self._rates = rates.reshape(self._ages + 1, -1).tolist()
        self._unknown = min(self._rates[self._ages - 1])

    def _fade(self) -> None:
        """Let old observations count less."""
        for table in (self._uses, self._exposure):
            for row in table:
                row[:] = [value / 2 for value in row]


def _count_class(count: int) -> int:
    return count - 1 if count < 4 else min(_COUNTS - 1, 1 + count.bit_length())
