"""Epochs of a link, on a clock that the test holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_scheduler.core.epochs import LinkEpochs
from quire_scheduler.core.policy import Demand, equal_share
from quire_scheduler.errors import DemandInvalid

_BUDGET = 1_000_000


def _demand(name: str) -> Demand:
    return Demand(name, 1000, 0.01, 32)


def test_rates_are_stable_within_an_epoch_and_equal_after_it() -> None:
    link = LinkEpochs(_BUDGET, 1.0, equal_share)
    assert link.admit(_demand("a"), 10.1).rate_bytes_per_s == _BUDGET
    late = link.admit(_demand("b"), 10.2)
    assert 0 < late.rate_bytes_per_s <= _BUDGET // 2
    assert link.renew({"a": 30}, 10.3)[0].rate_bytes_per_s == _BUDGET, "nobody's rate falls within an epoch"
    grants = link.renew({"a": 20, "b": 31}, 11.0)
    assert [grant.rate_bytes_per_s for grant in grants] == [_BUDGET // 2] * 2
    assert link.finish("a", 11.1)
    assert link.renew({"b": 30}, 11.2)[0].rate_bytes_per_s == _BUDGET // 2, "freed bandwidth waits for the epoch"
    assert link.renew({"b": 30}, 12.0)[0].rate_bytes_per_s == _BUDGET


def test_a_silent_node_loses_its_admission() -> None:
    link = LinkEpochs(_BUDGET, 1.0, equal_share)
    link.admit(_demand("dead"), 0.0)
    for epoch in range(1, 4):
        link.admit(_demand("alive"), float(epoch))
    assert len(link) == 1
    assert link.renew({"dead": 1}, 3.5) == []


@given(st.lists(st.tuples(st.sampled_from("ajrf"), st.integers(0, 5), st.floats(0, 0.7)), max_size=60))
def test_epoch_boundaries_never_grant_more_than_the_budget(events: list[tuple[str, int, float]]) -> None:
    """Whatever joins, renews, finishes or falls silent: at each epoch the grants fit the budget again."""
    link, now = LinkEpochs(_BUDGET, 1.0, equal_share), 0.0
    for kind, number, pause in events:
        now += pause
        name = str(number)
        if kind in "aj":
            assert link.admit(_demand(name), now).rate_bytes_per_s >= 1
        elif kind == "r":
            link.renew({name: 1}, now)
        else:
            link.finish(name, now)
        boundary = LinkEpochs.renew(link, {}, float(int(now) + 1))
        assert boundary == []
        assert link.granted_bytes_per_s <= _BUDGET
        now = float(int(now) + 1)


@pytest.mark.parametrize(
    "field,value", [("bytes_per_layer", 0), ("layers_left", -1), ("weight", 0.0), ("delivery", "")]
)
def test_demands_must_make_sense(field: str, value: object) -> None:
    values: dict[str, object] = {"delivery": "d", "bytes_per_layer": 1, "compute_window_s": 0.0, "layers_left": 1}
    with pytest.raises(DemandInvalid, match=field):
        Demand(**(values | {field: value}))  # type: ignore[arg-type]
    with pytest.raises(DemandInvalid, match="compute_window_s"):
        Demand("d", 1, -1.0, 1)
