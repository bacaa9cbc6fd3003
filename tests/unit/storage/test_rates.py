"""The node's side of the scheduler, on a clock that the test holds: renewals, a scheduler that goes and comes back."""

from __future__ import annotations

import asyncio

import pytest

from quire.model.errors import InvalidRequest, NodeUnavailable
from quire.model.policy import TenantPolicy
from quire.testing import FakeClock
from quire_storage.delivery.rates import Allowance, Rates
from quire_storage.ports import AdmissionRequest, RateGrant


class UnlikelyDemand(InvalidRequest):
    """What a scheduler refuses."""


class Scheduler:
    """Grants `rate` to whom it knows; everything it was told is in `heard`."""

    def __init__(self) -> None:
        self.rate = self.credit = 1_000_000
        self.away = False
        self.known: set[str] = set()
        self.heard: list[tuple[object, ...]] = []

    def _check(self) -> None:
        if self.away:
            raise NodeUnavailable("the scheduler")

    async def admit(self, request: AdmissionRequest, layers_left: int, held_bytes_per_s: int) -> RateGrant:
        self._check()
        self.known.add(request.delivery)
        self.heard.append(("admit", request.delivery, layers_left, held_bytes_per_s))
        return RateGrant(request.delivery, self.rate, 0.1, self.credit)

    async def renew(self, layers_left: dict[str, int]) -> list[RateGrant]:
        self._check()
        return [RateGrant(name, self.rate, 0.1, self.credit) for name in layers_left if name in self.known]

    async def finish(self, delivery: str) -> None:
        self._check()
        self.heard.append(("finish", delivery))

    async def observe(self, request: AdmissionRequest, rate_bytes_per_s: int, stall_s: float) -> None:
        self.heard.append(("observe", request.delivery, rate_bytes_per_s, stall_s))


def _request(name: str, window_us: int = 500) -> AdmissionRequest:
    return AdmissionRequest(
        delivery=name, bytes_per_layer=1000, compute_window_us=window_us, layers=8, tenant=TenantPolicy()
    )


async def _told(scheduler: Scheduler, clock: FakeClock) -> Rates:
    """Those of a node that has heard of the scheduler before."""
    rates = Rates(scheduler, clock, 4_000_000)
    rates.finish(await _admit(rates, _request("before")))
    return rates


async def _admit(rates: Rates, request: AdmissionRequest) -> Allowance:
    allowance = rates.begin(request, 0)
    await rates.ask(allowance)
    return allowance


async def test_rates_follow_the_epochs() -> None:
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    allowance = await _admit(rates, _request("a"))
    assert (allowance.rate_bytes_per_s, allowance.scheduled) == (1_000_000, True)
    scheduler.rate = 250_000
    await clock.advance(0.11)
    assert allowance.rate_bytes_per_s == 250_000
    scheduler.known.clear()  # a new leader
    allowance.layers_left = 5
    await clock.advance(0.11)
    assert scheduler.heard[-1] == ("admit", "a", 5, 250_000), "admitted again, with what it has"
    rates.finish(allowance)
    await clock.advance(0)
    assert ("finish", "a") in scheduler.heard


async def test_a_short_rate_is_renewed_soon_and_when_this_nodes_own_delivery_ends() -> None:
    """The renewal that was to come with the epoch comes before; what `renew` says then holds."""
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    first = await _admit(rates, _request("first"))
    await clock.advance(0.001)
    left_s, short, renewals = 0.02, True, 0

    async def admit(request: AdmissionRequest, layers_left: int, held_bytes_per_s: int) -> RateGrant:
        return RateGrant(request.delivery, 0, left_s, short=True)

    async def renew(layers_left: dict[str, int]) -> list[RateGrant]:
        nonlocal renewals
        renewals += 1
        return [RateGrant(name, 1000 * renewals, left_s if short else 0.1, short=short) for name in layers_left]

    scheduler.admit, scheduler.renew = admit, renew  # type: ignore[method-assign]
    late = await _admit(rates, _request("late"))
    assert (late.rate_bytes_per_s, late.short) == (0, True)
    await clock.advance(0.021)
    assert (late.rate_bytes_per_s, renewals) == (1000, 1)
    rates.finish(first)
    await clock.advance(0.001)
    assert (late.rate_bytes_per_s, renewals) == (2000, 2), "at once"
    short = False
    await clock.advance(0.02)
    assert (late.short, renewals) == (False, 3)
    await clock.advance(0.09)
    assert renewals == 3, "it has its part: not before the epoch ends"
    rates.finish(late)
    await clock.advance(0.5)
    assert renewals == 3, "nothing runs"
    await rates.close()


