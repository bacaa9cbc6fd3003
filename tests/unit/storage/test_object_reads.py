"""How the object tier is read: runs of layers, requests at a time, requests sent twice."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.chunk_object import ObjectRange
from quire.model.errors import Unavailable
from quire_server.clock import SystemClock
from quire_storage.core.object_reads import Hedging, RequestWindow, TierSpeed, layer_ranges
from quire_storage.errors import ObjectTierFailed, ObjectTierThrottled
from quire_storage.ports import ObjectName
from quire_storage.tiers.object_reads import ObjectReads

_NAME = (b"k" * 32, 7)
_MIB = 1 << 20
_NEAR, _FAR = TierSpeed(0.001, 1e9, 1e-3, 16), TierSpeed(0.03, 1e9, 1e-6, 100)


def _lengths(layers: int, layer_bytes: int, chunks: int, speed: TierSpeed, **more: Any) -> list[int]:
    return list(map(len, layer_ranges(layers, layer_bytes, chunks, speed, **more)))


def test_the_first_layer_comes_alone_unless_requests_cost_as_much_as_layers() -> None:
    assert _lengths(16, 16 * _MIB, 16, _NEAR)[0] == 1
    assert _lengths(16, _MIB, 1000, _NEAR) == [16], "a thousand requests take a second, all layers 17 ms"
    assert _lengths(32, 64 << 10, 1, _FAR) == [32], "an answer takes 30 ms, all layers 2 ms"
    assert _lengths(1, 1 << 30, 1, _NEAR) == [1], "a latent record"


def test_runs_are_long_where_there_is_time() -> None:
    """With half a second for each layer all of the rest comes before the second one is needed."""
    assert _lengths(32, 4 * _MIB, 64, _NEAR, needed_s=lambda layer: 0.5 * layer) == [1, 31]
    assert _lengths(32, 4 * _MIB, 64, _NEAR, needed_s=lambda layer: 1.0 + 0.5 * layer) == [32], "all in time"
    assert _lengths(32, 4 * _MIB, 1000, _NEAR, needed_s=lambda layer: 0.001 * layer) == [32], "no time for requests"


@pytest.mark.parametrize("need_s", [-5.0, 0.0, math.inf])
@pytest.mark.parametrize("layers_max", [4, 1 << 30])
def test_there_is_a_plan_whenever_layers_are_needed(need_s: float, layers_max: int) -> None:
    """The plan of a prefetch that came too late was empty."""
    runs = layer_ranges(32, _MIB, 16, TierSpeed(), needed_s=lambda _: need_s, layers_max=layers_max)
    assert [layer for run in runs for layer in run] == list(range(32))


@pytest.mark.parametrize("layers_max", [1, 3])
def test_runs_are_bounded_where_their_bytes_have_no_slots(layers_max: int) -> None:
    runs = layer_ranges(10, 1, 1, _FAR, layers_max=layers_max)
    assert [layer for run in runs for layer in run] == list(range(10)) and max(map(len, runs)) <= layers_max


def _lateness(runs: list[range], chunks: int, layer_bytes: int, speed: TierSpeed, window_s: float) -> float:
    ends_s = [speed.seconds((at + 1) * chunks, run.stop * layer_bytes) for at, run in enumerate(runs)]
    return max(0.0, *(end_s - run.start * window_s for end_s, run in zip(ends_s, runs, strict=True)))


def _plans(start: int, layers: int) -> list[list[range]]:
    if start == layers:
        return [[]]
    return [[range(start, stop), *rest] for stop in range(start + 1, layers + 1) for rest in _plans(stop, layers)]


@given(
    st.integers(1, 7), st.integers(1, 500), st.integers(1, 20 * _MIB), st.floats(0, 0.05), st.floats(0, 0.01),
    st.floats(0, 0.5),
)  # fmt: skip
def test_no_other_plan_would_be_less_late(
    layers: int, chunks: int, layer_bytes: int, latency_s: float, request_s: float, window_s: float
) -> None:
    """Against all plans with as few requests; a twentieth of the time to read everything does not count."""
    speed = TierSpeed(latency_s, 1e9, request_s, 32)
    runs = layer_ranges(layers, layer_bytes, chunks, speed, needed_s=lambda layer: layer * window_s)
    assert [layer for run in runs for layer in run] == list(range(layers)) and len(runs) <= layers.bit_length()
    others = [plan for plan in _plans(0, layers) if len(plan) <= layers.bit_length()]
    best = min(_lateness(plan, chunks, layer_bytes, speed, window_s) for plan in others)
    whole_s = speed.seconds(chunks, layers * layer_bytes)
    assert _lateness(runs, chunks, layer_bytes, speed, window_s) <= best + 0.11 * whole_s + 1e-9


class _Link:
    """Answers take `latency_s`, and are served at `at_once` at a time, each for `service_s`."""

    def __init__(self, latency_s: float, service_s: float, at_once: int) -> None:
        self._latency_s, self._service_s, self._at_once = latency_s, service_s, at_once

    def answers(self, window: RequestWindow, count: int) -> None:
        now_s, servers, ends = 0.0, [0.0] * self._at_once, list[tuple[float, float]]()
        for _ in range(count):
            while len(ends) >= window.limit:
                end_s, began_s = ends.pop(0)
                now_s = max(now_s, end_s)
                window.ended(1 << 16, end_s - began_s, now_s)
            server = min(range(self._at_once), key=servers.__getitem__)
            servers[server] = max(servers[server], now_s) + self._service_s
            ends.append((servers[server] + self._latency_s, now_s))
            ends.sort()


@pytest.mark.parametrize(
    ("link", "lowest", "highest"),
    [
        (_Link(0.0, 0.004, 4), 2, 16),  # four at a time are all that it bears
        (_Link(0.030, 0.001, 4), 60, 256),  # 30 ms away, 4,000 a second: 124 are in flight
        (_Link(0.010, 0.001, 1), 6, 40),  # 10 ms away, 1,000 a second: eleven
    ],
)
def test_as_many_requests_as_the_tier_bears(link: _Link, lowest: int, highest: int) -> None:
    window = RequestWindow()
    link.answers(window, 20_000)
    assert lowest <= window.limit <= highest
    assert window.speed.at_once == window.limit and window.speed.bytes_per_s > 0


def test_what_a_request_costs_and_what_its_bytes() -> None:
    """Four servers that take 2 ms for a request, and 1 ms for each MiB."""
    window, now_s = RequestWindow(first=32, lowest=32, highest=32), 0.0
    for size in [1 << 16, 8 << 20, 1 << 20, 2 << 20] * 10:
        for _ in range(100):
            now_s += (0.002 + size / 2**20 * 0.001) / 4
            window.ended(size, 0.02, now_s)
    assert window.speed.request_s == pytest.approx(0.0005, rel=0.1)
    assert window.speed.bytes_per_s == pytest.approx(4 * 2**30, rel=0.1)


@pytest.mark.parametrize("count", [20, 64, 80, 100, 150])
def test_what_is_left_of_a_burst_does_not_make_the_tier_look_fast(count: int) -> None:
    """2 GB/s, 20 ms away; 32 at a time, then nothing. Answers behind a judgement come with its latency behind them."""
    window, size = RequestWindow(first=32, lowest=32, highest=32), 1 << 20
    for burst in range(6):
        now_s = began_s = burst * 10.0
        for answer in range(count):
            now_s = began_s + 0.02 + (answer + 1) * size / 2e9
            window.ended(size, 0.02 + min(answer + 1, 32) * size / 2e9, now_s)
        window.idle(now_s)
    assert 1.5e9 < window.speed.bytes_per_s < 3e9


def test_a_refusal_halves_the_number() -> None:
    window = RequestWindow(first=40)
    for began_s in range(8):
        window.throttled(began_s, 10.0)
    assert window.limit == 20, "requests that were in flight together count once"
    for now_s in range(10, 20):
        window.throttled(now_s, now_s + 1)
    assert window.limit == 2


def test_one_in_twenty_requests_is_sent_twice() -> None:
    hedging = Hedging()
    assert hedging.after_s(1000) is None, "nothing is known yet"
    for took_ms in range(1, 201):
        hedging.began()
        hedging.ended(1000, took_ms / 1e3)
    late_s = hedging.after_s(1000)
    assert late_s is not None and 0.18 <= late_s <= 0.21
    for _ in range(256):
        hedging.ended(1 << 24, 0.1)
    assert hedging.after_s(1 << 24) == 0.2, "where all take the same, one that takes a little longer is not late"
    assert hedging.after_s(1 << 20) is None, "larger ones take longer"
    assert sum(hedging.take() for _ in range(100)) == 8, "what 160 requests at the most have saved up"
    for _ in range(100):
        hedging.began()
    assert sum(hedging.take() for _ in range(100)) == 5


class _Tier:
    """Answers by `answer(number of the request)`: an error, or seconds."""

    def __init__(self, answer: Callable[[int], Exception | float]) -> None:
        self._answer = answer
        self.asked = self.cancelled = self.in_flight = self.in_flight_max = 0
        self.starts: list[int] = []

    async def read(self, name: ObjectName, start: int, stop: int, *, described: bool = True) -> ObjectRange | None:
        self.asked += 1
        self.starts.append(start)
        answer = self._answer(self.asked)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            await asyncio.sleep(answer if isinstance(answer, float) else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        if isinstance(answer, Exception):
            raise answer
        return ObjectRange(memoryview(bytes(stop - start)), 1 << 20)


def _reads(answer: Callable[[int], Exception | float], timeout_s: float = 20.0) -> tuple[ObjectReads, Any]:
    tier: Any = _Tier(answer)
    return ObjectReads(tier, SystemClock(), timeout_s), tier


async def test_a_late_answer_is_asked_for_again_and_the_loser_cancelled() -> None:
    reads, tier = _reads(lambda number: 30.0 if number == 65 else 0.001)
    reads._hedging.after_s = lambda size: None  # type: ignore[method-assign]
    for _ in range(64):
        await reads.read(_NAME, 0, 100)
    reads._hedging.after_s = lambda size: 0.05  # type: ignore[method-assign]
    part = await reads.read(_NAME, 0, 100)
    assert part is not None and len(part.data) == 100
    await asyncio.sleep(0)
    assert (tier.asked, tier.cancelled) == (66, 1)


async def test_a_refusal_is_repeated_and_an_error_in_the_end_raised() -> None:
    reads, tier = _reads(lambda number: ObjectTierThrottled("503") if number < 3 else 0.0)
    assert await reads.read(_NAME, 0, 8) is not None and tier.asked == 3
    assert reads.speed.at_once == 8, "two refusals"
    reads, tier = _reads(lambda _: Unavailable("away"))
    with pytest.raises(Unavailable, match="away"):
        await reads.read(_NAME, 0, 8)
    assert tier.asked == 4
    reads, tier = _reads(lambda _: 60.0, timeout_s=0.05)
    with pytest.raises(ObjectTierFailed, match=r"within 0\.05 s"):
        await reads.read(_NAME, 0, 8)
    await asyncio.sleep(0)
    assert tier.in_flight == 0
    reads, tier = _reads(lambda _: 0.1, timeout_s=1.0)
    reads._window = RequestWindow(first=2, highest=2)
    parts = await asyncio.gather(*(reads.read(_NAME, at, at + 9) for at in range(30)))
    assert all(part is not None for part in parts), "the time until its turn does not count"


async def test_what_is_needed_first_is_read_first_and_tenants_take_turns() -> None:
    reads, tier = _reads(lambda _: 0.01)
    reads._window = RequestWindow(first=8)
    many = [asyncio.create_task(reads.read(_NAME, at, 999, tenant="many", due_s=50.0 - at)) for at in range(40)]
    await asyncio.sleep(0)
    other_tenant = asyncio.create_task(reads.read(_NAME, 500, 999, tenant="few", due_s=99.0))
    await asyncio.gather(*many, other_tenant)
    assert tier.in_flight_max <= 12 and tier.starts[:8] == list(range(8)), "eight had their turn at once"
    assert tier.starts.index(500) == 8, "the other tenant has nothing in flight"
    assert tier.starts[9:] == sorted(range(8, 40), reverse=True)


async def test_readers_that_are_cancelled_leave_their_turns() -> None:
    reads, tier = _reads(lambda _: 10.0)
    tasks = [asyncio.create_task(reads.read(_NAME, at, 999)) for at in range(40)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tier._answer = lambda _: 0.0
    assert await reads.read(_NAME, 0, 1) is not None
    assert (reads._total, reads._waiting, dict(reads._in_flight)) == (0, {}, {})
