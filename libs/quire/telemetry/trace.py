"""Trace context on its way through gRPC metadata, the descriptor's headers and the UCX message."""

from __future__ import annotations

import contextvars
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR: Final = TraceContextTextMapPropagator()
BINARY_BYTES: Final = 25
Result = TypeVar("Result")


def headers(context: Context | None = None) -> dict[str, str]:
    """`traceparent` (and `tracestate`) of the current span, or of `context`; empty without one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier


def entry(carrier: Mapping[str, str], *, strangers: bool = False) -> tuple[Context, list[Link]]:
    """Return the context of a request's span, and its links. The span continues the trace that the headers name.

    `strangers`: the headers are a tenant's. The span begins a trace that is linked to the tenant's, so that a tenant
    neither chooses the recorded requests nor writes into another trace.
    """
    context = _PROPAGATOR.extract(dict(carrier), Context())
    if not strangers:
        return context, []
    caller = trace.get_current_span(context).get_span_context()
    return Context(), [Link(caller)] if caller.is_valid else []


async def within(carrier: Mapping[str, str], work: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
    """Do work in the trace that a request's headers name, in a task of its own; in none without such headers."""
    if carrier:
        otel_context.attach(_PROPAGATOR.extract(dict(carrier), Context()))
    return await work(*arguments)


def background() -> contextvars.Context:
    """Return a context for tasks outside of any request: their calls record no spans, here or elsewhere.

    `asyncio.create_task(…, context=background())`.
    """
    context = contextvars.copy_context()
    context.run(be_background)
    return context


def be_background() -> None:
    """Have the current task, and those that it starts, record no spans."""
    unsampled = trace.SpanContext(random.getrandbits(128) or 1, random.getrandbits(64) or 1, is_remote=False)
    otel_context.attach(trace.set_span_in_context(_NoRequest(unsampled)))


def in_request() -> bool:
    """Whether the current task belongs to a request, recorded or not."""
    span = trace.get_current_span()
    return span.get_span_context().is_valid and not isinstance(span, _NoRequest)


class _NoRequest(trace.NonRecordingSpan):
    """The span of what belongs to no request."""


def binary_context() -> bytes:
    """Current context in 25 bytes: trace id, span id, flags. Zeros without one."""
    context = trace.get_current_span().get_span_context()
    return context.trace_id.to_bytes(16, "big") + context.span_id.to_bytes(8, "big") + bytes([context.trace_flags])


def from_binary(raw: bytes) -> trace.SpanContext:
    """The inverse of `binary_context`."""
    flags = trace.TraceFlags(raw[24])
    return trace.SpanContext(int.from_bytes(raw[:16], "big"), int.from_bytes(raw[16:24], "big"), True, flags)
