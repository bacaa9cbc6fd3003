"""Calls for several callers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from quire_storage.cluster.joined_calls import JoinedCalls


class _Server:
    """Doubles numbers, a batch at a time, when it is let."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.free = asyncio.Event()
        self.cancelled = 0

    async def double(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if -1 in items:
            raise ValueError("negative")
        return [2 * item for item in items]


async def _turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_callers_share_the_call_behind_the_one_that_runs() -> None:
    server = _Server()
    double = JoinedCalls(server.double)
    calls = [asyncio.ensure_future(double(1))]
    await _turns()
    calls += [asyncio.ensure_future(double(item)) for item in range(2, 102)]
    await _turns()
    server.free.set()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*calls) == [2 * item for item in range(1, 102)]
    assert [len(batch) for batch in server.batches] == [1, 64, 36]


async def test_an_error_is_that_of_its_call_alone() -> None:
    server = _Server()
    double = JoinedCalls(server.double)
    bad = [asyncio.ensure_future(double(item)) for item in (-1, 1)]
    await _turns()
    good = asyncio.ensure_future(double(2))
    await _turns()
    server.free.set()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*bad, return_exceptions=True)
        assert [type(result) for result in results] == [ValueError, ValueError]
        assert await good == 4


async def test_a_caller_that_gives_up_costs_the_others_nothing() -> None:
    server = _Server()
    double = JoinedCalls(server.double)
    calls = [asyncio.ensure_future(double(item)) for item in range(3)]
    await _turns()
    calls[0].cancel()
    server.free.set()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*calls[1:]) == [2, 4]
    assert not server.cancelled


async def test_a_call_that_nobody_waits_for_is_cancelled() -> None:
    """A caller who comes during the cancellation gets a call of its own."""
    server = _Server()
    double = JoinedCalls(server.double)
    calls = [asyncio.ensure_future(double(item)) for item in range(3)]
    await _turns()
    for call in calls:
        call.cancel()
    await asyncio.sleep(0)
    late = asyncio.ensure_future(double(7))
    await _turns()
    assert server.cancelled == 1
    server.free.set()
    async with asyncio.timeout(5):
        assert await late == 14
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