async def test_a_scheduler_that_goes_and_comes_back() -> None:
    """Rates stay while a standby may be taking over; then equal shares of the node's cap, also for those that come."""
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    first = await _admit(rates, _request("a"))
    scheduler.away = True
    await clock.advance(0.25)
    assert (first.rate_bytes_per_s, first.scheduled) == (1_000_000, True)
    await clock.advance(0.2)
    assert (first.rate_bytes_per_s, first.scheduled) == (4_000_000, False)
    assert rates.stats["rate.fallback"] == 1
    second = await _admit(rates, _request("b"))
    assert [each.rate_bytes_per_s for each in (first, second)] == [2_000_000] * 2
    rates.finish(second)
    assert first.rate_bytes_per_s == 4_000_000
    scheduler.away = False
    await clock.advance(0.11)
    assert (first.rate_bytes_per_s, first.scheduled) == (1_000_000, True)
    assert scheduler.heard[-1] == ("admit", "a", 8, 1_000_000), "it says what it had"
    assert rates.stats["rate.fallback"] == 0
    rates.finish(first)
    await rates.close()


async def test_a_takeover_changes_no_rate() -> None:
    """A tenth of a second without a leader, then one that knows no transfer."""
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    allowance = await _admit(rates, _request("a"))
    scheduler.away = True
    await clock.advance(0.15)
    scheduler.away = False
    scheduler.known.clear()
    await clock.advance(0.2)
    assert (allowance.rate_bytes_per_s, allowance.scheduled) == (1_000_000, True)
    assert scheduler.heard[-1] == ("admit", "a", 8, 1_000_000)
    await rates.close()


async def test_deliveries_shorter_than_the_pause_find_the_scheduler_again() -> None:
    """The node asks on, also while nothing runs."""
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    scheduler.away = True
    admission = asyncio.create_task(_admit(rates, _request("a")))
    await clock.advance(1.0)
    rates.finish(await admission)
    assert rates.stats["rate.fallback"] == 1
    scheduler.away = False
    await clock.advance(2.0)
    assert rates.stats["rate.fallback"] == 0
    assert (await _admit(rates, _request("b"))).scheduled
    await rates.close()


async def test_a_refusal_costs_its_own_delivery_only() -> None:
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    first = await _admit(rates, _request("a"))
    admit = scheduler.admit

    async def refuse(request: AdmissionRequest, layers_left: int, held_bytes_per_s: int) -> RateGrant:
        if request.delivery == "bad":
            raise UnlikelyDemand("no")
        return await admit(request, layers_left, held_bytes_per_s)

    scheduler.admit = refuse  # type: ignore[method-assign]
    bad = await _admit(rates, _request("bad"))
    assert not bad.scheduled
    await clock.advance(0.3)
    assert (first.rate_bytes_per_s, first.scheduled) == (1_000_000, True)
    assert rates.stats["rate.fallback"] == 0
    await rates.close()


async def test_renewals_survive_unexpected_errors() -> None:
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    allowance = await _admit(rates, _request("a"))
    renew = scheduler.renew

    async def burst(layers_left: dict[str, int]) -> list[RateGrant]:
        raise RuntimeError("a bug")

    scheduler.renew = burst  # type: ignore[method-assign]
    await clock.advance(0.3)
    scheduler.renew = renew  # type: ignore[method-assign]
    scheduler.rate = 5
    await clock.advance(0.3)
    assert allowance.rate_bytes_per_s == 5
    await rates.close()


