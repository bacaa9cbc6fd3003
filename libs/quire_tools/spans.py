"""Finished spans as services tell them, and the trees that they make."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """Times are Unix nanoseconds; `events`: (time, name, attributes)."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    service: str
    start_ns: int
    end_ns: int
    ok: bool
    attributes: dict[str, Any]
    events: list[tuple[int, str, dict[str, Any]]]


@dataclass(slots=True)
class Trace:
    """The spans of one trace. `roots` have no parent among them; a whole trace has one."""

    trace_id: str
    spans: dict[str, Span] = field(default_factory=dict)

    @property
    def roots(self) -> list[Span]:
        return self.children(None)

    @property
    def start_ns(self) -> int:
        return min(span.start_ns for span in self.spans.values())

    @property
    def end_ns(self) -> int:
        return max(span.end_ns for span in self.spans.values())

    def children(self, parent_id: str | None) -> list[Span]:
        """Return the children by start. Of None: the roots, and those whose parent is not here."""
        if parent_id is None:
            roots = [span for span in self.spans.values() if span.parent_id not in self.spans]
        else:
            roots = [span for span in self.spans.values() if span.parent_id == parent_id]
        return sorted(roots, key=lambda span: span.start_ns)

    def walk(self) -> Iterator[tuple[int, Span]]:
        """Depth and span, parents before children."""
        pending = [(0, root) for root in reversed(self.roots)]
        while pending:
            depth, span = pending.pop()
            yield depth, span
            pending += [(depth + 1, child) for child in reversed(self.children(span.span_id))]


def read_traces(lines: Iterable[str | bytes]) -> dict[str, Trace]:
    """Every trace, by id, of spans in JSON. A line that is still being written is passed over."""
    traces: dict[str, Trace] = defaultdict(lambda: Trace(""))
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        record["events"] = [tuple(event) for event in record["events"]]
        span = Span(**record)
        trace = traces[span.trace_id]
        trace.trace_id = span.trace_id
        trace.spans[span.span_id] = span
    return dict(traces)


def lines_of(folder: Path) -> Iterator[str]:
    """Spans of all processes that wrote to a `QUIRE_TRACE_FOLDER`."""
    for file in sorted(folder.glob("*.jsonl")):
        yield from file.read_text().splitlines()
