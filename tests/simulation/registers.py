"""Whether what clients saw of one key can have happened, one request after another (Wing and Gong, 1993)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    READ = auto()
    WRITE = auto()
    DELETE = auto()


class Outcome(Enum):
    DONE = auto()
    REFUSED = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Operation:
    """One request at a key. `value`: the ETag that was read or written; None for no object.

    `expected`: "" for whatever is there, "absent", or the ETag that has to be there. One whose outcome is not known may
    take effect at any time after it began, or never.
    """

    kind: Kind
    began_s: float
    ended_s: float
    value: str | None = None
    expected: str = ""
    outcome: Outcome = Outcome.DONE

    @property
    def latest_s(self) -> float:
        return math.inf if self.outcome is Outcome.UNKNOWN else self.ended_s

    def after(self, state: str | None) -> tuple[str | None, bool]:
        """The state after this, and whether it can have been seen as it was."""
        if self.kind is Kind.READ:
            return state, state == self.value
        fits = not self.expected or state == (None if self.expected == "absent" else self.expected)
        if self.kind is Kind.DELETE:
            fits = fits or state is None
        new = (self.value if self.kind is Kind.WRITE else None) if fits else state
        match self.outcome:
            case Outcome.DONE:
                return new, fits
            case Outcome.REFUSED:
                return state, not fits
            case Outcome.UNKNOWN:
                return new, True


def is_linearizable(operations: Sequence[Operation]) -> bool:
    """Whether some order explains all outcomes, in which nothing comes before what had ended when it began.

    What is certain and ended first is tried first; lost answers are used where nothing else explains.
    """
    ordered = sorted(operations, key=lambda each: each.began_s)
    wanted = sum(1 << at for at, each in enumerate(ordered) if each.outcome is not Outcome.UNKNOWN)
    start: tuple[int, str | None] = (0, None)
    seen, stack = {start}, [start]
    while stack:
        done, state = stack.pop()
        if done & wanted == wanted:
            return True
        left = [at for at in range(len(ordered)) if not done >> at & 1]
        first_end_s = min(ordered[at].latest_s for at in left)
        possible = [at for at in left if ordered[at].began_s <= first_end_s]
        for at in sorted(possible, key=lambda at: -ordered[at].latest_s):
            new, fits = ordered[at].after(state)
            following = (done | 1 << at, new)
            useless = new == state and ordered[at].outcome is Outcome.UNKNOWN
            if fits and not useless and following not in seen:
                seen.add(following)
                stack.append(following)
    return False
