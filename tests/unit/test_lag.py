"""The lag of the event loop: what a stall held up counts for each tick that it held up."""

from __future__ import annotations

import asyncio
import time

import pytest

from quire_server.telemetry.loop_lag import _TICK_S, _Ticks, samples


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
