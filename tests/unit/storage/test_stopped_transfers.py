"""Transfers that are stopped: before they come, while they begin, while they run."""

from __future__ import annotations

import asyncio

import pytest

from quire.model.errors import PeerLost, TransferRunning
from quire.testing import FakeClock
from quire_storage.delivery.transfers import Transfers

_NAME = (bytes(16), 1)


async def test_one_that_comes_after_its_end_is_refused_until_its_permit_has_ended() -> None:
    clock = FakeClock()
    transfers = Transfers(clock)
    await transfers.stop(_NAME, 60.0)
    await clock.advance(59.0)
    with pytest.raises(PeerLost, match="this delivery was stopped before it began"):
        transfers.begin(_NAME, "delivery")
    transfers.begin((bytes(16), 2), "delivery")
    await clock.advance(1.0)
    transfers.begin(_NAME, "delivery")


async def test_stopped_transfers_are_forgotten_though_none_begins() -> None:
    clock = FakeClock()
    transfers = Transfers(clock)
    for number in range(100):
        await transfers.stop((number.to_bytes(16, "big"), 0), 5.0)
        await clock.advance(1.0)
    assert len(transfers._refused) <= 6


async def test_one_that_runs_is_ended_and_waited_for() -> None:
    transfers, stopped = Transfers(FakeClock()), list[str]()
    transfers.begin(_NAME, "store")
    with pytest.raises(TransferRunning):
        transfers.begin(_NAME, "store")
    transfers.stop_by(_NAME, lambda: stopped.append("now"))
    stopping = asyncio.create_task(transfers.stop(_NAME, 60.0))
    await asyncio.sleep(0)
    assert stopped == ["now"] and not stopping.done()
    transfers.end(_NAME)
    await stopping


async def test_one_that_begins_just_then_is_ended_as_soon_as_that_can_be() -> None:
    transfers, stopped = Transfers(FakeClock()), list[str]()
    transfers.begin(_NAME, "delivery")
    stopping = asyncio.create_task(transfers.stop(_NAME, 60.0))
    await asyncio.sleep(0)
    transfers.stop_by(_NAME, lambda: stopped.append("now"))
    assert stopped == ["now"] and not stopping.done()
    transfers.end(_NAME)
    await stopping
