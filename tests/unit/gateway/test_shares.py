"""Bounds that tenants share."""

from __future__ import annotations

from collections import Counter

import pytest

from quire_server.core.shares import SharedBound


def _greedy(bound: SharedBound, tenant: str) -> int:
    """How much a tenant takes that takes all that it can."""
    taken = 0
    while bound.take(tenant):
        taken += 1
    return taken


def test_a_tenant_leaves_as_much_as_it_takes() -> None:
    bound = SharedBound(1024)
    assert [_greedy(bound, name) for name in ("a", "b", "c")] == [512, 256, 128]
    bound.give_back("a", 512)
    assert _greedy(bound, "b") == 192, "448 then, and as many are left"
    assert bound.taken == 576 and bound.take("d")


@pytest.mark.parametrize("tenants", [1, 2, 5])
def test_greedy_tenants_have_equal_shares_if_they_take_turns(tenants: int) -> None:
    bound, shares = SharedBound(1000), Counter[str]()
    names = [f"{number}" for number in range(tenants)]
    while served := [name for name in names if bound.take(name)]:
        shares.update(served)
    assert all(abs(shares[name] - 1000 // (tenants + 1)) <= 1 for name in names), shares


def test_callers_without_a_tenant_have_all_of_it() -> None:
    bound = SharedBound(8)
    assert _greedy(bound, "") == 8 and not bound.take("a")


def test_amounts() -> None:
    bound = SharedBound(100)
    assert bound.take("a", 50) and not bound.take("a", 1) and bound.take("b", 25)
    assert not bound.take("b", 26) and bound.taken == 75
