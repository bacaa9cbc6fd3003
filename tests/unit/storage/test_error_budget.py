"""When a drive that fails reads is retired."""

from __future__ import annotations

from quire_storage.core.pool.error_budget import WINDOW_S, ErrorBudget


def test_a_burst_counts_once() -> None:
    budget = ErrorBudget(2)
    assert not any(budget.failed(0, 100.0 + at / 1000) for at in range(900))
    assert not budget.failed(0, 101.5)
    assert budget.failed(0, 102.5), "the third second"
    assert not budget.failed(1, 102.5), "each drive has a budget of its own"


def test_errors_of_long_ago_do_not_count() -> None:
    budget = ErrorBudget(2)
    assert not any(budget.failed(0, now_s) for now_s in (0.0, 1.0))
    assert not budget.failed(0, float(WINDOW_S))
    assert budget.failed(0, WINDOW_S + 0.5) is False
    assert budget.failed(0, WINDOW_S + 1.0) is False
    assert budget.failed(0, WINDOW_S + 2.0)
