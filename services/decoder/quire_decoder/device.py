"""The devices of a node, behind one queue. Latents that wait and are of one kind go together, where that pays."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.model.fair_queue import FairQueue
from quire.model.latents import LatentInfo
from quire.model.nodes import KnownVae
from quire.telemetry import background
from quire_decoder.core.batching import BatchSizes, Verdict
from quire_decoder.errors import DeviceFull
from quire_decoder.ports import Decoded, Pixels, VaeRunner

Latent = npt.NDArray[np.float32]
_Kind = tuple[Any, ...]
_KINDS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded latent, the device's seconds for it, and the build that its pixels depend on."""

    pixels: Pixels
    seconds: float
    build: str


@dataclass(slots=True, eq=False)
class _Waiting:
    latent: Latent
    info: LatentInfo
    tenant: str
    done: asyncio.Future[Picture]

    @property
    def kind(self) -> _Kind:
        return self.latent.shape, self.info.vae.weights_sha256, self.info.decode.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """A thread that decodes on a device."""

    runner: VaeRunner
    thread: ThreadPoolExecutor


class Devices:
    """A queue before the `VaeRunner` of each device, which may have several threads.

    Args:
        runners: Of devices that make the same pixels.
        batch_max: Latents of a batch.
    """

    def __init__(self, runners: Sequence[VaeRunner], batch_max: int) -> None:
        self._runners = runners
        self._batch_max = batch_max
        rounds = range(max(runner.lanes for runner in runners))
        self._idle = [
            _Lane(runner, ThreadPoolExecutor(1, "device"))
            for number in rounds
            for runner in runners
            if number < runner.lanes
        ]
        self._lanes = tuple(self._idle)
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._sizes: OrderedDict[_Kind, BatchSizes] = OrderedDict()
        self._working: set[asyncio.Task[None]] = set()
        self._running = self._encoding = 0
        self._build = runners[0].build
        self.batches = 0

    @property
    def count(self) -> int:
        """Devices."""
        return len(self._runners)

    @property
    def build(self) -> str:
        """Facts that decide the pixels of a latent from now on. It changes with a batch, between events of the loop."""
        return self._build

    @property
    def known(self) -> tuple[KnownVae, ...]:
        """VAEs that every device can decode with."""
        common = set.intersection(*(set(runner.known) for runner in self._runners))
        return tuple(vae for vae in self._runners[0].known if vae in common)

    @property
    def waiting(self) -> int:
        """Latents that wait or are being decoded, and pictures that are being encoded."""
        return len(self._queue) + self._running + self._encoding

    async def decode(self, latent: Latent, info: LatentInfo, tenant: str = "") -> Picture:
        """The pixels of a latent. Raises `VaeUnknown`, `DeviceFull`, `RecordInvalid`.

        Tenants take turns. A request that is cancelled while it waits takes no time of a device.
        """
        job = _Waiting(latent, info, tenant, asyncio.get_running_loop().create_future())
        self._queue.add(tenant, job)
        self._begin()
        try:
            return await job.done
        finally:
            self._queue.remove(tenant, job)

    async def encode(self, pixels: Pixels, weights_sha256: str) -> Latent:
        """The latent of a picture, between two batches. Raises `VaeUnknown`, `DeviceFull`, `NotImplementedHere`."""
        idle = self._take_lane() if self._idle else None
        lane = idle or self._lanes[self._encoding % len(self._lanes)]
        self._encoding += 1
        try:
            work = partial(lane.runner.encode, pixels, weights_sha256)
            return await asyncio.get_running_loop().run_in_executor(lane.thread, work)
        finally:
            self._encoding -= 1
            if idle is not None:
                self._idle.append(idle)
                self._begin()

    def close(self) -> None:
        """End everything. Requests that wait are cancelled."""
        while len(self._queue):
            self._queue.take().done.cancel()
        for task in self._working:
            task.cancel()
        for lane in self._lanes:
            lane.thread.shutdown(wait=False, cancel_futures=True)
        for runner in self._runners:
            runner.close()

    def _begin(self) -> None:
        """Have an idle lane work, if there is one and something waits."""
        if self._idle and len(self._queue):
            task = asyncio.create_task(self._work(self._take_lane()), context=background())
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    def _take_lane(self) -> _Lane:
        """Take a lane of the device with the most idle ones."""
        runners = [lane.runner for lane in self._idle]
        lane = max(self._idle, key=lambda lane: runners.count(lane.runner))
        self._idle.remove(lane)
        return lane

    async def _work(self, lane: _Lane) -> None:
        try:
            while len(self._queue):
                batch = self._take()
                self._running += len(batch)
                try:
                    await self._run(lane, batch)
                finally:
                    self._running -= len(batch)
                    for request in batch:
                        request.done.cancel()  # without effect on an answered one
        finally:
            self._idle.append(lane)

    def _take(self) -> list[_Waiting]:
        """Take the next latent in turn, and others of its kind."""
        first = self._queue.take()
        alike = 1 + self._queue.count(lambda latent: latent.kind == first.kind)
        size = self._sizes_of(first.kind, self.build).next_size(alike)
        return [first, *self._queue.take_alike(lambda latent: latent.kind == first.kind, size - 1)]

    async def _run(self, lane: _Lane, batch: list[_Waiting]) -> None:
        build, loop = self.build, asyncio.get_running_loop()
        sizes = self._sizes_of(batch[0].kind, build)
        try:
            pictures = await loop.run_in_executor(lane.thread, _make, lane.runner, batch, sizes, build)
        except DeviceFull as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            sizes.too_large(len(batch))
            for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
                await self._run(lane, half)
            return
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            for request in batch:  # whose fault it is shows when each is alone
                await self._run(lane, [request])
            return
        self.batches += 1
        self._build = self._runners[0].build
        for request, picture in zip(batch, pictures, strict=True):
            if not request.done.done():
                request.done.set_result(picture)

    def _sizes_of(self, latents: _Kind, build: str) -> BatchSizes:
        kind = (build, *latents)
        sizes = self._sizes.get(kind)
        if sizes is None:
            if len(self._sizes) >= _KINDS_MAX:
                self._sizes.popitem(last=False)
            sizes = self._sizes[kind] = BatchSizes(self._batch_max)
        return sizes


