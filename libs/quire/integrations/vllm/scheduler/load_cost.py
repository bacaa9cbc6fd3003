"""Load or compute: what either takes, as this engine has lately seen it.

Nothing has to be configured: prefill steps tell what tokens cost, loads what blocks cost. Until both are known,
everything is loaded. Loads that share the link count for their part of the time: as many computations would share the
engine. Where loading would take longer, a few blocks are delivered to staging memory now and then, which no request
waits for, so that it is noticed when the link is free again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from quire.integrations.cost import Cost

_KEPT: Final = 24
_TRIED_EVERY_S: Final = 2.0
_TRIED_S_MAX: Final = 0.1
_TRIED_LESS: Final = 4
_PREFILL_TOKENS_MIN: Final = 64
LATE_S_MIN: Final = 0.02


class LinkTime:
    """A clock that runs slower the more loads there are: it shows the time that a load would take alone."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._clock = now_s
        self._lock = threading.Lock()
        self._at_s, self._passed_s, self._loads = now_s(), 0.0, 0

    def begin(self) -> float:
        """A load begins; the time."""
        with self._lock:
            self._advance()
            self._loads += 1
            return self._passed_s

    def end(self) -> None:
        """A load has ended."""
        with self._lock:
            self._advance()
            self._loads -= 1

    def now_s(self) -> float:
        """The time."""
        with self._lock:
            self._advance()
            return self._passed_s

    def _advance(self) -> None:
        now_s = self._clock()
        self._passed_s += (now_s - self._at_s) / max(1, self._loads)
        self._at_s = now_s


class LoadCost:
    """Costs of one engine. Sizes of loads are in blocks."""

    def __init__(self) -> None:
        self._computing, self._loading, self._cold = Cost(), Cost(), Cost()
        self._short: deque[float] = deque(maxlen=_KEPT)
        self._tried_s, self._tries = -_TRIED_EVERY_S, 0

    def computed(self, tokens: int, seconds: float) -> None:
        """Note the time of a step without loads."""
        if tokens >= _PREFILL_TOKENS_MIN:
            self._computing.add(tokens, seconds)
        elif tokens:
            self._short.append(seconds)

    def step_s(self, tokens: int) -> float:
        """Return the time that a step with `tokens` computes; 0 for an unknown one, and for a step without tokens."""
        if tokens >= _PREFILL_TOKENS_MIN:
            return self.compute_s(tokens)
        return float(np.median(self._short)) if tokens and self._short else 0.0

    def loaded(self, blocks: int, seconds: float, *, cold: bool = False) -> None:
        """Note the time that a load took, or would have taken. `cold`: with blocks of the object tier alone."""
        (self._cold if cold else self._loading).add(blocks, seconds)

    def compute_s(self, tokens: int) -> float:
        """Return the time to compute these tokens; 0 while it is unknown."""
        return self._computing.seconds(tokens) or 0.0

    def load(self, blocks: int, tokens: int, cold_s: float = 0.0) -> bool:
        """Return whether to load that number of blocks, whose tokens would be computed otherwise.

        `cold_s`: what the cluster expects the object tier to take, where it alone has some of them; 0 for none. It
        counts until such loads were seen: a node may have some in its memory.
        """
        computing, loading = self._computing.seconds(tokens), self._loading.seconds(blocks)
        if cold_s:
            cold_load_s = self._cold.seconds(blocks)
            loading = cold_load_s if cold_load_s is not None else max(loading or 0.0, cold_s)
        return computing is None or loading is None or loading <= computing

    def tried(self, blocks: int, now_s: float) -> int:
        """Return how many of these blocks, which are computed, to load all the same, as a measurement; mostly 0.

        The number varies: one size does not show the overhead.
        """
        if now_s - self._tried_s < _TRIED_EVERY_S:
            return 0
        self._tried_s, self._tries = now_s, self._tries + 1
        while blocks > 1 and (self._loading.seconds(blocks) or 0.0) > _TRIED_S_MAX:
            blocks //= 2
        return max(1, blocks // (_TRIED_LESS if self._tries % 2 == 0 else 1))


def late(elapsed_s: float, first_s: float, arrived: int, layers: int, worth_s: float) -> bool:
    """Return whether the rest of a load comes later than computing it all, which takes `worth_s`; 0: unknown.

    `first_s`: when the first layer was there. The time before it does not show how fast layers follow each other.
    """
    if not worth_s or elapsed_s < LATE_S_MIN or arrived >= layers:
        return False
    if arrived < 2:
        return elapsed_s - first_s > worth_s
    return (elapsed_s - first_s) / (arrived - 1) * (layers - arrived) > worth_s
