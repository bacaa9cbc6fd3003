"""The lag of the event loop: what a stall held up counts for each tick that it held up."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from quire_server.redis import RedisProbe
from quire_server.telemetry.loop_lag import _TICK_S, Lateness, _Ticks, lateness, loop_lag, samples


def test_a_long_stall_counts_for_each_tick() -> None:
    assert samples(0.0) == [0.0]
    late = samples(10 * _TICK_S + 0.001)
    assert len(late) == 11 and late[0] == pytest.approx(10 * _TICK_S + 0.001) and late[-1] == pytest.approx(0.001)


def _block() -> None:
    time.sleep(0.3)


async def test_a_stall_is_seen() -> None:
    seen: list[float] = []
    ticks = _Ticks(seen.append, asyncio.get_running_loop())
    await asyncio.sleep(2.5 * _TICK_S)
    _block()
    await asyncio.sleep(2.5 * _TICK_S)
    ticks.stop()
    count = len(seen)
    await asyncio.sleep(2 * _TICK_S)
    assert len(seen) == count, "it has stopped"
    assert max(seen) > 0.25 and sum(late > 0.1 for late in seen) >= 5


class _Redis:
    """Answers at once, while the process that asks is blocked."""

    def __init__(self, blocked_s: float) -> None:
        self._blocked_s = blocked_s

    async def ping(self) -> None:
        asyncio.get_running_loop().call_soon(time.sleep, self._blocked_s)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("counts", [True, False])
async def test_a_probe_does_not_count_its_own_lateness(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis was not slow, this process was; without the subtraction it would look slow."""
    monkeypatch.setattr("quire_server.redis.probe.lateness", lateness if counts else Lateness())
    client: Any = _Redis(blocked_s=0.5)
    probe, times = RedisProbe(client), list[float]()
    monkeypatch.setattr(probe, "_round_trip", SimpleNamespace(record=times.append))
    async with loop_lag():
        probe.start()
        while not times:
            await asyncio.sleep(0.01)
        await probe.close()
    assert (times[0] < 0.3) == counts
