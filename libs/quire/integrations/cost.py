"""Cost of work by its size, from recent measurements."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

_KEPT: Final = 24
_NEEDED: Final = 3


class Cost:
    """Seconds as a + b·size, by least squares over the latest samples; neither a nor b is negative."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, size: float, seconds: float) -> None:
        """Add an observation: a size, and its time."""
        self._samples.append((size, seconds))

    def seconds(self, size: float) -> float | None:
        """Return the expected time; None with fewer than three samples."""
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
