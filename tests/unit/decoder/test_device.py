"""The queue before the devices: batches that pay and change nothing, several devices, and a lack of memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from quire.model.latents import LatentInfo, RecordInvalid, Vae
from quire.model.nodes import KnownVae
from quire_decoder.core.batching import BatchSizes, Verdict
from quire_decoder.device import Devices
from quire_decoder.errors import DeviceFull
from quire_decoder.ports import Decoded, Pixels
from tests.polling import eventually

INFO = LatentInfo((4, 2, 2), "float16", Vae("x", "", "ab"), 16, 16)


class Runner:
    """A device on which a call costs a fixed time, by a clock of its own, whose memory holds `room` latents."""

    known: tuple[KnownVae, ...] = ()

    def __init__(self, call_s: float = 0.004, room: int = 100, batch_noise: bool = False, lanes: int = 1) -> None:
        self.build = "test"
        self.lanes = lanes
        self.encodes = 0
        self.call_s = call_s
        self.room = room
        self.batch_noise = batch_noise
        self.calls: list[int] = []
        self.held_up_s: list[float] = []
        """What the next calls take besides."""
        self.may_go = threading.Event()
        self.may_go.set()

    def close(self) -> None:
        self.closed = True

    def encode(self, pixels: Pixels, weights_sha256: str) -> npt.NDArray[np.float32]:
        self.encodes += 1
        assert self.may_go.wait(10)
        return _latent(float(pixels[0, 0, 0]))

    def decode(self, latents: Sequence[npt.NDArray[np.float32]], info: LatentInfo) -> Decoded:
        self.calls.append(len(latents))
        assert self.may_go.wait(10)
        took_s = self.call_s + (self.held_up_s.pop(0) if self.held_up_s else 0.0)
        if len(latents) > self.room:
            raise DeviceFull(f"{len(latents)}")
        if any(float(latent[0, 0, 0]) < 0 for latent in latents):
            raise RecordInvalid("below zero")
        more = self.batch_noise and len(latents) > 1
        made = [np.full((16, 16, 3), int(latent[0, 0, 0]) + more, np.uint8) for latent in latents]
        return Decoded(made, took_s, self.build)


def _device(runner: Runner, batch_max: int = 8) -> Devices:
    return Devices([runner], batch_max)


def _latent(value: float) -> npt.NDArray[np.float32]:
    return np.full((4, 2, 2), value, np.float32)


async def _decode(device: Devices, values: Sequence[float]) -> list[int]:
    made = await asyncio.gather(*(device.decode(_latent(value), INFO) for value in values))
    return [int(picture.pixels[0, 0, 0]) for picture in made]


async def test_batches_grow_where_they_pay() -> None:
    runner = Runner()
    device = _device(runner)
    for _ in range(4):
        assert await _decode(device, range(16)) == list(range(16))
    assert max(runner.calls) == 8
    runner.calls.clear()
    assert await _decode(device, range(16)) == list(range(16))
    assert runner.calls == [8, 8], "learnt"
    device.close()


async def test_a_device_that_was_held_up_once_is_tried_again() -> None:
    runner = Runner()
    runner.held_up_s = [0.0, 0.0, 0.0, 1.0]  # two alone, two together twice: in the last something else ran
    device = _device(runner)
    for _ in range(4):
        await _decode(device, range(16))
    runner.calls.clear()
    await _decode(device, range(16))
    assert runner.calls == [8, 8]
    device.close()


async def test_a_batch_that_changes_a_pixel_is_never_used() -> None:
    runner = Runner(batch_noise=True)
    device = _device(runner)
    for _ in range(3):
        assert await _decode(device, range(8)) == list(range(8))
    runner.calls.clear()
    assert await _decode(device, range(8)) == list(range(8))
    assert runner.calls == [1] * 8
    device.close()


async def test_without_memory_batches_shrink_and_one_alone_fails() -> None:
    runner = Runner(room=2)
    device = _device(runner)
    for _ in range(3):
        assert await _decode(device, range(12)) == list(range(12))
    runner.calls.clear()
    await _decode(device, range(8))
    assert runner.calls == [2] * 4
    runner.room = 1  # another process took memory: a size that was good is not any more
    assert await _decode(device, range(4)) == list(range(4))
    runner.room = 0
    with pytest.raises(DeviceFull):
        await device.decode(_latent(1), INFO)
    runner.room = 2
    assert await _decode(device, [3]) == [3], "the node goes on"
    device.close()


async def test_a_bad_latent_fails_alone() -> None:
    device = _device(Runner())
    await _decode(device, range(16))
    await _decode(device, range(16))
    made = await asyncio.gather(
        *(device.decode(_latent(value), INFO) for value in (1, 2, -1, 3)), return_exceptions=True
    )
    assert [isinstance(each, RecordInvalid) for each in made] == [False, False, True, False]
    device.close()


async def test_one_that_gives_up_takes_no_time() -> None:
    runner = Runner()
    runner.may_go.clear()
    device = _device(runner, 1)
    tasks = [asyncio.create_task(device.decode(_latent(value), INFO)) for value in range(5)]
    async with asyncio.timeout(10):
        while not runner.calls:
            await asyncio.sleep(0.001)
    for task in tasks[2:]:
        task.cancel()
    runner.may_go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(runner.calls) == 2
    assert device.waiting == 0
    device.close()


async def test_tenants_take_turns() -> None:
    """Behind forty latents of another tenant one waits for one of them, not for all; kinds do not change that."""
    runner, order = Runner(), list[str]()
    device = _device(runner, batch_max=1)

    async def decode(tenant: str, value: int) -> None:
        await device.decode(_latent(value), INFO, tenant)
        order.append(tenant)

    greedy = [asyncio.create_task(decode("greedy", number)) for number in range(40)]
    await asyncio.sleep(0)
    await asyncio.gather(decode("modest", 1), decode("other", 1), *greedy)
    assert order.index("modest") <= 2 and order.index("other") <= 3, order
    device.close()


@pytest.mark.parametrize(
    ("lanes", "requests", "calls"), [((2, 2), 2, [1, 1]), ((2, 1), 10, [2, 1])], ids=["each has one", "all are busy"]
)
async def test_several_devices_share_a_queue(lanes: tuple[int, ...], requests: int, calls: list[int]) -> None:
    """Every device has a latent before any has two; further ones wait, and are counted."""
    runners = [Runner(lanes=count) for count in lanes]
    for runner in runners:
        runner.may_go.clear()
    devices = Devices(runners, 1)
    tasks = [asyncio.create_task(devices.decode(_latent(value), INFO)) for value in range(requests)]
    await eventually(lambda: [len(runner.calls) for runner in runners] == calls, "lanes have begun")
    assert devices.waiting == requests and devices.count == 2
    for runner in runners:
        runner.may_go.set()
    pictures = await asyncio.gather(*tasks)
    assert [int(picture.pixels[0, 0, 0]) for picture in pictures] == list(range(requests))
    assert sum(len(runner.calls) for runner in runners) == requests and devices.waiting == 0
    devices.close()
    assert all(runner.closed for runner in runners)


class Rebuilt(Runner):
    """A runner whose build changes with call `at_call`; batches of the new build have other pixels."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.at_call = at_call

    def decode(self, latents: Sequence[npt.NDArray[np.float32]], info: LatentInfo) -> Decoded:
        if len(self.calls) >= self.at_call:
            self.build, self.batch_noise = "another", True
        return super().decode(latents, info)


