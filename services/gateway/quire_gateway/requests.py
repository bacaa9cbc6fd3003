"""What is measured and traced of a request by HTTP, at either frontend."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

from aiohttp import web
from opentelemetry import trace

from quire.model.errors import ConfigInvalid
from quire.telemetry import attach, meter, names, tracer


@dataclass(slots=True)
class Answer:
    """Filled in by the frontend; 0: the client went away."""

    status: int = 0


class HttpRequests:
    """`frontend`: as the metrics call it."""

    def __init__(self, frontend: str) -> None:
        self._frontend = frontend
        self._duration = meter().create_histogram(
            names.HTTP_DURATION, "s", "time to answer a request", explicit_bucket_boundaries_advisory=names.SECONDS
        )

    @contextlib.contextmanager
    def timed(self, request: web.BaseRequest) -> Iterator[Answer]:
        """One request; how long it took, by method and status."""
        answer, started_s = Answer(), time.perf_counter()
        try:
            yield answer
        finally:
            attributes: dict[str, str | int] = {
                "http.request.method": request.method,
                "http.response.status_code": answer.status,
                "quire.frontend": self._frontend,
            }
            self._duration.record(time.perf_counter() - started_s, attributes)


@contextlib.contextmanager
def traced(request: web.BaseRequest, name: str, request_id: str) -> Iterator[trace.Span]:
    """A span, in the trace that the client names in the usual header (W3C), if it has one."""
    carrier = {header: request.headers.get(header, "") for header in ("traceparent", "tracestate")}
    about = {"http.request.method": request.method, "quire.request_id": request_id}
    with tracer().start_as_current_span(name, attach(carrier), trace.SpanKind.SERVER, about) as span:
        yield span


async def listen(runner: web.BaseRunner, address: str, context: ssl.SSLContext | None = None) -> None:
    """Raises `ConfigInvalid` for an address that is none, or is taken."""
    host, _, port = address.rpartition(":")
    try:
        await web.TCPSite(runner, host or None, int(port), ssl_context=context, backlog=1024).start()
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"cannot listen on {address!r}: {error}") from None
