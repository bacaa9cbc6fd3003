"""Plans of runs of chunks in memory, for repeated deliveries: expected checksums, bases, pieces.

A plan holds for as long as the residency machine shows the very same places: it makes a new `MemoryPlace` whenever a
chunk gets a place in memory. Pins are each delivery's own.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from quire_storage.core.chunks import Copy, MemoryPlace
from quire_storage.core.plan import BatchPlan

_CHUNKS_MAX: Final = 1 << 16
_PLACE: Final = operator.attrgetter("memory")
_Name = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Prepared:
    places: Sequence[MemoryPlace]
    targets: npt.NDArray[np.int64]
    plan: BatchPlan


class PreparedRuns:
    """The last used plans, of `chunks_max` chunks together at most."""

    def __init__(self, chunks_max: int = _CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._runs: OrderedDict[_Name, _Prepared] = OrderedDict()
        self._chunks = 0

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, copies: Sequence[Copy], targets: npt.NDArray[np.int64], stride: int) -> BatchPlan | None:
        """The plan by which these copies go to `targets`, (copies,), in layers that are `stride` bytes apart."""
        name = _name(copies, stride)
        prepared = self._runs.get(name)
        if prepared is None:
            return None
        if not all(map(operator.is_, prepared.places, map(_PLACE, copies))):
            self._drop(name)
            return None
        if not np.array_equal(prepared.targets, targets):
            return None
        self._runs.move_to_end(name)
        return prepared.plan

    def keep(self, copies: Sequence[Copy], targets: npt.NDArray[np.int64], stride: int, plan: BatchPlan) -> None:
        """Keep a plan for the next time. All `copies` are in memory."""
        name = _name(copies, stride)
        self._drop(name)
        self._runs[name] = _Prepared(list(map(_PLACE, copies)), targets, plan)
        self._chunks += len(copies)
        while self._chunks > self._chunks_max:
            self._drop(next(iter(self._runs)))

    def _drop(self, name: _Name) -> None:
        dropped = self._runs.pop(name, None)
        if dropped is not None:
            self._chunks -= len(dropped.places)


def _name(copies: Sequence[Copy], stride: int) -> _Name:
    return copies[0].number, copies[-1].number, len(copies), stride
