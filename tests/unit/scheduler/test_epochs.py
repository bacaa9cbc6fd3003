"""Epochs of a link, on a clock that the test holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_scheduler.core.epochs import LinkEpochs
from quire_scheduler.core.factory import POLICIES, make_policy
from quire_scheduler.core.policies import Equal, StallOpt
from quire_scheduler.core.policy import Demand, Rates
from quire_scheduler.errors import DemandInvalid

_BUDGET = 1_000_000


def _demand(name: str, tenant: str = "", weight: float = 1.0) -> Demand:
    return Demand(name, 1000, None, 32, tenant, weight)


def test_rates_are_stable_within_an_epoch_and_equal_after_it() -> None:
    link = LinkEpochs(_BUDGET, 1.0, Equal())
    assert link.admit(_demand("a"), 10.1).rate_bytes_per_s == _BUDGET
    late = link.admit(_demand("b"), 10.2)
    assert late.rate_bytes_per_s == 0, "nothing is free before the epoch ends"
    assert late.short
    assert late.left_s == pytest.approx(0.01), "it is to look again soon"
    assert link.renew({"a": 30}, 10.3)[0].rate_bytes_per_s == _BUDGET, "no rate falls within an epoch"
    grants = link.renew({"a": 20, "b": 31}, 11.0)
    assert [grant.rate_bytes_per_s for grant in grants] == [_BUDGET // 2] * 2
    link.finish(["a"], 11.1)
    assert link.renew({"b": 30}, 11.2)[0].rate_bytes_per_s == _BUDGET // 2, "freed bandwidth waits for the epoch"
    assert link.renew({"b": 30}, 12.0)[0].rate_bytes_per_s == _BUDGET


def test_what_is_freed_serves_a_newcomer_at_once() -> None:
    """A cancelled delivery's rate is there for the next one in the same epoch."""
    link = LinkEpochs(_BUDGET, 1.0, Equal())
    link.admit(_demand("a"), 10.0)
    link.finish(["a"], 10.1)
    assert link.admit(_demand("b"), 10.2).rate_bytes_per_s == _BUDGET


