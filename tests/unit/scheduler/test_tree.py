"""Links below links: hosts in racks below a spine."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.testing import FakeClock
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core import tree
from quire_scheduler.core.epochs import LinkEpochs
from quire_scheduler.core.factory import make_policy
from quire_scheduler.core.policies import Equal
from quire_scheduler.core.policy import Demand
from quire_scheduler.core.tree import TreeLink
from quire_scheduler.leadership import Leadership
from quire_scheduler.runtime import Scheduler


def _link(budget: int, above: LinkEpochs | None = None, *, policy: str = "equal", at_once: bool = False) -> LinkEpochs:
    return LinkEpochs(budget, 1.0, make_policy(policy, 100.0), margin=100.0, at_once=at_once, above=above)


def _check(links: list[LinkEpochs]) -> None:
    """No budget is exceeded, by the deliveries of a link and of all below it."""
    for link in links:
        below = [link]
        for each in links:
            if each._above in below:
                below.append(each)
        granted = sum(rate for each in below for rate in each.rates.values())
        assert granted <= link.budget_bytes_per_s
        assert granted == link.totals.granted, "what is known of it is what is so"


def _check_fair(links: list[LinkEpochs]) -> None:
    """Who has less than it wants has, by its weight, no less than any other; and nothing is left that one may use."""
    for link in links:
        whole = link._whole()
        parts = {each: part for each, part in link._divided(whole).items() if part > 0}
        claims = {each: each._own() if each is link else each.totals for each in parts}
        usable = sum(claim.usable for claim in claims.values())
        if len(parts) > 1:
            assert sum(parts.values()) == pytest.approx(min(whole, usable))
        for one, part in parts.items():
            assert one is link or part <= claims[one].usable * (1 + 1e-9)
            if part < claims[one].wanted * (1 - 1e-9):
                least = part / claims[one].weight
                assert all(least >= parts[other] / claims[other].weight * (1 - 1e-9) for other in parts)


_TREES = st.lists(st.tuples(st.integers(-1, 5), st.integers(10, 10**6)), min_size=1, max_size=7)
_EVENTS = st.lists(
    st.tuples(st.sampled_from("ajrf"), st.integers(0, 6), st.integers(0, 5), st.floats(0, 0.7), st.integers(0, 10**6)),
    max_size=50,
)


_ONE_TREE_IDLE = [("a", 0, 0, 0.5, 0), ("a", 0, 1, 0.0, 0), ("a", 2, 0, 0.5, 0), ("r", 0, 0, 0.0, 0)]
"""Another tree begins its epoch meanwhile."""


@example([(0, 10), (0, 10), (-1, 10)], "equal", False, _ONE_TREE_IDLE)
@given(_TREES, st.sampled_from(["equal", "stall-opt", "adaptive"]), st.booleans(), _EVENTS)
def test_no_budget_of_a_tree_is_exceeded(
    shape: list[tuple[int, int]], policy: str, at_once: bool, events: list[tuple[str, int, int, float, int]]
) -> None:
    """Whatever joins, renews, finishes or falls silent on any link; rates rise within an epoch, and none falls."""
    links: list[LinkEpochs] = []
    for at, (above, budget) in enumerate(shape):
        links.append(_link(budget, links[above % at] if at and above >= 0 else None, policy=policy, at_once=at_once))
    now, before = 0.0, dict[tuple[int, str], int]()
    for kind, at, number, pause, held in events:
        now += pause
        for each in links:  # trees on which nothing happened begin their epoch, too
            each.advance(now)
        link, name = links[at % len(links)], str(number)
        if kind in "aj":
            window = None if number == 0 else 0.001 * number
            link.admit(Demand(name, 1000 * (number + 1), window, 32, tenant=str(number % 2)), now, held)
        elif kind == "r":
            link.renew({name: 1}, now)
        else:
            link.finish([name], now)
        _check(links)
        _check_fair(links)
        rates = {(at, name): rate for at, each in enumerate(links) for name, rate in each.rates.items()}
        if int(now) == int(now - pause) and not at_once and kind in "rf":
            assert all(rate >= before.get(name, 0) for name, rate in rates.items()), "none falls within an epoch"
        before = rates


def test_a_link_that_looks_at_its_own_budget_alone_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rack = _link(1000)
    hosts = [_link(1000, rack), _link(1000, rack)]
    for host in hosts:
        host.admit(Demand("a", 100, None, 32), 0.1)
    _check([rack, *hosts])
    assert [host.rates["a"] for host in hosts] == [1000, 0], "none falls within an epoch"
    monkeypatch.setattr(TreeLink, "_way", lambda self: iter([self]))
    for host in hosts:
        host.admit(Demand("b", 100, None, 32), 0.2)
    with pytest.raises(AssertionError):
        _check([rack, *hosts])


def test_equal_parts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one host cannot use is lost to the other."""
    rack = _link(1000)
    hosts = [_link(1000, rack), _link(200, rack)]
    for host in hosts:
        host.admit(Demand("a", 100, None, 32), 0.1)
    _check_fair([rack, *hosts])
    monkeypatch.setattr(tree, "shares", lambda sharers, whole: dict.fromkeys(sharers, whole / len(sharers)))
    with pytest.raises(AssertionError):
        _check_fair([rack, *hosts])


