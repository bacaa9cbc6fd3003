"""Requests that this gateway has served lately, and the spans of one of them in the whole cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan

from quire.telemetry import background
from quire_gateway.ports import ClusterSpans
from quire_server.telemetry.recent_spans import recent_spans

_REQUESTS: Final = 20
_SPANS_MAX: Final = 2000
_SHOWN: Final = ("span_id", "parent_id", "name", "service", "start_ns", "end_ns", "ok")
_LAYER: Final = "quire.layer"


def recent_requests() -> list[dict[str, object]]:
    """Return the last requests of which this process keeps spans, the latest first.

    Each by its trace, with the first of its calls here, when that began (Unix epoch, ms), and how long all of its calls
    took together. None where spans are not kept (`QUIRE_TRACE_RECENT`).
    """
    traces: dict[int, list[ReadableSpan]] = {}
    for span in recent_spans.kept():
        context, parent = span.get_span_context(), span.parent
        if context is not None and (parent is None or parent.is_remote):
            traces.setdefault(context.trace_id, []).append(span)
    latest = sorted(traces.items(), key=lambda item: _start_ns(item[1][0]))[-_REQUESTS:]
    return [_row(trace_id, spans) for trace_id, spans in reversed(latest)]


async def spans_of(trace_id: str, cluster: ClusterSpans) -> dict[str, object]:
    """Return the spans of a trace, by their start, and the members that did not answer; `cut`: there are more.

    Spans have the attributes of layers alone: other attributes name tenants' images and chunks.
    """
    return await asyncio.create_task(_collected(trace_id, cluster), context=background())


async def _collected(trace_id: str, cluster: ClusterSpans) -> dict[str, object]:
    spans: list[dict[str, Any]] = []
    failures = []
    async with contextlib.aclosing(cluster.of(trace_id)) as pages:
        async for page in pages:
            spans += map(_shown, page.spans)
            if page.error:
                failures.append(f"{page.member}: {page.error}")
            if len(spans) > _SPANS_MAX:
                break
    spans.sort(key=lambda span: span["start_ns"])
    return {"spans": spans[:_SPANS_MAX], "cut": len(spans) > _SPANS_MAX, "missing": failures}


def _shown(text: bytes) -> dict[str, Any]:
    span = json.loads(text)
    about = {name: value for name, value in span["attributes"].items() if name == _LAYER or name.endswith("_us")}
    return {
        **{name: span[name] for name in _SHOWN},
        "attributes": about,
        "events_ns": [time_ns for time_ns, *_ in span["events"]],
    }


def _row(trace_id: int, spans: Sequence[ReadableSpan]) -> dict[str, object]:
    first = min(spans, key=_start_ns)
    end_ns = max(span.end_time or 0 for span in spans)
    return {
        "trace": f"{trace_id:032x}",
        "name": first.name.removeprefix("quire.v1."),
        "start_ms": _start_ns(first) // 1_000_000,
        "ms": (end_ns - _start_ns(first)) / 1e6,
        "ok": all(span.status.is_ok for span in spans),
    }


def _start_ns(span: ReadableSpan) -> int:
    return span.start_time or 0
