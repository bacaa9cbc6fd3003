"""When layers are needed, and for how long each of them may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.integrations.hints import Hints
from quire.integrations.vllm.scheduler.hints import priority_of
from quire.model.errors import InvalidRequest
from quire.model.urgency import Urgency
from quire.wire import convert
from quire.wire.v1 import gateway_pb2, storage_pb2

_US = st.integers(0, 10_000_000)


@given(_US, _US, st.integers(1, 200))
def test_layers_that_take_their_time_are_not_late(window_us: int, first_us: int, layers: int) -> None:
    """Layers behind one that is waited for follow in windows; otherwise no slower rate is in time."""
    urgency = Urgency(compute_window_us=window_us, first_layer_us=first_us)
    layer_us = urgency.layer_us(layers)
    if first_us <= window_us:
        assert layer_us == window_us
        return
    ends_us = [(layer + 1) * layer_us for layer in range(layers)]
    assert all(end_us <= 1e6 * urgency.needed_s(layer) + 1e-3 for layer, end_us in enumerate(ends_us))
    assert layers * (layer_us + 1) > 1e6 * urgency.needed_s(layers - 1) - 1e-3


def test_what_is_unknown_is_no_time() -> None:
    assert Urgency().layer_us(4) == 0 and not Urgency(priority=3).is_known
    assert Urgency(first_layer_us=4000).layer_us(4) == 1000, "all layers are needed then"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compute_window_us", -1),
        ("compute_window_us", 1 << 32),
        ("first_layer_us", -1),
        ("priority", 11),
        ("priority", -11),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Urgency(**{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize("message", [gateway_pb2.FetchRequest, gateway_pb2.RetrieveRequest, storage_pb2.DeliverRequest])
def test_it_is_the_same_behind_the_wire(message: Any) -> None:
    urgency = Urgency(compute_window_us=800, first_layer_us=2000, priority=-3)
    sent = message(compute_window_us=800, first_layer_us=2000, priority=-3).SerializeToString()
    assert convert.urgency_from(message.FromString(sent)) == urgency


@pytest.mark.parametrize(("of_vllm", "priority"), [(0, 0), (3, -3), (-2, 2), (1 << 40, -10), (-11, 10)])
def test_low_numbers_of_vllm_are_high_priorities(of_vllm: int, priority: int) -> None:
    assert priority_of(SimpleNamespace(priority=of_vllm), Hints()) == priority
