"""The last spans that this process has finished, in memory."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor


def record_of(span: ReadableSpan, service: str) -> dict[str, Any]:
    """A finished span for a line of JSON; times in Unix nanoseconds."""
    context, parent = span.get_span_context(), span.parent
    return {
        "trace_id": f"{context.trace_id:032x}" if context else "",
        "span_id": f"{context.span_id:016x}" if context else "",
        "parent_id": f"{parent.span_id:016x}" if parent else None,
        "name": span.name,
        "service": service,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "events": [[event.timestamp, event.name, dict(event.attributes or {})] for event in span.events],
        "ok": span.status.is_ok,
    }


class RecentSpans(SpanProcessor):
    """Keeps none until `keep` says how many."""

    def __init__(self) -> None:
        self._service = ""
        self._spans: deque[ReadableSpan] = deque(maxlen=0)

    def keep(self, service: str, limit: int) -> None:
        self._service, self._spans = service, deque(maxlen=limit)

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def kept(self) -> Sequence[ReadableSpan]:
        """Return the current spans, the oldest first."""
        return list(self._spans)

    def told(self, spans: Sequence[ReadableSpan], trace_id: str) -> list[bytes]:
        """Return the spans of traces whose id has this beginning, each as JSON."""
        return [json.dumps(record_of(span, self._service)).encode() for span in spans if _is_of(span, trace_id)]


recent_spans: Final = RecentSpans()
"""This process's."""


def _is_of(span: ReadableSpan, trace_id: str) -> bool:
    context = span.get_span_context()
    return not trace_id or (context is not None and f"{context.trace_id:032x}".startswith(trace_id))
