"""Weighted deficit round robin: whose turn it is, in proportion to weights, whatever the sizes.

Shreedhar and Varghese, 1995; ObjectCache dispatches layer payloads by it (Table A4, line 7).
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from typing import Generic, TypeVar

Item = TypeVar("Item")


class DeficitRoundRobin(Generic[Item]):
    """Queues of flows. A flow with weight w gets w/Σw of what is taken out while it has something queued."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, list[tuple[int, int, Item]]] = OrderedDict()
        self._weights: dict[str, float] = {}
        self._deficits: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, flow: str, weight: float, size: int, item: Item, *, priority: int = 0) -> None:
        """Queue `item` behind those of its flow with the same priority, or a higher one.

        The flow's weight is the latest one given, and positive.
        """
        bisect.insort(self._queues.setdefault(flow, []), (-priority, size, item), key=lambda queued: queued[0])
        self._weights[flow] = weight
        self._deficits.setdefault(flow, 0.0)

    def pop(self) -> tuple[int, Item]:
        """The next item and its size. Raises `IndexError` when nothing is queued."""
        if not self._queues:
            raise IndexError("nothing is queued")
        self._turn()
        flow, queue = next(iter(self._queues.items()))
        _, size, item = queue.pop(0)
        self._deficits[flow] -= size
        if not queue:
            # A flow that has nothing to send saves nothing up.
            del self._queues[flow], self._weights[flow], self._deficits[flow]
        return size, item

    def _turn(self) -> None:
        """Bring a flow whose deficit covers its head to the front, giving out as much of a round as that takes."""
        for flow, queue in self._queues.items():
            if self._deficits[flow] >= queue[0][1]:
                self._queues.move_to_end(flow, last=False)
                return
        rounds = {
            flow: (queue[0][1] - self._deficits[flow]) / self._weights[flow] for flow, queue in self._queues.items()
        }
        first = min(rounds, key=lambda flow: rounds[flow])
        for flow in self._queues:
            self._deficits[flow] += rounds[first] * self._weights[flow]
        self._deficits[first] = float(self._queues[first][0][1])  # whatever rounding says
        self._queues.move_to_end(first, last=False)
