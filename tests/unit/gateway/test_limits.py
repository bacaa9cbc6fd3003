"""What one tenant may have, whatever the others have."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.core.limits import Limits, TenantLimits
from quire_gateway.errors import TenantExhausted


@pytest.mark.parametrize(
    ("limits", "one"), [(Limits(requests=2), (0, 0)), (Limits(bytes=20), (10, 0)), (Limits(memory=20), (0, 10))]
)
def test_the_third_of_a_tenant_waits_and_another_tenant_does_not(limits: Limits, one: tuple[int, int]) -> None:
    tenants = TenantLimits(limits)
    with tenants.admitted("a", *one), tenants.admitted("a", *one):
        with pytest.raises(TenantExhausted) as caught, tenants.admitted("a", *one):
            pass
        assert caught.value.retry_after_s > 0
        with tenants.admitted("b", *one):
            assert tenants.stats["tenant.a.requests"] == 2
    with tenants.admitted("a", *one):
        pass
    assert tenants.stats == {}


def test_what_is_larger_than_the_limit_goes_alone() -> None:
    """Else it could never go."""
    tenants = TenantLimits(Limits(bytes=10))
    with (
        tenants.admitted("a", payload=100),
        pytest.raises(TenantExhausted),
        tenants.admitted("a", payload=1),
    ):
        pass


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 30)), max_size=30))
def test_nothing_is_kept_of_those_who_left(requests: list[tuple[str, int, int]]) -> None:
    """Whatever was admitted or refused: the sum never passes the limit unless one goes alone, and ends at nothing."""
    tenants = TenantLimits(Limits(requests=4, bytes=40, memory=40))
    running: dict[str, list[int]] = {}
    with ExitStack() as stack:
        for tenant, payload, memory in requests:
            try:
                stack.enter_context(tenants.admitted(tenant, payload, memory))
                running.setdefault(tenant, []).append(payload)
            except TenantExhausted:
                pass
            mine = running.get(tenant, [])
            assert len(mine) <= 4
            assert sum(mine) <= 40 or len([size for size in mine if size]) == 1
    assert tenants.stats == {}
