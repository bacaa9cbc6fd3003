"""Entry points for spans, measurements and log lines.

The process configures the exporters: `quire_server.telemetry`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from opentelemetry import metrics, trace


@functools.cache  # what it returns follows the process's provider by itself
def tracer() -> trace.Tracer:
    """Quire's tracer."""
    return trace.get_tracer("quire")


def meter() -> metrics.Meter:
    """Quire's meter."""
    return metrics.get_meter("quire")


def counter(
    name: str, unit: str = "1", description: str = "", kinds: Sequence[Mapping[str, str]] = ({},)
) -> metrics.Counter:
    """Create a counter that is exported as 0 from the start, for each of `kinds`: "never" is not "unknown"."""
    instrument = meter().create_counter(name, unit, description)
    for kind in kinds:
        instrument.add(0, kind)
    return instrument


def tally(name: str, unit: str, description: str, read: Callable[[], Iterable[tuple[int, Mapping[str, str]]]]) -> None:
    """Create a counter that is read at export: counting costs no more than an addition."""

    def observe(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        return [metrics.Observation(value, kind) for value, kind in read()]

    meter().create_observable_counter(name, [observe], unit, description)


def logger() -> Any:
    """A structured logger."""
    return structlog.get_logger()
