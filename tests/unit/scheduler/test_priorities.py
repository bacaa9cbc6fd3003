"""Priorities: within a tenant the higher one has its rates first; no tenant feels another's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_scheduler.core import tenants
from quire_scheduler.core.factory import POLICIES, make_policy
from quire_scheduler.core.policy import Demand, Policy

_DEMANDS = st.lists(
    st.builds(
        Demand,
        delivery=st.just("d"),
        bytes_per_layer=st.integers(1_000, 10_000_000),
        compute_window_s=st.one_of(st.none(), st.floats(1e-4, 1.0)),
        layers_left=st.integers(1, 80),
        tenant=st.sampled_from(["a", "b"]),
        priority=st.integers(-2, 2),
    ),
    min_size=1,
    max_size=8,
)
_BUDGET = st.floats(1e6, 1e11)


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param, 0.0)


@given(demands=_DEMANDS, budget=_BUDGET, name=st.sampled_from(sorted(POLICIES)))
def test_priorities_share_what_the_tenant_has(demands: list[Demand], budget: float, name: str) -> None:
    """Never more than the budget; and what the other tenant gets together does not depend on them."""
    policy = make_policy(name, 0.0)
    rates = tenants.allocate(policy, demands, budget, 0.0)
    assert float(rates.sum()) <= budget * (1 + 1e-6) + 1 and bool((rates >= 0).all())
    assert tenants.allocate_last(policy, demands, budget, 0.0) == pytest.approx(float(rates[-1]), rel=1e-6, abs=1)
    flat = [replace(demand, priority=0) if demand.tenant == "a" else demand for demand in demands]
    of_b = np.array([demand.tenant == "b" for demand in demands])
    assert np.allclose(tenants.allocate(policy, flat, budget, 0.0)[of_b], rates[of_b], rtol=1e-6, atol=1)


def _two(urgent: int, usual: int, window_s: float | None) -> list[Demand]:
    return [
        Demand("first", 1_000_000, window_s, 8, priority=usual),
        Demand("second", 1_000_000, window_s, 8, priority=urgent),
    ]


def test_the_higher_one_has_what_it_needs(policy: Policy) -> None:
    """1 MB in 10 ms is 100 MB/s; the link has 120."""
    rates = tenants.allocate(policy, _two(1, 0, 0.01), 120e6, 0.0)
    assert rates[1] == pytest.approx(100e6, rel=0.01) and 0 < rates[0] <= 20e6 * 1.01


@pytest.mark.parametrize("lower_share", [0.1, 0.0])
def test_no_lower_one_is_starved(policy: Policy, lower_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth is set aside where the highest could use all; without that rule, the fault put back, nothing is left."""
    monkeypatch.setattr(tenants, "_LOWER_SHARE", lower_share)
    demands = [Demand(str(level), 1_000_000, None, 8, priority=level) for level in range(-10, 11)]
    rates = tenants.allocate(policy, demands, 1e9, 0.0)
    assert rates[:-1] == pytest.approx([lower_share * 1e9 / 20] * 20, abs=1) and rates[-1] >= 0.9e9 - 1
