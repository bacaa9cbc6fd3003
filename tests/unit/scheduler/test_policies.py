"""The allocation policies: closed form against a convex solver, optimality conditions, what is learned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.model.errors import ConfigInvalid
from quire_scheduler.core.adaptive import cheapest_on_grid, cheapest_on_hulls
from quire_scheduler.core.curves import Curve, Curves, monotone
from quire_scheduler.core.factory import POLICIES, make_policy
from quire_scheduler.core.policies import least_stall
from quire_scheduler.core.policy import Demand, Observation
from quire_scheduler.core.tenants import shares

_SIZES = st.lists(st.floats(1e3, 1e9), min_size=1, max_size=12)


def _by_bisection(sizes: np.ndarray, caps: np.ndarray, budget: float) -> np.ndarray:
    """A solver that knows no closed form: bisects the multiplier of the budget in the dual of the convex program."""
    rates, low, high = caps, 0.0, max(1e30, float(sizes.max()) * 1e9)
    for _ in range(400):
        price = np.sqrt(low * high) if low else high / 2**40
        # min over r in (0, cap] of s/r + price * r
        rates = np.asarray(np.minimum(caps, np.sqrt(sizes / price)))
        if rates.sum() > budget:
            low = price
        else:
            high = price
    return rates


@given(_SIZES, st.data(), st.floats(0.05, 3))
def test_closed_form_is_the_optimum(sizes: list[float], data: st.DataObject, tightness: float) -> None:
    """Eq. 6: budget used exactly, no rate above its cap, KKT conditions, and what a numerical solver finds."""
    s = np.array(sizes)
    caps = np.array(data.draw(st.lists(st.floats(1.0, 1e9), min_size=len(s), max_size=len(s))))
    budget = tightness * float(caps.sum())
    rates = least_stall(s, caps, budget)
    assert np.all(rates > 0)
    assert np.all(rates <= caps * (1 + 1e-12))
    assert rates.sum() == pytest.approx(min(budget, caps.sum()), rel=1e-9)
    free = rates < caps * (1 - 1e-9)
    marginal = s / rates**2
    if free.any():
        price = marginal[free].max()
        assert np.allclose(marginal[free], price, rtol=1e-6), "uncapped requests gain equally from one more byte"
        assert np.all(marginal[~free] >= price * (1 - 1e-6)), "capped ones would gain more, but have enough"
        assert np.allclose(rates, _by_bisection(s, caps, budget), rtol=1e-5)


@given(_SIZES, st.data())
def test_unknown_windows_share_by_the_root_of_their_size(sizes: list[float], data: st.DataObject) -> None:
    s = np.array(sizes)
    rates = least_stall(s, np.full(len(s), np.inf), 1e6)
    assert np.allclose(rates, 1e6 * np.sqrt(s) / np.sqrt(s).sum())


def _demands(shapes: list[tuple[int, float]]) -> list[Demand]:
    return [Demand(str(index), size, window, 32) for index, (size, window) in enumerate(shapes)]


@pytest.mark.parametrize("name", POLICIES)
@given(
    shapes=st.lists(st.tuples(st.integers(10**3, 10**9), st.floats(1e-4, 1)), min_size=1, max_size=8, unique=True),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=40)
def test_order_does_not_matter(name: str, shapes: list[tuple[int, float]], order: object) -> None:
    policy, budget = make_policy(name, 1e6), 1e8
    demands = _demands(shapes)
    before = dict(zip([each.delivery for each in demands], policy.allocate(demands, budget), strict=True))
    order.shuffle(demands)  # type: ignore[attr-defined]
    rates = policy.allocate(demands, budget)
    assert rates.sum() <= budget * (1 + 1e-9)
    assert np.all(rates > 0)
    for demand, rate in zip(demands, rates, strict=True):
        assert rate == pytest.approx(before[demand.delivery], rel=1e-6)


def test_an_unknown_policy() -> None:
    with pytest.raises(ConfigInvalid, match="fastest"):
        make_policy("fastest", 0)


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2),
        st.tuples(st.floats(1, 1e6), st.floats(0.1, 10), st.floats(1, 1e6)),
        min_size=1,
        max_size=6,
    )
)
def test_tenants_get_their_share(tenants: dict[str, tuple[float, float, float]]) -> None:
    """None below min(what it wants, its weight's part, its cap), none above its cap, nothing wasted."""
    budget, weights = 1e5, sum(weight for _, weight, _ in tenants.values())
    parts = shares(tenants, budget)
    for name, (wanted, weight, cap) in tenants.items():
        assert parts[name] >= min(wanted, cap, budget * weight / weights) * (1 - 1e-9)
        assert parts[name] <= cap * (1 + 1e-9)
    caps = sum(cap for _, _, cap in tenants.values())
    assert sum(parts.values()) == pytest.approx(min(budget, caps), rel=1e-9)


# ---- what is learned


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 5)), min_size=1, max_size=50))
def test_curves_are_monotone_and_never_negative(points: list[tuple[float, float]]) -> None:
    """Slower is never better, whatever was observed, young or old."""
    curve = Curve()
    for u, y in points:
        curve.add(u, y)
    predicted = curve.at(np.linspace(0.005, 20, 500))
    assert np.all(np.diff(predicted) >= -1e-9)
    assert np.all(predicted >= 0)