def _make(runner: VaeRunner, batch: list[_Waiting], sizes: BatchSizes, build: str) -> list[Picture]:
    """Run a batch in the thread of a lane. One of a size that `build` has not tried is made alone too, and compared."""
    info, latents = batch[0].info, [request.latent for request in batch]
    if sizes.verdict(len(batch)) is Verdict.GOOD:
        decoded = runner.decode(latents, info)
        if decoded.build == build or len(batch) == 1:
            return _pictures(decoded)
    alone = [_pictures(runner.decode([latent], info))[0] for latent in latents]
    try:
        runner.decode(latents, info)  # the first of a size may have to prepare
        together = runner.decode(latents, info)
    except DeviceFull:
        sizes.too_large(len(batch))
        return alone
    if {together.build, *(picture.build for picture in alone)} == {build}:
        pairs = zip(alone, together.pixels, strict=True)
        same = all(np.array_equal(single.pixels, batched) for single, batched in pairs)
        alone_s = sum(picture.seconds for picture in alone)
        sizes.tried(len(batch), same=same, alone_s=alone_s, together_s=together.seconds)
    return alone


def _pictures(decoded: Decoded) -> list[Picture]:
    share_s = decoded.seconds / len(decoded.pixels)
    return [Picture(pixels, share_s, decoded.build) for pixels in decoded.pixels]


def _fail(request: _Waiting, error: Exception) -> None:
    if not request.done.done():
        request.done.set_exception(error)