async def test_caps_hold_without_a_scheduler_too() -> None:
    """Of a tenant's deliveries together."""
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    scheduler.away = True
    admission = asyncio.create_task(_admit(rates, _request("a")))
    await clock.advance(1.0)
    await admission
    capped = [
        await _admit(
            rates,
            AdmissionRequest(
                delivery=n, bytes_per_layer=1000, compute_window_us=0, layers=8, tenant=TenantPolicy("t", 1.0, 500_000)
            ),
        )
        for n in "bc"
    ]
    assert [each.rate_bytes_per_s for each in capped] == [250_000] * 2
    await rates.close()


async def test_who_waits_with_no_rate_goes_on_when_there_is_one() -> None:
    clock, scheduler = FakeClock(), Scheduler()
    scheduler.rate = 0
    rates = Rates(scheduler, clock, 4_000_000)
    allowance = await _admit(rates, _request("a"))
    waiting = asyncio.create_task(rates.until_due(allowance, 1000))
    await clock.advance(0.05)
    assert not waiting.done()
    scheduler.rate = 1_000_000
    await clock.advance(0.1)
    async with asyncio.timeout(5):
        await waiting
    rates.finish(allowance)


async def test_stalls_are_reported_once_and_only_where_they_teach() -> None:
    """With the mean of the rates that a delivery had; not of strangers, nor without a window, nor on fallback rates."""
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    allowance = await _admit(rates, _request("a"))
    await clock.advance(0.1)
    scheduler.rate = 3_000_000
    await clock.advance(0.1)
    await clock.advance(0.1)
    rates.finish(allowance)
    await rates.stalled("a", 0.5)
    await rates.stalled("a", 0.5)
    await rates.stalled("stranger", 0.5)
    blind = await _admit(rates, _request("blind", window_us=0))
    rates.finish(blind)
    await rates.stalled("blind", 0.5)
    observed = [each for each in scheduler.heard if each[0] == "observe"]
    assert [each[1] for each in observed] == ["a"]
    rate, stall = observed[0][2:]
    assert stall == 0.5
    assert isinstance(rate, int)
    assert 1_000_000 < rate < 3_000_000