@pytest.mark.parametrize("at_call", range(1, 32))
async def test_a_batch_size_is_tried_again_for_another_build(at_call: int) -> None:
    """Whenever the build changes, also within a trial, or with a batch of a good size: no pixel of a batch is shown."""
    runner = Rebuilt(at_call)
    devices = _device(runner)
    rounds_left = 3
    while rounds_left:
        rounds_left -= devices.build == "another"
        pictures = await asyncio.gather(*(devices.decode(_latent(value), INFO) for value in range(8)))
        assert [int(picture.pixels[0, 0, 0]) for picture in pictures] == list(range(8))
    assert {picture.build for picture in pictures} == {"another"}
    devices.close()


def test_sizes() -> None:
    sizes = BatchSizes(8)
    assert sizes.next_size(1) == 1
    assert sizes.next_size(3) == 2
    sizes.tried(2, same=True, alone_s=1.0, together_s=0.6)
    assert sizes.next_size(3) == 2
    assert sizes.next_size(9) == 4
    sizes.tried(4, same=True, alone_s=1.0, together_s=0.99)
    assert sizes.next_size(9) == 4, "once more"
    sizes.tried(4, same=True, alone_s=1.0, together_s=0.99)
    assert sizes.verdict(4) is sizes.verdict(8) is Verdict.BAD
    assert sizes.next_size(9) == 2
    sizes.too_large(2)
    assert sizes.next_size(9) == 1
    sizes = BatchSizes(8)
    sizes.tried(2, same=True, alone_s=1.0, together_s=0.6)
    sizes.tried(2, same=False, alone_s=1.0, together_s=0.6)
    assert sizes.verdict(2) is Verdict.BAD, "two lanes tried it at once, and one of them found another pixel"


async def test_pictures_are_encoded_on_idle_devices_and_counted() -> None:
    runners = [Runner(), Runner()]
    devices = Devices(runners, 1)
    for runner in runners:
        runner.may_go.clear()
    encodes = [asyncio.create_task(devices.encode(np.full((16, 16, 3), value, np.uint8), "ab")) for value in range(3)]
    await eventually(lambda: [runner.encodes for runner in runners] == [1, 1], "one at each device")
    decode = asyncio.create_task(devices.decode(_latent(3), INFO))
    await asyncio.sleep(0)
    assert devices.waiting == 4
    for runner in runners:
        runner.may_go.set()
    assert sorted(float(latent[0, 0, 0]) for latent in await asyncio.gather(*encodes)) == [0, 1, 2]
    assert int((await decode).pixels[0, 0, 0]) == 3 and devices.waiting == 0
    devices.close()


async def test_nobody_waits_for_a_device_that_is_closed() -> None:
    runner = Runner()
    runner.may_go.clear()
    devices = Devices([runner], 1)
    tasks = [asyncio.create_task(devices.decode(_latent(value), INFO)) for value in range(3)]
    await eventually(lambda: bool(runner.calls), "the first one runs")
    devices.close()
    runner.may_go.set()
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)
