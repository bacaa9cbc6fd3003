"""Handling of requests in HTTP servers: measure, trace, send the answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiohttp import web
from opentelemetry import trace

from quire.telemetry import counter, entry, meter, names, tracer
from quire_server.limits.connections import LISTENER_SHARE, HttpConnections, connections_max
from quire_server.malformed_requests import MalformedAnswer

IDLE_S: Final = 60.0
"""For how long a client may send or take nothing."""
_SLICE_BYTES: Final = 1 << 20
_CLASSES: Final = ("gone", "1xx", "2xx", "3xx", "4xx", "5xx")
"""By the first digit of the status; `gone`: the client went away."""


@dataclass(slots=True)
class Answer:
    """Filled in by the frontend; 0: the client went away."""

    status: int = 0


class HttpRequests:
    """Counts and times of an interface's requests.

    Args:
        frontend: As the metrics call it.
        share: Of the process' descriptors, for connections.
        malformed: Makes answers to requests that cannot be parsed; None for plain text.
    """

    def __init__(self, frontend: str, share: float = LISTENER_SHARE, malformed: MalformedAnswer | None = None) -> None:
        self._frontend = frontend
        self.connections = HttpConnections(partial(connections_max, share), malformed)
        kinds = [{"quire.frontend": frontend, "class": kind} for kind in _CLASSES]
        self._answers = counter(names.HTTP_REQUESTS, "1", "requests by class of their status", kinds)
        self._duration = meter().create_histogram(
            names.HTTP_DURATION, "s", "time to answer a request", explicit_bucket_boundaries_advisory=names.SECONDS
        )

    @contextlib.contextmanager
    def timed(self, request: web.BaseRequest) -> Iterator[Answer]:
        """Measure one request by method and status."""
        answer, started_s = Answer(), time.perf_counter()
        try:
            with self.connections.serving(request):
                yield answer
        finally:
            attributes: dict[str, str | int] = {
                "http.request.method": request.method,
                "http.response.status_code": answer.status,
                "quire.frontend": self._frontend,
            }
            self._duration.record(time.perf_counter() - started_s, attributes)
            self._answers.add(1, {"quire.frontend": self._frontend, "class": _CLASSES[answer.status // 100]})


@contextlib.contextmanager
def traced(request: web.BaseRequest, name: str, request_id: str, *, strangers: bool) -> Iterator[trace.Span]:
    """A span in the trace that the client names by W3C's header, or linked to that of `strangers`."""
    carrier = {header: request.headers.get(header, "") for header in ("traceparent", "tracestate")}
    about = {"http.request.method": request.method, "quire.request_id": request_id}
    context, links = entry(carrier, strangers=strangers)
    with tracer().start_as_current_span(name, context, trace.SpanKind.SERVER, about, links) as span:
        yield span


async def send(response: web.StreamResponse, piece: memoryview) -> None:
    """Write in slices: a client that takes less than one in a minute is not waited for. Raises `TimeoutError`."""
    for at in range(0, len(piece), _SLICE_BYTES):
        async with asyncio.timeout(IDLE_S):
            await response.write(piece[at : at + _SLICE_BYTES])
