"""What was learned outlives the leader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import redis.asyncio as redis

from quire.testing import FakeClock
from quire_scheduler.adapters.shelf import RedisCurveShelf
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.curves import Learned
from quire_scheduler.core.policy import Demand, Observation
from quire_scheduler.curve_store import CurveStore
from quire_scheduler.leadership import Leadership
from quire_scheduler.runtime import Scheduler
from quire_server.redis import StoredValue
from tests.unit.scheduler.test_leadership import SharedLease

CONFIG = SchedulerConfig(links="one=1000000,two=1000000,wide=5000000", lease_ms=100)


class _Shelf:
    def __init__(self) -> None:
        self.learned: dict[str, list[Learned]] = {}
        self.times = 0

    async def keep(self, learned: Mapping[str, Sequence[Learned]]) -> None:
        self.learned = {kind: list(curves) for kind, curves in learned.items()}
        self.times += 1

    async def found(self) -> dict[str, list[Learned]]:
        return self.learned


def _observe(scheduler: Scheduler, link: str = "one", times: int = 30) -> None:
    """Slow layers from a knee on that Eq. 4 does not know."""
    for number in range(times):
        rate = 2e5 + 3e4 * number
        scheduler.observe(link, Observation("t", 1000, 0.001, 32, rate, 32 * 0.001 * max(0.2, 1e6 / rate - 0.5)))


def _knows(scheduler: Scheduler, link: str) -> bool:
    curves = scheduler._policies[link].curves
    return curves is not None and curves.seen(Demand("a", 1000, 0.001, 32, "t")) > 0


async def test_the_next_leader_knows_what_the_one_before_learned() -> None:
    """Which was killed; what a leader that stops has learned last is kept too."""
    clock, shelf = FakeClock(), _Shelf()
    lease = SharedLease(clock)
    leaderships = [Leadership(name, lease, 100, clock) for name in ("first", "second")]
    first, second = (Scheduler(CONFIG, clock, leadership) for leadership in leaderships)
    memories = [
        CurveStore(each, leadership, shelf, clock)
        for each, leadership in zip((first, second), leaderships, strict=True)
    ]
    for leadership, memory in zip(leaderships, memories, strict=True):
        await leadership.start()
        await memory.start()
    _observe(first)
    for _ in range(220):
        await clock.advance(0.05)
    assert shelf.times == 1, "once, as nothing more was learned"
    assert leaderships[0]._task is not None and memories[0]._task is not None
    leaderships[0]._task.cancel()
    memories[0]._task.cancel()
    for _ in range(20):
        await clock.advance(0.05)
    assert leaderships[1].leading and not leaderships[0].leading
    assert second.learned() == first.learned() and second.learned()
    _observe(second, times=3)
    await memories[1].close()
    assert shelf.learned == second.learned() and shelf.times == 2
    await leaderships[1].close()


async def test_links_of_one_budget_learn_together() -> None:
    clock = FakeClock()
    scheduler = Scheduler(CONFIG, clock, Leadership("only", None, 100, clock))
    _observe(scheduler)
    assert set(scheduler.learned()) == {"1000000"}
    assert scheduler._policies["one"] is scheduler._policies["two"]
    assert _knows(scheduler, "one") and _knows(scheduler, "two") and not _knows(scheduler, "wide")


async def test_curves_lie_in_redis_and_expire(redis_client: redis.Redis) -> None:
    clock = FakeClock()
    scheduler = Scheduler(CONFIG, clock, Leadership("only", None, 100, clock))
    _observe(scheduler)
    shelf = RedisCurveShelf(StoredValue(redis_client, "curves"))
    assert await shelf.found() == {}
    await shelf.keep(scheduler.learned())
    assert await shelf.found() == scheduler.learned()
    assert 0 < await redis_client.ttl("quire:kept:curves") <= 7 * 24 * 3600
    await redis_client.set("quire:kept:curves", b"\xff of another release")
    assert await shelf.found() == {}