async def test_an_admission_that_is_cancelled_leaves_nothing_behind() -> None:
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    stuck = asyncio.Event()

    async def never(request: AdmissionRequest, layers_left: int, held_bytes_per_s: int) -> RateGrant:
        await stuck.wait()
        raise AssertionError

    scheduler.admit = never  # type: ignore[method-assign]
    task = asyncio.create_task(_admit(rates, _request("a")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rates.stats["rate.granted"] == 0


async def test_chunkwise_deliveries_share_the_port_and_not_the_pool() -> None:
    """The scheduler hears nothing of them; a tenant's cap holds."""
    scheduler = Scheduler()
    rates = Rates(scheduler, FakeClock(), 4_000_000)
    first = rates.admit_chunkwise(_request("a"))
    assert first.rate_bytes_per_s == 4_000_000
    second = rates.admit_chunkwise(
        AdmissionRequest(
            delivery="b", bytes_per_layer=1000, compute_window_us=0, layers=8, tenant=TenantPolicy("t", 1.0, 500_000)
        )
    )
    assert [each.rate_bytes_per_s for each in (first, second)] == [2_000_000, 500_000]
    rates.finish(second)
    assert first.rate_bytes_per_s == 4_000_000
    rates.finish(first)
    assert scheduler.heard == []


async def test_the_first_bytes_leave_on_credit_and_the_rate_makes_up_for_them() -> None:
    """While the scheduler is asked; what was sent ahead of the rate is waited for once there is one."""
    clock, scheduler = FakeClock(), Scheduler()
    rates = await _told(scheduler, clock)
    allowance = rates.begin(_request("a"), 1000)
    async with asyncio.timeout(1):
        for _ in range(4):
            await rates.until_due(allowance, 250)
    late = asyncio.create_task(rates.until_due(allowance, 250))
    await asyncio.sleep(0)
    assert not late.done(), "its credit is used up"
    await rates.ask(allowance)
    assert allowance.rate_bytes_per_s == 1_000_000
    await asyncio.sleep(0)
    assert not late.done(), "a millisecond's worth has left already"
    await clock.advance(0.0011)
    async with asyncio.timeout(30):
        await late
    rates.finish(allowance)
    await rates.close()


async def test_the_credit_of_new_deliveries_is_bounded_together() -> None:
    """A burst has 80 ms of what the scheduler said, among all of them."""
    clock = FakeClock()
    rates = await _told(Scheduler(), clock)
    burst = [rates.begin(_request(str(number)), 30_000) for number in range(20)]
    advances = [each.pacer.advance_bytes for each in burst]
    assert advances == [30_000, 30_000, 20_000] + [0] * 17
    assert rates.stats["rate.advanced"] == 80_000
    await clock.advance(0.01)
    assert rates.begin(_request("later"), 30_000).pacer.advance_bytes == pytest.approx(10_000, abs=1)
    await rates.ask(burst[0])
    last = rates.begin(_request("last"), 50_000)
    assert last.pacer.advance_bytes == pytest.approx(30_000, abs=2), "what was not needed"
    await rates.close()


async def test_credit_that_was_not_renewed_for_a_minute_is_none() -> None:
    """By then the scheduler has given it to other nodes: together they would have had five times the link."""
    clock = FakeClock()
    rates = await _told(Scheduler(), clock)
    await clock.advance(59)
    assert rates.begin(_request("a"), 30_000).pacer.advance_bytes == 30_000
    await clock.advance(2)
    allowance = rates.begin(_request("b"), 30_000)
    assert allowance.pacer.advance_bytes == 0
    await rates.ask(allowance)
    assert rates.begin(_request("c"), 30_000).pacer.advance_bytes == 30_000
    await rates.close()


async def test_under_a_flood_of_short_deliveries_the_link_keeps_its_budget() -> None:
    """Each sends its first layer ahead and ends before it has made up for it: together what the scheduler said."""
    clock = FakeClock()
    rates = await _told(Scheduler(), clock)
    sent = 0
    for number in range(2000):
        allowance = rates.begin(_request(str(number)), 5_000)
        if ahead := allowance.pacer.advance_bytes:
            await rates.until_due(allowance, ahead)
        sent += ahead
        rates.finish(allowance)
        await clock.advance(0.001)
    assert sent <= 1_000_000 * 2.0 + 80_000
    await rates.close()


async def test_without_a_word_of_the_scheduler_nothing_leaves_on_credit() -> None:
    """The link may be narrower than this node's own part in `link_bytes_per_s`; what is said later holds at once."""
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000_000)
    assert rates.begin(_request("a"), 30_000).pacer.advance_bytes == 0
    scheduler.credit = 100_000
    rates.finish(await _admit(rates, _request("b")))
    assert rates.begin(_request("c"), 30_000).pacer.advance_bytes == 8_000
    scheduler.credit = 50_000  # another node has come
    rates.finish(await _admit(rates, _request("d")))
    await clock.advance(1)
    assert rates.begin(_request("e"), 30_000).pacer.advance_bytes == 4_000
    await rates.close()


async def test_without_a_scheduler_the_credit_is_a_part_of_what_the_node_takes_by_itself() -> None:
    clock, scheduler = FakeClock(), Scheduler()
    rates = Rates(scheduler, clock, 4_000_000)
    scheduler.away = True
    asking = asyncio.create_task(rates.ask(rates.begin(_request("a"), 30_000)))
    for _ in range(20):
        await clock.advance(0.1)
    await asking
    assert rates.begin(_request("b"), 100_000).pacer.advance_bytes == 80_000
    await rates.close()
