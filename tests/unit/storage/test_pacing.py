"""Pacing: what leaves is what the rates add up to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_storage.core.pacing import Credit, Pacer


@given(st.lists(st.integers(1, 10**6), min_size=5, max_size=60), st.integers(10**5, 10**9))
def test_pacer_keeps_the_rate(sizes: list[int], rate: int) -> None:
    """Obeyed exactly, departures never run ahead of the rate, and end within one piece of it."""
    now, pacer, sent = 10.0, Pacer(rate, 10.0), 0
    for size in sizes:
        now += pacer.wait_s(now)
        pacer.leave(size)
        assert sent / rate <= now - 10.0 + 1e-6
        sent += size
    assert now - 10.0 == pytest.approx((sent - sizes[-1]) / rate)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0.001, 2)), min_size=1, max_size=20))
def test_pacer_follows_changing_rates(changes: list[tuple[int, float]]) -> None:
    """Whatever the rate was when: what has left is what the rates add up to, within a piece and the catch-up."""
    now, piece, pacer, sent, allowed = 0.0, 1000, Pacer(0, 0.0), 0, 0.0
    for rate, lasts in changes:
        pacer.set_rate(rate, now)
        end = now + lasts
        allowed += rate * lasts
        while (wait := pacer.wait_s(now)) <= end - now:
            now += wait
            pacer.leave(piece)
            sent += piece
        now = end
    assert sent <= allowed + piece * (len(changes) + 1)
    assert sent >= allowed - piece * len(changes) - 1


def test_pacer_catches_up_a_little_only() -> None:
    """After a pause of a second no more than 20 ms worth of bytes go out at once; a rate of nothing lets nothing go."""
    pacer = Pacer(1_000_000, 0.0)
    pacer.leave(1000)
    burst = 0
    while pacer.wait_s(1.0) == 0.0:
        pacer.leave(1000)
        burst += 1000
    assert burst <= 22_000
    pacer.set_rate(0, 1.0)
    assert pacer.wait_s(1000.0) == math.inf


def test_a_pacer_starts_with_nothing_and_counts_what_left() -> None:
    pacer = Pacer(1000, 5.0)
    assert (pacer.kept, pacer.mean_bytes_per_s, pacer.stood_s) == (1.0, 1000.0, 0.0)
    assert pacer.wait_s(5.0) == 0.0
    pacer.leave(100)
    pacer.leave(100)
    assert pacer.wait_s(5.0) == pytest.approx(0.2)
    assert pacer.wait_s(5.1) == pytest.approx(0.1)
    assert pacer.kept == pytest.approx(2.0)
    pacer.wait_s(6.0)
    assert pacer.kept == pytest.approx(0.2)
    assert pacer.mean_bytes_per_s == pytest.approx(1000.0)


def test_a_mean_is_of_the_times_that_had_a_rate() -> None:
    pacer = Pacer(0, 0.0)
    pacer.set_rate(1000, 1.0)
    pacer.set_rate(3000, 2.0)
    pacer.set_rate(0, 3.0)
    pacer.wait_s(3.5)
    pacer.wait_s(4.0)
    assert pacer.mean_bytes_per_s == pytest.approx(2000.0)
    assert (pacer.stood_s, pacer.rate_bytes_per_s) == (2.0, 0)


def test_less_than_a_thousandth_of_a_byte_is_rounding() -> None:
    pacer = Pacer(1000, 0.0)
    pacer.leave(1)
    assert pacer.wait_s(0.0009995) == 0.0
    other = Pacer(1000, 0.0)
    other.leave(1)
    assert other.wait_s(0.0009) == pytest.approx(0.0001)
    assert Pacer(1000, 0.0).wait_s(1.0) == 0.0


def test_without_a_rate_the_advance_leaves_to_the_last_byte() -> None:
    pacer = Pacer(0, 0.0, advance_bytes=3)
    assert pacer.wait_s(0.0) == 0.0
    pacer.leave(2)
    assert (pacer.advance_bytes, pacer.wait_s(0.0)) == (1, 0.0)
    pacer.leave(2)
    assert (pacer.advance_bytes, pacer.wait_s(0.0)) == (0, math.inf)
    pacer.set_rate(4, 0.0)
    assert pacer.wait_s(0.0) == pytest.approx(1.0), "the rate makes up for what left before it"


def test_a_credit_is_nothing_until_it_is_set() -> None:
    credit = Credit()
    assert credit.take(1000, 1e6) == 0
    credit.set_rate(1000.0, 1e6)
    assert credit.take(1000, 1e6) == 80


def test_a_credit_fills_at_its_rate_up_to_its_burst() -> None:
    credit = Credit()
    credit.set_rate(1000.0, 10.0)
    assert credit.take(30, 10.0) == 30
    assert credit.take(1000, 10.0) == 50
    assert credit.take(1000, 10.02) == pytest.approx(20, abs=1)
    credit.give_back(5)
    assert credit.take(1000, 10.02) == 5
    assert credit.take(1000, 20.0) == 80
    credit.give_back(1000)
    assert credit.take(1000, 20.0) == 80


def test_another_rate_brings_no_new_burst() -> None:
    credit = Credit()
    credit.set_rate(1000.0, 10.0)
    assert credit.take(70, 10.0) == 70
    credit.set_rate(2000.0, 10.0)
    assert credit.take(1000, 10.0) == 10
    credit.set_rate(100.0, 20.0)
    assert credit.take(1000, 20.0) == 8
    credit.set_rate(100.0, 20.0)
    assert credit.take(1000, 20.0) == 0


def test_a_credit_holds_for_a_minute() -> None:
    credit = Credit()
    credit.set_rate(1000.0, 10.0)
    assert credit.take(1, 70.0) == 1
    assert credit.take(1, 70.1) == 0
    credit.set_rate(1000.0, 80.0)
    assert credit.take(1000, 80.0) == 80, "set again, it is as at first"
