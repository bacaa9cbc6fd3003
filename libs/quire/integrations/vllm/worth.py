"""Load or compute: what either takes, as this engine has lately seen it.

Nothing has to be configured: prefill steps tell what tokens cost, loads what blocks cost. Until both are known,
everything is loaded. Where loading would take longer, a few blocks are loaded all the same now and then, so that it is
noticed when the link is free again; they may cost a tenth of what the rest costs to compute.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

_KEPT: Final = 24
_NEEDED: Final = 3
_TRIED_EVERY_S: Final = 2.0
_TRIED_SHARE: Final = 0.1
_PREFILL_TOKENS_MIN: Final = 64
LATE_S_MIN: Final = 0.02


class Cost:
    """Seconds as a + b·size, by least squares over the latest samples; neither a nor b is negative."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, size: float, seconds: float) -> None:
        self._samples.append((size, seconds))

    def seconds(self, size: float) -> float | None:
        """None while too little was seen."""
        if len(self._samples) < _NEEDED:
            return None
        sizes, times = np.array(self._samples).T
        slope = 0.0
        if float(np.ptp(sizes)) > 0:
            slope = float(np.cov(sizes, times, bias=True)[0, 1] / np.var(sizes))
        start = float(times.mean() - slope * sizes.mean())
        if slope <= 0 or start < 0:  # through the origin: what is known of one size says nothing of an overhead
            slope, start = float(times.sum() / sizes.sum()), 0.0
        return start + slope * size


class Worth:
    """Of one engine. Sizes of loads are in blocks."""

    def __init__(self) -> None:
        self._computing, self._loading = Cost(), Cost()
        self._tried_s = -_TRIED_EVERY_S

    def computed(self, tokens: int, seconds: float) -> None:
        """A step without loads took so long."""
        if tokens >= _PREFILL_TOKENS_MIN:
            self._computing.add(tokens, seconds)

    def loaded(self, blocks: int, seconds: float) -> None:
        """A load took so long, or would have."""
        self._loading.add(blocks, seconds)

    def compute_s(self, tokens: int) -> float:
        """What these tokens cost to compute; 0 while that is not known."""
        return self._computing.seconds(tokens) or 0.0

    def blocks(self, blocks: int, tokens: int, now_s: float) -> int:
        """How many of `blocks`, whose tokens would be computed otherwise, to load."""
        computing, loading = self._computing.seconds(tokens), self._loading.seconds(blocks)
        if computing is None or loading is None or loading <= computing:
            return blocks
        if now_s - self._tried_s < _TRIED_EVERY_S:
            return 0
        self._tried_s = now_s
        few = blocks
        while few and (self._loading.seconds(few) or 0.0) > _TRIED_SHARE * computing:
            few //= 2
        return few or 1


def late(elapsed_s: float, arrived: int, layers: int, worth_s: float) -> bool:
    """Whether what is missing of a load comes later than computing it all, which takes `worth_s`; 0: not known."""
    if not worth_s or elapsed_s < LATE_S_MIN or arrived >= layers:
        return False
    missing_s = elapsed_s / arrived * (layers - arrived) if arrived else elapsed_s
    return missing_s > worth_s
