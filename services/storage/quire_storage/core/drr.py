"""Weighted deficit round robin: whose turn it is, in proportion to weights, whatever the sizes.

Shreedhar and Varghese, 1995; ObjectCache dispatches layer payloads by it (Table A4, line 7).
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
_OLDEST_EVERY: Final = 10


@dataclass(slots=True)
class _Flow(Generic[Item]):
    """Items of one flow by priority, and behind others of the same priority: (-priority, number, size, item)."""

    weight: float = 1.0
    deficit: float = 0.0
    popped: int = 0
    items: list[tuple[int, int, int, Item]] = field(default_factory=list)

    @property
    def head(self) -> int:
        """Return where the next item is."""
        if self.popped % _OLDEST_EVERY < _OLDEST_EVERY - 1:
            return 0
        return min(range(len(self.items)), key=lambda at: self.items[at][1])

    @property
    def size(self) -> int:
        """Return the size of the next item."""
        return self.items[self.head][2]

    @property
    def rounds(self) -> float:
        """Return how much of a round the next item lacks."""
        return (self.size - self.deficit) / self.weight


class DeficitRoundRobin(Generic[Item]):
    """Queues of flows. A flow with weight w gets w/Σw of the bytes while it has items queued.

    Within a flow a higher priority is taken out first; every tenth time it is the item that has waited longest.
    """

    def __init__(self) -> None:
        self._flows: OrderedDict[str, _Flow[Item]] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(len(flow.items) for flow in self._flows.values())

    def push(self, flow: str, weight: float, size: int, item: Item, *, priority: int = 0) -> None:
        """Queue `item` behind those of its flow with the same priority, or a higher one.

        The flow's weight is the latest one given, and positive.
        """
        queue = self._flows.setdefault(flow, _Flow())
        queue.weight = weight
        bisect.insort(queue.items, (-priority, next(self._numbers), size, item), key=lambda queued: queued[:2])

    def pop(self) -> tuple[int, Item]:
        """The next item and its size. Raises `IndexError` when nothing is queued."""
        if not self._flows:
            raise IndexError("nothing is queued")
        self._turn()
        name, flow = next(iter(self._flows.items()))
        *_, size, item = flow.items.pop(flow.head)
        flow.popped += 1
        flow.deficit -= size
        if not flow.items:
            del self._flows[name]  # a flow that has nothing to send saves nothing up
        return size, item

    def _turn(self) -> None:
        """Bring a flow whose deficit covers its head to the front, giving out as much of a round as that takes."""
        for name, flow in self._flows.items():
            if flow.deficit >= flow.size:
                self._flows.move_to_end(name, last=False)
                return
        first = min(self._flows, key=lambda name: self._flows[name].rounds)
        rounds = self._flows[first].rounds
        for flow in self._flows.values():
            flow.deficit += rounds * flow.weight
        self._flows[first].deficit = float(self._flows[first].size)  # whatever rounding says
        self._flows.move_to_end(first, last=False)
