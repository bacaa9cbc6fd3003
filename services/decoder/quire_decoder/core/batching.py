"""How many latents go through the device together: as many as made the same pixels in less time, when it was tried.

A batch may take another path through the device's libraries than a latent alone, with other roundings; an ETag says
that pixels are the same, so a batch that changes one is not used. A size that the device had no memory for is not
tried again; one that took no less time is tried twice, since something else may have held the device up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

_GAIN: Final = 0.95
_TRIES: Final = 2


class Verdict(Enum):
    """Verdict on a batch size."""

    UNTRIED = "untried"
    GOOD = "good"
    BAD = "bad"


@dataclass(slots=True)
class BatchSizes:
    """Batch sizes for latents of one shape and VAE: powers of two up to `most`."""

    most: int
    good: int = 1
    bad: int = 0
    slow: int = 0

    def verdict(self, size: int) -> Verdict:
        """Return the verdict on a batch of that size."""
        if size <= self.good:
            return Verdict.GOOD
        return Verdict.BAD if self.bad and size >= self.bad else Verdict.UNTRIED

    def next_size(self, queued: int) -> int:
        """Return how many of the `queued` requests to take: the largest good size, or the next one to try it."""
        candidate = self.good * 2
        if candidate <= min(queued, self.most) and self.verdict(candidate) is Verdict.UNTRIED:
            return candidate
        return max(1, min(queued, self.good))

    def tried(self, size: int, *, same: bool, alone_s: float, together_s: float) -> None:
        """A batch of `size` was made one by one, in `alone_s`, and again together, in `together_s`."""
        if not same:
            self.bad = min(self.bad or size, size)
            self.good = max(1, min(self.good, size // 2))  # another lane may have found that size good
        elif together_s < _GAIN * alone_s:
            self.good, self.slow = max(self.good, size), 0
        else:
            self.slow += 1
            if self.slow >= _TRIES:
                self.bad, self.slow = min(self.bad or size, size), 0

    def too_large(self, size: int) -> None:
        """The device had no memory for it."""
        self.bad = min(self.bad or size, size)
        self.good = max(1, min(self.good, size // 2))
