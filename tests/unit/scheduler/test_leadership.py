"""One scheduler leads: takeovers, a lease store that is away, on a clock that the test holds."""

from __future__ import annotations

import asyncio

import pytest

from quire.model.errors import ConfigInvalid, MetadataUnavailable, TooManyRequests
from quire.testing import FakeClock
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.policy import Demand
from quire_scheduler.errors import NotLeader, UnknownLink
from quire_scheduler.leadership import Leadership
from quire_scheduler.runtime import Scheduler


class SharedLease:
    """The lease in Redis, on the test's clock."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._holder, self._until_s = "", 0.0
        self.away = False

    async def hold(self, name: str, ttl_ms: int) -> tuple[str, str]:
        if self.away:
            raise MetadataUnavailable("away")
        before = self._holder
        if self._clock.monotonic_s() >= self._until_s or self._holder == name:
            self._holder, self._until_s = name, self._clock.monotonic_s() + ttl_ms / 1000
        return self._holder, before

    async def release(self, name: str) -> None:
        if self._holder == name:
            self._until_s = 0.0


def _demand(name: str) -> Demand:
    return Demand(name, 1000, 0.001, 32)


async def test_a_standby_takes_over_within_a_lease_and_what_was_known_is_forgotten() -> None:
    clock = FakeClock()
    lease = SharedLease(clock)
    config = SchedulerConfig(links="default=1000000", lease_ms=100)
    leaderships = [Leadership(name, lease, 100, clock) for name in ("first", "second")]
    schedulers = [Scheduler(config, clock, leadership) for leadership in leaderships]
    for leadership in leaderships:
        await leadership.start()
    await clock.advance(0.15)
    assert schedulers[0].admit("default", _demand("a")).rate_bytes_per_s == 1_000_000
    with pytest.raises(NotLeader, match="first leads"):
        schedulers[1].admit("default", _demand("a"))
    assert schedulers[1].stats["leads"] == 0

    # The first falls silent, as if it were killed.
    assert leaderships[0]._task is not None
    leaderships[0]._task.cancel()
    await clock.advance(0.2)
    assert [leadership.leading for leadership in leaderships] == [False, True]
    assert schedulers[1].renew({"a": 12}) == [], "it does not know the delivery: the node admits it again"
    assert schedulers[1].admit("default", _demand("a"), 700_000).rate_bytes_per_s == 700_000
    with pytest.raises(NotLeader):
        schedulers[0].renew({"a": 12})

    # The second stops as it should: the first, back again, need not wait for the lease to run out.
    await leaderships[1].close()
    await leaderships[0].start()
    assert leaderships[0].leading
    assert schedulers[0].renew({"a": 12}) == []
    await leaderships[0].close()


async def test_no_leader_leads_longer_than_it_knows() -> None:
    """With the lease's store away a leader stops in time, whatever happens to the lease there."""
    clock = FakeClock()
    lease = SharedLease(clock)
    leadership = Leadership("only", lease, 100, clock)
    await leadership.start()
    lease.away = True
    await clock.advance(0.09)
    assert leadership.leading
    await clock.advance(0.02)
    assert not leadership.leading
    lease.away = False
    await clock.advance(0.05)
    assert leadership.leading
    await leadership.close()


async def test_one_that_was_late_and_alone_forgets_nothing() -> None:
    """Finding 23: a busy machine's pause cost the leader its lease, and with it all that it had learned."""
    clock = FakeClock()
    lease = SharedLease(clock)
    leadership = Leadership("only", lease, 100, clock)
    scheduler = Scheduler(SchedulerConfig(links="default=1000000"), clock, leadership)
    await leadership.start()
    scheduler.admit("default", _demand("a"))
    clock._now_s += 0.12  # it stood still
    assert not leadership.leading
    await clock.advance(0.03)
    assert leadership.leading and leadership.term == 1
    assert [grant.delivery for grant in scheduler.renew({"a": 12})] == ["a"]
    await leadership.close()


async def test_without_redis_it_is_alone_and_leads() -> None:
    leadership = Leadership("only", None, 100, FakeClock())
    await leadership.start()
    leadership.check()
    await leadership.close()


