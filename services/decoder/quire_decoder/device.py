"""The device: one batch at a time. Latents that wait for it and are of one kind go together, where that pays."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.model.fair_queue import FairQueue
from quire.model.latents import LatentInfo
from quire.telemetry import background
from quire_decoder.core.batching import BatchSizes, Verdict
from quire_decoder.errors import DeviceFull
from quire_decoder.ports import Pixels, VaeRunner

Latent = npt.NDArray[np.float32]
_Kind = tuple[Any, ...]
_KINDS_MAX: Final = 256


@dataclass(slots=True, eq=False)
class _Waiting:
    latent: Latent
    info: LatentInfo
    tenant: str
    done: asyncio.Future[tuple[Pixels, float]]

    @property
    def kind(self) -> _Kind:
        return self.latent.shape, self.info.vae.weights_sha256, self.info.decode.dtype


class Device:
    """A queue before a `VaeRunner`, which has a thread of its own. `clock` is in seconds."""

    def __init__(self, vae: VaeRunner, batch_max: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._vae = vae
        self._clock = clock
        self._batch_max = batch_max
        self._thread = ThreadPoolExecutor(1, "device")
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._sizes: OrderedDict[_Kind, BatchSizes] = OrderedDict()
        self._worker: asyncio.Task[None] | None = None
        self._running = 0
        self.batches = 0

    @property
    def waiting(self) -> int:
        """Latents that wait or are being decoded."""
        return len(self._queue) + self._running

    async def decode(self, latent: Latent, info: LatentInfo, tenant: str = "") -> tuple[Pixels, float]:
        """The pixels, and the seconds of the device that they took. Raises `VaeUnknown`, `DeviceFull`, `RecordInvalid`.

        Tenants take turns. A request that is cancelled while it waits takes no time of the device.
        """
        job = _Waiting(latent, info, tenant, asyncio.get_running_loop().create_future())
        self._queue.add(tenant, job)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), context=background())
        try:
            return await job.done
        finally:
            self._queue.remove(tenant, job)

    async def encode(self, pixels: Pixels, weights_sha256: str) -> Latent:
        """The latent of a picture, between two batches. Raises `VaeUnknown`, `DeviceFull`, `NotImplementedHere`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._vae.encode, pixels, weights_sha256)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        try:
            while len(self._queue):
                batch = self._take()
                self._running = len(batch)
                await self._run(batch)
                self._running = 0
        finally:
            self._worker, self._running = None, 0

    def _take(self) -> list[_Waiting]:
        """Take the next latent in turn, and others of its kind."""
        first = self._queue.take()
        alike = 1 + self._queue.count(lambda latent: latent.kind == first.kind)
        size = self._sizes_of(first.kind).next_size(alike)
        return [first, *self._queue.take_alike(lambda latent: latent.kind == first.kind, size - 1)]

    async def _run(self, batch: list[_Waiting]) -> None:
        sizes, loop = self._sizes_of(batch[0].kind), asyncio.get_running_loop()
        try:
            outputs, seconds = await loop.run_in_executor(self._thread, self._make, batch, sizes)
        except DeviceFull as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            sizes.too_large(len(batch))
            for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
                await self._run(half)
            return
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            for request in batch:  # whose fault it is shows when each is alone
                await self._run([request])
            return
        self.batches += 1
        for request, pixels in zip(batch, outputs, strict=True):
            if not request.done.done():
                request.done.set_result((pixels, seconds / len(batch)))

    def _make(self, batch: list[_Waiting], sizes: BatchSizes) -> tuple[list[Pixels], float]:
        """Run a batch in the device's thread."""
        info, latents = batch[0].info, [request.latent for request in batch]
        started = self._clock()
        if sizes.verdict(len(batch)) is Verdict.GOOD:
            return self._vae.decode(latents, info), self._clock() - started
        alone = [self._vae.decode([latent], info)[0] for latent in latents]
        alone_s = self._clock() - started
        try:
            self._vae.decode(latents, info)  # the first of a size may have to prepare
            started = self._clock()
            together = self._vae.decode(latents, info)
        except DeviceFull:
            sizes.too_large(len(batch))
            return alone, alone_s
        same = all(np.array_equal(single, batched) for single, batched in zip(alone, together, strict=True))
        sizes.tried(len(batch), same=same, alone_s=alone_s, together_s=self._clock() - started)
        return alone, alone_s

    def _sizes_of(self, kind: _Kind) -> BatchSizes:
        sizes = self._sizes.get(kind)
        if sizes is None:
            if len(self._sizes) >= _KINDS_MAX:
                self._sizes.popitem(last=False)
            sizes = self._sizes[kind] = BatchSizes(self._batch_max)
        return sizes


def _fail(request: _Waiting, error: Exception) -> None:
    if not request.done.done():
        request.done.set_exception(error)
