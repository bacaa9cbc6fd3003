"""The picture of a reused prefix: what storage nodes told of their layers."""

from __future__ import annotations

from typing import Any

from quire.telemetry import names
from quire_tools.cli.views.timeline import Sent, sent_layers
from quire_tools.spans import Span, Trace


def _span(number: int, parent: str, name: str, start_ms: int, end_ms: int, **attributes: Any) -> Span:
    told = {f"quire.{each}": value for each, value in attributes.items()}
    start_ns, end_ns = start_ms * 1_000_000, end_ms * 1_000_000
    return Span("t", str(number), parent, name, "storage", start_ns, end_ns, True, told, [])


def test_each_node_tells_when_it_had_read_and_sent_a_layer() -> None:
    spans = [
        _span(1, "one", names.STORAGE_LAYER, 1_010, 1_050, layer=0, ready_us=30_000),
        _span(2, "one", names.STORAGE_LAYER, 1_050, 1_060, layer=1, ready_us=0),
        _span(3, "two", names.STORAGE_LAYER, 1_020, 1_070, layer=0, ready_us=1_000),
        _span(4, "two", names.STORAGE_DELIVER, 1_000, 1_080),
    ]
    trace = Trace("t", {span.span_id: span for span in spans})
    one, two = sent_layers(trace, began_ns=1_000_000_000)
    assert one == {0: Sent(0.01, 0.04, 0.05), 1: Sent(0.05, 0.05, 0.06)}
    assert two == {0: Sent(0.02, 0.021, 0.07)}


def test_of_a_cluster_that_keeps_no_traces_nothing_is_known() -> None:
    assert sent_layers(None, 0) == []