def test_those_that_found_too_little_rise_with_what_others_free() -> None:
    """Eight begin at once: the first has the whole link, is over long before the epoch ends, and leaves it to seven."""
    link = LinkEpochs(_BUDGET, 1.0, StallOpt())
    names = [str(number) for number in range(8)]
    grants = [link.admit(_demand(name), 10.0) for name in names]
    assert [grant.rate_bytes_per_s for grant in grants] == [_BUDGET] + [0] * 7
    assert [grant.short for grant in grants] == [False] + [True] * 7
    assert {grant.rate_bytes_per_s for grant in link.renew(names[1:], 10.01)} == {0}, "nothing has become free"
    link.finish(["0"], 10.02)
    grants = link.renew(names[1:4], 10.03)
    assert {grant.rate_bytes_per_s for grant in grants} == {_BUDGET // 7}
    assert not any(grant.short for grant in grants)
    assert link.granted_bytes_per_s == _BUDGET // 7 * 7, "the others' parts are kept for them"
    link.finish(["1"], 10.04)
    assert {grant.rate_bytes_per_s for grant in link.renew(names[2:], 10.05)} == {_BUDGET // 7}, "they have their parts"


def test_what_is_freed_is_divided_by_what_each_lacks() -> None:
    """The part of a small one and that of a large one (both waited for, sizes 1 and 9) are 1 and 3 of the budget."""
    link = LinkEpochs(_BUDGET, 1.0, StallOpt())
    link.admit(_demand("first"), 10.0, 300_000)
    link.admit(_demand("second"), 10.0, 700_000)
    for name, size in (("small", 1000), ("large", 9000)):
        assert link.admit(Demand(name, size, None, 32), 10.1).rate_bytes_per_s == 0
    link.finish(["first"], 10.2)
    small, large = link.renew(["small", "large"], 10.3)
    assert large.rate_bytes_per_s == pytest.approx(3 * small.rate_bytes_per_s, rel=0.01)
    assert large.rate_bytes_per_s + small.rate_bytes_per_s == pytest.approx(300_000, abs=2)
    assert small.short
    assert large.short
    link.finish(["second"], 10.4)
    assert [grant.rate_bytes_per_s for grant in link.renew(["small", "large"], 10.5)] == [250_000, 750_000]


def test_a_raise_holds_the_tenants_cap() -> None:
    link = LinkEpochs(_BUDGET, 1.0, StallOpt())
    link.admit(_demand("other"), 10.0)
    for number in range(4):
        link.admit(Demand(str(number), 1000, None, 32, "t", cap_bytes_per_s=100_000), 10.1)
    link.finish(["other"], 10.2)
    grants = link.renew(map(str, range(4)), 10.3)
    assert [grant.rate_bytes_per_s for grant in grants] == [25_000] * 4


def test_a_raise_leaves_the_tenants_others_what_they_have() -> None:
    """One has all of the cap until the epoch ends: what becomes free on the link is not for the other."""
    link = LinkEpochs(_BUDGET, 1.0, StallOpt())
    link.admit(_demand("other"), 10.0, 900_000)
    for number in range(2):
        link.admit(Demand(str(number), 1000, None, 32, "t", cap_bytes_per_s=100_000), 10.1)
    link.finish(["other"], 10.2)
    assert [grant.rate_bytes_per_s for grant in link.renew(["0", "1"], 10.3)] == [100_000, 0]
    link.finish(["0"], 10.4)
    assert [grant.rate_bytes_per_s for grant in link.renew(["1"], 10.5)] == [100_000]


def test_nothing_rises_while_a_link_that_was_taken_over_is_quiet() -> None:
    """What has become free may be another's, who has not said so yet."""
    link = LinkEpochs(_BUDGET, 1.0, Equal(), quiet_from_s=5.5)
    link.admit(_demand("old"), 5.6, _BUDGET)
    assert link.admit(_demand("new"), 5.7).rate_bytes_per_s == 0
    link.finish(["old"], 5.8)
    assert link.renew(["new"], 5.9)[0].rate_bytes_per_s == 0


def test_a_scheduler_that_did_not_come_to_run_forgets_none() -> None:
    """Five epochs passed, and the renewals of all of them wait; those of a node that is gone do not come."""
    link = LinkEpochs(_BUDGET, 1.0, Equal())
    for name in ("alive", "dead"):
        link.admit(_demand(name), 10.0)
    assert link.admit(_demand("new"), 15.0).rate_bytes_per_s == 0
    assert link.renew(["alive"], 15.1)[0].rate_bytes_per_s == _BUDGET // 2
    assert link.renew(["alive"], 16.0) and link.renew(["alive"], 17.0)
    assert set(link.rates) == {"alive", "new"}
    link.advance(17.0 + 20.0)
    assert not link.rates, "twenty epochs in which there was no renewal"


def test_sharing_at_once() -> None:
    """The option: every rate follows every arrival and departure, and nodes look again soon."""
    link = LinkEpochs(_BUDGET, 1.0, Equal(), at_once=True)
    link.admit(_demand("a"), 10.0)
    assert link.admit(_demand("b"), 10.1).rate_bytes_per_s == _BUDGET // 2
    grant = link.renew({"a": 30}, 10.2)[0]
    assert grant.rate_bytes_per_s == _BUDGET // 2
    assert grant.left_s <= 0.01
    link.finish(["b"], 10.3)
    assert link.renew({"a": 30}, 10.4)[0].rate_bytes_per_s == _BUDGET


def test_a_silent_node_loses_its_admission() -> None:
    link = LinkEpochs(_BUDGET, 1.0, Equal())
    link.admit(_demand("dead"), 0.0)
    for epoch in range(1, 4):
        link.admit(_demand("alive"), float(epoch))
    assert len(link) == 1
    assert link.renew({"dead": 1}, 3.5) == []


def test_a_new_leader_leaves_rates_as_they_are() -> None:
    """Deliveries that a node admits again keep what they have, as long as the budget lasts."""
    link = LinkEpochs(_BUDGET, 1.0, Equal())
    assert link.admit(_demand("a"), 0.1, 300_000).rate_bytes_per_s == 300_000
    assert link.admit(_demand("b"), 0.1, 600_000).rate_bytes_per_s == 600_000
    assert link.admit(_demand("c"), 0.1, 300_000).rate_bytes_per_s == 100_000
    assert [grant.rate_bytes_per_s for grant in link.renew({"a": 1, "b": 1, "c": 1}, 1.1)] == [_BUDGET // 3] * 3


def test_a_link_that_was_taken_over_is_quiet_for_an_epoch() -> None:
    """Those that have a rate say so first; who is new waits."""
    link = LinkEpochs(_BUDGET, 1.0, Equal(), quiet_from_s=5.5)
    assert link.admit(_demand("new"), 5.6).rate_bytes_per_s == 0
    assert link.admit(_demand("old"), 5.7, 900_000).rate_bytes_per_s == 900_000
    assert [grant.rate_bytes_per_s for grant in link.renew(["new", "old"], 6.0)] == [_BUDGET // 2] * 2
    assert link.admit(_demand("newer"), 6.6).rate_bytes_per_s == 0
    link.finish(["old"], 6.7)
    assert link.admit(_demand("newest"), 6.8).rate_bytes_per_s > 0


def test_newcomers_of_a_capped_tenant_share_its_cap() -> None:
    """Eight in the same epoch have no more than the cap together."""
    link = LinkEpochs(_BUDGET, 1.0, StallOpt())
    for number in range(8):
        link.admit(Demand(str(number), 1000, None, 32, "t", cap_bytes_per_s=100_000), 0.1)
    assert link.granted_bytes_per_s == 100_000
    assert (
        LinkEpochs(_BUDGET, 1.0, Equal())
        .admit(Demand("held", 1000, None, 32, "t", cap_bytes_per_s=100_000), 0.1, 900_000)
        .rate_bytes_per_s
        == 100_000
    )


def test_many_demands_of_many_tenants_are_shared_in_no_time() -> None:
    """Work per newcomer does not grow with other tenants' demands: counted, not timed."""

    class Counting(Equal):
        seen = 0

        def allocate(self, demands: Sequence[Demand], budget: float, effort: float = 1.0) -> Rates:
            Counting.seen += len(demands)
            return super().allocate(demands, budget, effort)

    link = LinkEpochs(_BUDGET, 1.0, Counting())
    for number in range(200):
        link.admit(_demand(str(number), tenant=str(number % 50)), 0.1)
    assert Counting.seen <= 4 * 200


@given(
    st.sampled_from(POLICIES),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from("ajrf"), st.integers(0, 5), st.floats(0, 0.7), st.integers(0, 10**6)), max_size=60
    ),
)
def test_grants_never_exceed_the_budget(policy: str, at_once: bool, events: list[tuple[str, int, float, int]]) -> None:
    """Whatever joins, renews, finishes, crashes or falls silent, under every policy, at every moment."""
    link = LinkEpochs(_BUDGET, 1.0, make_policy(policy, 50_000.0), margin=50_000.0, at_once=at_once)
    now, before = 0.0, dict[str, int]()
    for kind, number, pause, held in events:
        now += pause
        name = str(number)
        if kind in "aj":
            window = None if number == 0 else 0.001 * number
            link.admit(Demand(name, 1000 * (number + 1), window, 32, tenant=str(number % 2)), now, held)
        elif kind == "r":
            link.renew({name: 1}, now)
        else:
            link.finish([name], now)
        assert 0 <= link.granted_bytes_per_s <= _BUDGET
        assert all(rate >= 0 for rate in link.rates.values())
        if int(now) == int(now - pause) and not at_once and kind in "rf":
            assert all(rate >= before.get(name, 0) for name, rate in link.rates.items()), "none falls within an epoch"
        before = link.rates


def test_a_flood_cannot_push_another_tenant_below_its_share() -> None:
    """Twenty requests of one tenant, whose windows are lies, against one of another."""
    link = LinkEpochs(_BUDGET, 1.0, StallOpt())
    all_of_them = {f"flood-{number}": 32 for number in range(20)}
    for number in range(20):
        link.admit(Demand(f"flood-{number}", 10**9, 1e-9, 32, "flood"), 0.0)
    link.admit(Demand("honest", 4000, 0.01, 32, "honest"), 0.1)
    link.renew(all_of_them, 1.0)
    assert link.rates["honest"] == 400_000, "its zero-stall rate is below half of the link: it gets all of it"
    link.admit(Demand("honest", 40_000, 0.01, 32, "honest"), 1.1)
    link.renew(all_of_them, 2.0)
    assert link.rates["honest"] == _BUDGET // 2, "it wants more than half of the link: it gets half"
    link.admit(Demand("honest", 40_000, 0.01, 32, "honest", weight=3.0), 2.1)
    link.renew(all_of_them, 3.0)
    assert link.rates["honest"] == 3 * _BUDGET // 4
    link.admit(Demand("honest", 40_000, 0.01, 32, "honest", weight=3.0, cap_bytes_per_s=1000), 3.1)
    link.renew(all_of_them, 4.0)
    assert link.rates["honest"] == 1000


@pytest.mark.parametrize(
    "field,value",
    [
        ("bytes_per_layer", 0),
        ("bytes_per_layer", -5),
        ("layers_left", -1),
        ("weight", 0.0),
        ("weight", float("nan")),
        ("weight", 1e17),
        ("weight", float("inf")),
        ("delivery", ""),
        ("compute_window_s", 0.0),
        ("compute_window_s", -1.0),
        ("compute_window_s", float("nan")),
        ("cap_bytes_per_s", -1),
    ],
)
def test_demands_must_make_sense(field: str, value: object) -> None:
    values: dict[str, object] = {"delivery": "d", "bytes_per_layer": 1, "compute_window_s": 0.1, "layers_left": 1}
    with pytest.raises(DemandInvalid, match=field):
        Demand(**(values | {field: value}))  # type: ignore[arg-type]


def test_the_credit_of_all_nodes_is_a_quarter_of_the_link() -> None:
    """Shared among the nodes that used it within a minute."""
    link = LinkEpochs(_BUDGET, 1.0, Equal())
    assert link.admit(_demand("storage-0/a"), 10.1).credit_bytes_per_s == _BUDGET // 4
    assert link.admit(_demand("storage-1/a"), 10.2).credit_bytes_per_s == _BUDGET // 8
    assert link.renew({"storage-0/a": 30}, 10.3)[0].credit_bytes_per_s == _BUDGET // 8
    assert link.admit(_demand("storage-0/b"), 71.0).credit_bytes_per_s == _BUDGET // 4, "the other one is silent"
