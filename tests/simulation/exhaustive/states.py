"""States of a tiny cluster as values: copied, and compared but for the names of tickets and generations."""

from __future__ import annotations

import copyreg
import pickle
from collections import deque
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MethodType
from typing import Any

import numpy as np

from quire_storage.core.chunks import Chunk
from quire_storage.core.eviction import LeafArc
from quire_storage.core.rows import KeyNumbers
from tests.simulation.exhaustive.cluster import Cluster
from tests.simulation.exhaustive.model import NAMED, Step, short


class _Canon:
    """A state without what does not matter: numbers of tickets and generations, counters for the dashboard."""

    _LEFT_OUT = frozenset({"last_number", "hits", "evictions", "tickets", "drawn", "scenario", "shown"})

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.seen: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind is int:
            return value if value < NAMED else ("#", self.numbers.setdefault(value, len(self.numbers)))
        if value is None or kind in (bytes, str, bool, float):
            return value
        if isinstance(value, dict):
            return tuple((self.of(key), self.of(each)) for key, each in value.items())
        if kind in (list, tuple, deque):
            return tuple(self.of(each) for each in value)
        if kind in (set, frozenset):
            return tuple(sorted((self.of(each) for each in value), key=repr))
        if isinstance(value, Enum):
            return value.name
        if kind is Chunk:
            return value.key, int(value.checksums[0])
        if kind is LeafArc:
            return self.order(value)
        if kind is KeyNumbers:
            return tuple((key, self.of(value.get(key))) for key in sorted(value))
        if kind is np.ndarray:
            return value.tobytes()
        if kind is bytearray:
            return bytes(value)
        if kind is MethodType:
            return value.__func__.__name__
        if isinstance(value, BaseException):
            return kind.__name__
        return self.object(value, kind)

    def order(self, order: LeafArc) -> Any:
        """An order of eviction by its keys: which rows they have does not matter."""
        numbers = [*order._orders, order._aside, *order._gone]
        lists = (tuple(self.row(order, row) for row in order._lists.rows(number)) for number in numbers)
        return *lists, order._target_bytes

    def row(self, order: LeafArc, row: int) -> tuple[bytes, int]:
        return order._rows.key(row), order._often[row]

    def object(self, value: Any, kind: type) -> Any:
        seen = self.seen.get(id(value))
        if seen is not None:
            return ("@", seen)
        self.seen[id(value)] = len(self.seen)
        names = _ATTRIBUTES.get(kind)
        if names is None:
            found = [each.name for each in fields(value)] if is_dataclass(value) else list(vars(value))
            names = _ATTRIBUTES[kind] = [name for name in found if name not in self._LEFT_OUT]
        return (kind.__name__, *[self.of(getattr(value, name)) for name in names])


_ATTRIBUTES: dict[type, list[str]] = {}


def fingerprint(cluster: Cluster) -> int:
    """Equal for states that differ in names only."""
    canon = _Canon()
    index = cluster.index.state
    parts = [canon.of({key: index.entries[key] for key in sorted(index.entries)})]
    parts.append(canon.of([cluster.nodes, index.pins, sorted(index.objects.items()), index.dropped]))
    rest = [sorted(cluster.objects.items(), key=lambda item: item[0]), sorted(cluster.promises.items())]
    counts = [cluster.crashes, cluster.losses, cluster.sweeps, cluster.emptied, cluster.damaged]
    parts.append(canon.of([*rest, counts, [(each.at, each.running) for each in cluster.clients]]))
    steps = sorted((canon.of(step) for step in _in_order(cluster.steps)), key=repr)
    return hash((*parts, *steps))


def _in_order(steps: list[Step]) -> list[Step]:
    """Which of them are named first must not depend on when they began."""
    return sorted(steps, key=lambda step: (step.what, step.node, step.incarnation, short(step.arguments[:1])))


copyreg.pickle(np.ndarray, lambda array: (_array, (array.tobytes(), array.dtype.str)))


def _array(raw: bytes, kind: str) -> Any:
    return np.frombuffer(bytearray(raw), dtype=kind)


def frozen(state: Cluster) -> bytes:
    """A copy of it, to be loaded by `pickle`."""
    return pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
