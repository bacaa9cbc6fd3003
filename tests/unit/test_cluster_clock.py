"""The clock that members of a cluster share."""

from __future__ import annotations

from quire.testing import FakeClock
from quire_server.clock import ClusterClock

_REDIS_MS = 1_700_000_000_000


class _SteppingClock(FakeClock):
    """A machine whose wall clock is wrong, and is stepped."""

    off_ms = -240_000

    def now_ms(self) -> int:
        return super().now_ms() + self.off_ms


async def test_the_clock_of_redis_counts_from_the_first_answer_on() -> None:
    own = _SteppingClock()
    clock = ClusterClock(own)
    assert clock.now_ms() == own.now_ms()
    clock.follow(_REDIS_MS, own.monotonic_s())
    await own.advance(2.5)
    own.off_ms = 600_000
    assert clock.now_ms() == _REDIS_MS + 2500


async def test_an_answer_that_was_long_under_way_does_not_count_beside_a_quick_one() -> None:
    own = FakeClock()
    clock = ClusterClock(own)
    clock.follow(_REDIS_MS, own.monotonic_s() - 0.002)
    assert clock.now_ms() == _REDIS_MS + 1, "half of the way back"
    await own.advance(1.0)
    clock.follow(_REDIS_MS + 1000, own.monotonic_s() - 1.0)
    assert clock.now_ms() == _REDIS_MS + 1001


async def test_clocks_drift_so_that_an_old_answer_yields() -> None:
    own = FakeClock()
    clock = ClusterClock(own)
    clock.follow(_REDIS_MS, own.monotonic_s())
    await own.advance(100.0)
    clock.follow(_REDIS_MS + 100_050, own.monotonic_s() - 0.02)
    assert clock.now_ms() == _REDIS_MS + 100_060


async def test_an_orchestrator_of_before_says_no_time() -> None:
    own = FakeClock()
    clock = ClusterClock(own)
    clock.follow(0, own.monotonic_s())
    assert clock.now_ms() == own.now_ms()
