"""Lanes of encoding: tenants take turns, small images pass large ones, and what is cancelled ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.errors import ResourceExhausted
from quire.model.fair_queue import FairQueue
from quire.model.images import Rendering
from quire_decoder.config import DecoderConfig
from quire_decoder.encoders import Encoders
from quire_decoder.ports import Pixels
from quire_server.limits.turns import FairTurns

PIXELS = np.zeros((8, 8, 3), dtype=np.uint8)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=40))
def test_a_tenant_waits_for_one_of_each_other(added: list[tuple[str, int]]) -> None:
    """Between two of its items every tenant that waits has one; a tenant's own come in order; none is lost."""
    queue, taken = FairQueue[tuple[str, int]](), list[tuple[str, int]]()
    for item in added:
        queue.add(item[0], item)
    assert len(queue) == len(added)
    while len(queue):
        taken.append(queue.take())
    assert sorted(taken) == sorted(added)
    for tenant in "abc":
        assert [each for each in taken if each[0] == tenant] == [each for each in added if each[0] == tenant]
        places = [at for at, each in enumerate(taken) if each[0] == tenant]
        for before, after in itertools.pairwise(places):
            between = [each[0] for each in taken[before + 1 : after]]
            assert len(between) == len(set(between)), "another had two turns meanwhile"
            still = {each[0] for each in taken[after:]} - {tenant}
            assert still <= set(between)
    with pytest.raises(IndexError):
        queue.take()


async def test_turns_are_not_lost_by_those_that_leave() -> None:
    turns, order, gate = FairTurns(1), list[str](), asyncio.Event()

    async def work(name: str) -> None:
        async with turns.turn(name[0]):
            order.append(name)
            await gate.wait()

    tasks = {name: asyncio.create_task(work(name)) for name in ("a0", "a1", "a2", "a3", "b0", "c0")}
    await asyncio.sleep(0)
    assert turns.waiting == 5
    tasks["a1"].cancel()
    await asyncio.wait([tasks["a1"]])
    gate.set()
    await asyncio.gather(*(task for name, task in tasks.items() if name != "a1"))
    assert order == ["a0", "a2", "b0", "c0", "a3"]
    gate.clear()
    one, two, three = (asyncio.create_task(work(name)) for name in ("x", "y", "z"))
    await asyncio.sleep(0)
    one.cancel()  # gives the turn to the second, which leaves at that moment
    await asyncio.sleep(0)
    two.cancel()
    gate.set()
    async with asyncio.timeout(5):
        await three
    assert turns.waiting == 0


class _Encoder:
    build = "test"

    def encode(self, pixels: Pixels, rendering: Rendering) -> bytes:
        return b"small"

    def decode_lossless(self, image: bytes) -> Pixels:
        return PIXELS


class _Process:
    """Works until it is killed."""

    made: list[_Process] = []  # noqa: RUF012 # of one test

    def __init__(self) -> None:
        self.killed = threading.Event()
        self.begun = threading.Event()
        _Process.made.append(self)

    @property
    def usable(self) -> bool:
        return not self.killed.is_set()

    def run(self, source: Pixels | bytes, rendering: Rendering) -> bytes:
        self.begun.set()
        assert self.killed.wait(30)
        raise ResourceExhausted("ended")

    def kill(self) -> None:
        self.killed.set()


async def test_large_images_hold_no_small_one_up_and_end_when_cancelled() -> None:
    _Process.made.clear()
    config = DecoderConfig(cluster_secret="s" * 32, encode_short_pixels=100, threads=1)
    lanes, wanted = Encoders(config, _Encoder(), _Process), Rendering("webp")
    large = [asyncio.create_task(lanes.encode(PIXELS, wanted, 101, "a")) for _ in range(3)]
    async with asyncio.timeout(20):
        assert await lanes.encode(PIXELS, wanted, 100, "b") == b"small"
        assert await lanes.encode(b"a file", wanted, 100, "b") == b"small"
        for task in large:
            while not _Process.made or _Process.made[-1].killed.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
    assert len(_Process.made) == 3 and all(process.killed.is_set() for process in _Process.made)
    assert lanes.waiting == 0
    last = asyncio.create_task(lanes.encode(PIXELS, wanted, 101, "a"))
    while len(_Process.made) < 4:
        await asyncio.sleep(0.001)
    lanes.close()  # ends what is running, too
    with pytest.raises(ResourceExhausted):
        await last


async def test_what_no_thread_has_taken_when_the_lanes_close_is_told_so() -> None:
    """It was not cancelled by the one who asked."""
    _Process.made.clear()
    config = DecoderConfig(cluster_secret="s" * 32, encode_short_pixels=100, threads=1)
    lanes, done = Encoders(config, _Encoder(), _Process), threading.Event()
    lanes._waiting.shutdown()
    lanes._waiting = ThreadPoolExecutor(1)
    lanes._waiting.submit(done.wait)
    asked = asyncio.create_task(lanes.encode(PIXELS, Rendering("webp"), 101, "a"))
    async with asyncio.timeout(20):
        while not _Process.made:
            await asyncio.sleep(0.001)
        lanes.close()
        done.set()
        with pytest.raises(ResourceExhausted, match="stops"):
            await asked