def test_monotone_regression() -> None:
    x, y = monotone(np.array([3.0, 1.0, 2.0, 4.0]), np.array([2.0, 1.0, 4.0, 5.0]), np.array([1.0, 1.0, 1.0, 1.0]))
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert y.tolist() == [1.0, 3.0, 3.0, 5.0]


def test_a_curve_forgets() -> None:
    """A deployment that has changed is followed."""
    curve = Curve()
    for _ in range(100):
        curve.add(1.0, 3.0)
    for _ in range(60):
        curve.add(1.0, 0.5)
    assert curve.at(np.array([1.0]))[0] == pytest.approx(0.5, abs=0.01)


def test_curves_are_bounded() -> None:
    curves = Curves(shapes_max=10, tenants_max=3)
    for exponent in range(30):
        curves.observe(Observation("", 2**exponent, 0.01, 32, 1e6, 0.1))
    assert len(curves) == 10
    for tenant in "abc":
        curves.observe(Observation(tenant, 1000, 0.01, 32, 1e6, 0.1))
    assert len(curves) == 3, "the tenant that was not heard of for longest is forgotten"
    curve = Curve()
    for bin_ in range(5000):
        curve.add(1.001**bin_, 1.0)
    assert len(curve) <= 128


@given(st.integers(2, 5), st.integers(0, 2**16))
@settings(max_examples=30)
def test_grid_search_is_exact(count: int, seed: int) -> None:
    """Against every division of twelve units, on curves of any shape."""
    rng, units = np.random.default_rng(seed), 12
    costs = [rng.random(units) for _ in range(count)]
    best = min(sum(costs[index][part - 1] for index, part in enumerate(parts)) for parts in _divisions(count, units))
    rates = cheapest_on_grid(costs, float(units))
    assert rates.sum() <= units + 1e-9
    found = sum(cost[round(rate) - 1] for cost, rate in zip(costs, rates, strict=True))
    assert found == pytest.approx(best)


def _divisions(count: int, units: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(part,) for part in range(1, units + 1)]
    return [(first, *rest) for first in range(1, units - count + 2) for rest in _divisions(count - 1, units - first)]


def test_many_demands_find_the_convex_optimum() -> None:
    """On Eq. 4's curves, which are convex, the hulls find what the closed form does, within the grid."""
    rng = np.random.default_rng(1)
    sizes, windows = rng.uniform(1e6, 1e8, 40), rng.uniform(1e-3, 1e-1, 40)
    caps = sizes / windows
    budget = 0.6 * float(caps.sum())
    grid = np.geomspace(budget / 4000, budget, 256)
    rates = cheapest_on_hulls(grid, [np.maximum(0, s / grid - c) for s, c in zip(sizes, windows, strict=True)], budget)
    assert rates.sum() <= budget * (1 + 1e-9)

    def stall(rates: np.ndarray) -> float:
        return float(np.maximum(0, sizes / rates - windows).sum())

    assert stall(rates) <= 1.08 * stall(least_stall(sizes, caps, budget)) + 1e-6