def test_hosts_share_their_rack_and_racks_the_spine() -> None:
    """Three racks of 60 below a spine of 90; hosts of 40. What one host can't use goes to others, up to their own."""
    spine = _link(90_000)
    racks = [_link(60_000, spine) for _ in range(3)]
    hosts = [_link(40_000, rack) for rack in racks for _ in range(2)]
    for number, host in enumerate(hosts[:3]):
        host.admit(Demand(f"d{number}", 1000, None, 32), 0.5)
    hosts[4].admit(Demand("small", 100, 0.02, 32), 0.5)
    spine.advance(1.0)
    rates = {name: rate for host in hosts for name, rate in host.rates.items()}
    # "small" wants 100 / 0.02 s and the margin; the racks of the others share what is left by weight, 2 to 1.
    left = 90_000 - 5_100
    expected = {"d0": left / 3, "d1": left / 3, "d2": left / 3, "small": 5_100}
    assert rates == pytest.approx(expected, abs=1)
    hosts[0].finish(["d0"], 1.1)
    hosts[1].renew({"d1": 1}, 2.0)
    rates = {name: rate for host in hosts for name, rate in host.rates.items()}
    assert rates == pytest.approx({"d1": 40_000, "d2": 40_000, "small": 10_000}, abs=1), "a host has 40,000"


def test_what_one_host_frees_raises_another_within_the_epoch() -> None:
    rack = _link(1000)
    first, second = _link(1000, rack), _link(1000, rack)
    first.admit(Demand("a", 100, None, 32), 0.1)
    grant = second.admit(Demand("b", 100, None, 32), 0.2)
    assert grant.rate_bytes_per_s == 0 and grant.short
    first.finish(["a"], 0.3)
    assert second.renew(["b"], 0.4)[0].rate_bytes_per_s == 1000


def test_the_credit_of_all_nodes_below_a_link_is_a_quarter_of_it() -> None:
    rack = _link(1000)
    hosts = [_link(1000, rack), _link(200, rack)]
    assert hosts[0].admit(Demand("storage-0/a", 100, None, 32), 0.1).credit_bytes_per_s == 250
    assert hosts[1].admit(Demand("storage-1/a", 100, None, 32), 0.1).credit_bytes_per_s == 50
    assert hosts[0].renew(["storage-0/a"], 0.1)[0].credit_bytes_per_s == 125


def test_links_below_links_by_configuration() -> None:
    """In any order; look-ups are told what one more delivery would get on each."""
    clock = FakeClock()
    config = SchedulerConfig(links="host-1@rack=500,host-2@rack=500,rack@spine=800,spine=2000", policy="equal")
    scheduler = Scheduler(config, clock, Leadership("only", None, 100, clock))
    assert scheduler.info.link_rates == {"host-1": 500, "host-2": 500, "rack": 800, "spine": 2000}
    assert scheduler.admit("host-1", Demand("a", 100, None, 32)).rate_bytes_per_s == 500
    assert scheduler.info.link_rates == {"host-1": 250, "host-2": 400, "rack": 400, "spine": 1500}
    assert scheduler.stats["link.spine.granted"] == 500
    scheduler.finish("a")
    assert scheduler.stats["link.spine.granted"] == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=20))
def test_a_lone_link_divides_all_of_its_budget(events: list[tuple[int, int]]) -> None:
    alone, below = LinkEpochs(1000, 1.0, Equal()), LinkEpochs(1000, 1.0, Equal(), above=LinkEpochs(10**9, 1.0, Equal()))
    now = 0.0
    for number, size in events:
        now += 0.3
        for link in (alone, below):
            link.admit(Demand(str(number), size, None, 32), now)
        assert alone.rates == below.rates, "a wide spine changes nothing"
