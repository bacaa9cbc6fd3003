"""How many latents go through the device together: as many as made the same pixels in less time, when it was tried.

A batch may take another path through the device's libraries than a latent alone, with other roundings; an ETag says
that pixels are the same, so a batch that changes one is not used. A size that the device had no memory for is not
tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

_GAIN: Final = 0.95


class Verdict(Enum):
    """What is known of a batch size."""

    UNTRIED = "untried"
    GOOD = "good"
    BAD = "bad"


@dataclass(slots=True)
class BatchSizes:
    """For latents of one shape and VAE: powers of two up to `most`."""

    most: int
    good: int = 1
    bad: int = 0

    def verdict(self, size: int) -> Verdict:
        if size <= self.good:
            return Verdict.GOOD
        return Verdict.BAD if self.bad and size >= self.bad else Verdict.UNTRIED

    def next_size(self, waiting: int) -> int:
        """How many of `waiting` to take: the largest good size, or the one above it to try it out."""
        candidate = self.good * 2
        if candidate <= min(waiting, self.most) and self.verdict(candidate) is Verdict.UNTRIED:
            return candidate
        return max(1, min(waiting, self.good))

    def tried(self, size: int, *, same: bool, alone_s: float, together_s: float) -> None:
        """A batch of `size` was made one by one, in `alone_s`, and again together, in `together_s`."""
        if same and together_s < _GAIN * alone_s:
            self.good = max(self.good, size)
        else:
            self.bad = min(self.bad or size, size)

    def too_large(self, size: int) -> None:
        """The device had no memory for it."""
        self.bad = min(self.bad or size, size)
        self.good = max(1, min(self.good, size // 2))