@pytest.mark.parametrize(
    "links",
    [
        "default=0",
        " ",
        "default",
        "=5",
        "default=fast",
        "default=-1",
        "a=inf",
        "a=1,a=2",
        "a@=1",
        "@a=1",
        "a@b=1",
        "a@a=1",
        "a@b=1,b@a=1",
        "b=2,a@c=1",
    ],
)
def test_links_that_are_none(links: str) -> None:
    with pytest.raises(ConfigInvalid, match="QUIRE_SCHEDULER_LINKS"):
        Scheduler(SchedulerConfig(links=links), FakeClock(), Leadership("only", None, 100, FakeClock()))


async def test_links_and_limits() -> None:
    clock = FakeClock()
    config = SchedulerConfig(links="rack-1=1000000, rack-2=5e5", deliveries_max=8, policy="equal")
    scheduler = Scheduler(config, clock, Leadership("only", None, 100, clock))
    with pytest.raises(UnknownLink, match="rack-1, rack-2"):
        scheduler.admit("rack-3", _demand("a"))
    assert scheduler.admit("rack-1", _demand("a")).rate_bytes_per_s == 1_000_000
    assert scheduler.admit("rack-2", _demand("b")).rate_bytes_per_s == 500_000
    assert {grant.delivery: grant.rate_bytes_per_s for grant in scheduler.renew({"a": 3, "b": 3, "?": 1})} == {
        "a": 1_000_000,
        "b": 500_000,
    }
    assert scheduler.stats["link.rack-1.newcomer"] == 500_000
    scheduler.finish("a")
    scheduler.finish("unknown")
    assert scheduler.stats["link.rack-1.newcomer"] == 1_000_000
    for number in range(500):  # crashed nodes leave no trace behind
        clock._now_s += 1.0
        scheduler.admit("rack-1", _demand(f"lost-{number}"))
    assert len(scheduler._link_of) < 200
    with pytest.raises(TooManyRequests):
        for number in range(9):
            scheduler.admit("rack-1", _demand(f"now-{number}"))


async def test_the_limit_counts_only_those_that_are_alive() -> None:
    """A node that died with all places taken locks no other out, and advice does not count it either."""
    clock = FakeClock()
    config = SchedulerConfig(links="default=1000000", deliveries_max=3, policy="equal")
    scheduler = Scheduler(config, clock, Leadership("only", None, 100, clock))
    for name in "abc":
        scheduler.admit("default", _demand(name))
    with pytest.raises(TooManyRequests):
        scheduler.admit("default", _demand("d"))
    await clock.advance(1.0)
    assert scheduler.stats["link.default.granted"] == 0
    assert scheduler.admit("default", _demand("d")).rate_bytes_per_s == 1_000_000


async def test_asking_goes_on_whatever_the_store_does() -> None:
    """An unexpected error, and a store that hangs, do not end it."""
    clock = FakeClock()
    lease = SharedLease(clock)
    leadership = Leadership("only", lease, 50, clock)
    hold = lease.hold

    async def broken(name: str, ttl_ms: int) -> tuple[str, str]:
        raise RuntimeError("the transport is closed")

    async def hanging(name: str, ttl_ms: int) -> tuple[str, str]:
        await asyncio.sleep(3600)
        return "", ""

    lease.hold = broken  # type: ignore[method-assign]
    await leadership.start()
    await clock.advance(0.1)
    lease.hold = hanging  # type: ignore[method-assign]
    await clock.advance(0.05)
    await asyncio.sleep(0.15)
    assert not leadership.leading
    lease.hold = hold  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        while not leadership.leading:
            await clock.advance(0.05)
            await asyncio.sleep(0.02)
    await leadership.close()


class _Pausing(FakeClock):
    """A process that stands still for `pause_s` whenever it sleeps."""

    pause_s = 0.0

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds + self.pause_s)


async def test_a_lease_outlasts_the_pauses_of_its_holder() -> None:
    """On a busy machine leaders lost the lead to each pause (finding 23). A lease is longer while there are pauses, ten
    times at most, and as it was told some time after they have ended.
    """
    clock = _Pausing()
    leadership = Leadership("busy", SharedLease(clock), 100, clock)
    await leadership.start()
    clock.pause_s = 0.2
    await clock.advance(1.0)
    assert leadership.lease_ms == 600
    for _ in range(40):
        await clock.advance(0.1)
        assert leadership.leading
    assert leadership.term <= 2, "the lead was lost once at most"
    clock.pause_s = 5.0
    await clock.advance(20.0)
    assert leadership.lease_ms == 1000
    clock.pause_s = 0.0
    await clock.advance(30.0)
    assert leadership.lease_ms == 100
    await leadership.close()
