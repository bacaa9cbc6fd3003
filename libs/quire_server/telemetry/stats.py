"""A node's stats as instruments: what `quire status` shows is what Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from opentelemetry.metrics import CallbackOptions, Observation

from quire.telemetry import meter
from quire.telemetry.names import STATS, Stat

Read = Callable[[], Mapping[str, float]]


def publish(read: Read) -> None:
    """Make an instrument of each row of `names.STATS`; those whose name is not in `read()` stay silent."""
    for row in STATS:
        create = meter().create_observable_counter if row.counts else meter().create_observable_gauge
        create(row.metric, [partial(_observe, read, row)], row.unit, row.doc)


def _observe(read: Read, row: Stat, _: CallbackOptions) -> Iterable[Observation]:
    head, star, tail = row.name.partition("*")
    for name, value in read().items():
        if not star and name == head:
            yield Observation(value * row.scale)
        elif star and name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail):
            yield Observation(value * row.scale, {row.label: name[len(head) : len(name) - len(tail)]})
