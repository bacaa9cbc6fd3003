"""Traces of tenants' requests: linked to what their headers name, and never part of it."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

import quire_server.grpc_server as grpc_server_module
from quire.telemetry import entry
from quire_server.grpc_server import MeasuredService

_TRACE, _SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
_HEADERS = {"traceparent": f"00-{_TRACE:032x}-{_SPAN:016x}-01"}


def _recorded(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], *, strangers: bool, record: bool
) -> list[ReadableSpan]:
    """The spans of one request, where the gateway itself records all requests or none."""
    spans = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON if record else ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(grpc_server_module, "tracer", lambda: provider.get_tracer("test"))
    served = MeasuredService(["quire.v1.GatewayService"], strangers=strangers)
    with served.request("/quire.v1.GatewayService/Lookup", headers):
        pass
    return list(spans.get_finished_spans())


def test_a_tenants_trace_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    (span,) = _recorded(monkeypatch, _HEADERS, strangers=True, record=True)
    assert span.context.trace_id != _TRACE and span.parent is None
    assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [(_TRACE, _SPAN)]


def test_a_tenant_does_not_decide_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _recorded(monkeypatch, _HEADERS, strangers=True, record=False)
    assert len(_recorded(monkeypatch, _HEADERS, strangers=False, record=False)) == 1


def test_a_members_trace_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    (span,) = _recorded(monkeypatch, _HEADERS, strangers=False, record=True)
    assert span.context.trace_id == _TRACE and not span.links
    assert span.parent is not None and span.parent.span_id == _SPAN


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{0:032x}-{0:016x}-01"}])
def test_without_a_trace_there_is_no_link(headers: dict[str, str]) -> None:
    context, links = entry(headers, strangers=True)
    assert not links and not trace.get_current_span(context).get_span_context().is_valid
