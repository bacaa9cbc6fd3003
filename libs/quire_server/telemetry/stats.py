"""A node's stats as instruments: what `quire status` shows is what Prometheus scrapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from opentelemetry.metrics import CallbackOptions, Observation

from quire.telemetry import meter
from quire.telemetry.names import STATS, Stat

Read = Callable[[], Mapping[str, float]]
_SCRAPE_S: Final = 0.25
_LABELS_MAX: Final = 64
_OTHERS: Final = "others"


def publish(read: Read, clock: Callable[[], float] = time.monotonic) -> None:
    """Make an instrument of each row of `names.STATS`; those whose name is not in `read()` stay silent.

    A scrape reads once. Of more than 64 values of a label the largest are distinguished, the others are added up.
    """
    snapshot = _Snapshot(read, clock)
    for row in STATS:
        create = meter().create_observable_counter if row.counts else meter().create_observable_gauge
        create(row.metric, [partial(_observe, snapshot, row)], row.unit, row.doc)


class _Snapshot:
    """Values of a moment ago: a scrape calls back for each instrument."""

    def __init__(self, read: Read, clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._values: Mapping[str, float] = {}
        self._at_s = -_SCRAPE_S

    def values(self) -> Mapping[str, float]:
        now_s = self._clock()
        if now_s - self._at_s >= _SCRAPE_S:
            self._values, self._at_s = self._read(), now_s
        return self._values


def _observe(snapshot: _Snapshot, row: Stat, _: CallbackOptions) -> Iterable[Observation]:
    head, star, tail = row.name.partition("*")
    values = snapshot.values()
    if not star:
        if head in values:
            yield Observation(values[head] * row.scale)
        return
    figures = {
        name[len(head) : len(name) - len(tail)]: value * row.scale
        for name, value in values.items()
        if name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail)
    }
    largest = sorted(figures, key=lambda label: -figures[label])
    for label in largest[:_LABELS_MAX]:
        yield Observation(figures[label], {row.label: label})
    if rest := largest[_LABELS_MAX:]:
        yield Observation(sum(figures[label] for label in rest), {row.label: _OTHERS})
