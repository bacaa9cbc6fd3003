"""The stages of a decode: fetching, threads (decompressing, encoding), the devices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.model.errors import CorruptData, DeadlineExceeded, NoStorageNode, NotImplementedHere, Unavailable
from quire.model.images import ImageEntry, LeasedRecord, Rendering, check_record
from quire.model.latents import decode_record, denormalised
from quire.telemetry import names, tracer
from quire_decoder.config import DecoderConfig
from quire_decoder.core.form_cache import Costs
from quire_decoder.device import Devices, Picture
from quire_decoder.encoders import Encoders
from quire_decoder.ports import Clock, EncoderProcess, PixelEncoder, Pixels, RecordSource, VaeRunner
from quire_server.limits.turns import FairTurns

Result = TypeVar("Result")
LOSSLESS = Rendering("png")
Stages = dict[str, int]
"""Microseconds by stage, of one request."""


class Pipeline:
    """Runs the stages of decodes, round-robin over tenants.

    At most `fetches_max` records are fetched, and 2·`batch_max` latents for each device + `threads` unpacked at a time.

    `costs` records the durations of fetching, decoding and encoding.
    """

    def __init__(
        self,
        *,
        config: DecoderConfig,
        records: RecordSource,
        vaes: Sequence[VaeRunner],
        encoder: PixelEncoder,
        make_encoder_process: Callable[[], EncoderProcess],
        clock: Clock,
        costs: Costs,
    ) -> None:
        self._config = config
        self._records = records
        self._encoder = encoder
        self._clock = clock
        self._costs = costs
        self._fetching = FairTurns(config.fetches_max)
        self._unpacked = FairTurns(2 * config.batch_max * len(vaes) + config.threads)
        self._threads = ThreadPoolExecutor(config.threads, "decoder")
        self._lanes = Encoders(config, encoder, make_encoder_process)
        self._fetches: set[asyncio.Task[bytes]] = set()
        self.devices = Devices(vaes, config.batch_max)

    @property
    def encoding(self) -> int:
        """Images that wait for a turn to be encoded."""
        return self._lanes.waiting

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._lanes.close()
        self.devices.close()

    async def fetch(self, entry: ImageEntry, leased: LeasedRecord, stages: Stages, tenant: str) -> bytes:
        """The record, verified.

        Raises `NoStorageNode` where storage does not give it: nothing has been written for the caller then; and
        `ChunkMissing`, `CorruptData`.
        """
        started = self._clock.monotonic_s()
        try:
            record = await timed(stages, "fetch", self._fetched(entry, leased, tenant))
        except TimeoutError:
            raise NoStorageNode(f"no record within {self._config.fetch_timeout_s} s") from None
        except (Unavailable, DeadlineExceeded) as error:
            raise NoStorageNode(f"the record cannot be had: {error}") from error
        await self.check(record, entry)
        self._costs.fetched(self._clock.monotonic_s() - started)
        return record

    async def check(self, record: bytes, entry: ImageEntry) -> None:
        """Before anything is kept or shown. Raises `CorruptData` for another record than the entry's."""
        await self.in_thread(check_record, record, entry)

    async def decode(self, entry: ImageEntry, record: bytes, stages: Stages, tenant: str) -> Picture:
        """Pixels of a verified record, (height, width, 3) uint8. Raises `CorruptData`, `NotImplementedHere`."""
        async with self._unpacked.turn(
            tenant
        ):  # so that what waits for the device is bounded, and not in its large form
            values, info = await timed(stages, "decompress", self.in_thread(decode_record, record))
            if (info.height, info.width) != (entry.height, entry.width) or info.sha256 != entry.latent_sha256:
                raise CorruptData("the record is another than the catalogue says")
            if info.layout != "chw" or info.normalisation.batch_norm:
                raise NotImplementedHere(
                    f"layout {info.layout}, batch norm {info.normalisation.batch_norm}", field="record"
                )
            latent = await self.in_thread(denormalised, values, info)
            started = self._clock.monotonic_s()
            with tracer().start_as_current_span(names.DECODER_STAGES + "decode") as span:
                picture = await self.devices.decode(latent, info, tenant)
                span.set_attribute("quire.device_us", int(picture.seconds * 1e6))
        spent_s = self._clock.monotonic_s() - started
        stages["decode"] = int(picture.seconds * 1e6)
        stages["queue"] = max(0, int((spent_s - picture.seconds) * 1e6))
        self._costs.decoded(spent_s)
        if picture.pixels.shape != (entry.height, entry.width, 3):
            raise CorruptData(f"the VAE makes {picture.pixels.shape}, the record says {entry.height} × {entry.width}")
        return picture

    async def encode(
        self,
        source: Pixels | bytes,
        rendering: Rendering,
        stages: Stages,
        *,
        entry: ImageEntry,
        tenant: str,
        stage: str = "encode",
    ) -> bytes:
        """An image file, of pixels or of the lossless image. `stage`: what its time is counted as."""
        started = self._clock.monotonic_s()
        image = await timed(stages, stage, self._lanes.encode(source, rendering, rendering.pixels(entry), tenant))
        if stage == "encode":
            self._costs.encoded(self._clock.monotonic_s() - started)
        return image

    async def check_lossless(self, image: bytes, entry: ImageEntry) -> None:
        """Check a lossless image. Raises `CorruptData` if it is none, or not of the entry's size."""
        pixels = await self.in_thread(self._encoder.decode_lossless, image)
        if pixels.shape != (entry.height, entry.width, 3):
            raise CorruptData(f"the decoded {entry.image_id!r} has the shape {pixels.shape}")

    async def _fetched(self, entry: ImageEntry, leased: LeasedRecord, tenant: str) -> bytes:
        """Fetch the record, even after a cancellation: a node has the memory's address until it has ended."""
        task = asyncio.create_task(self._fetch(entry, leased, tenant))
        self._fetches.add(task)
        task.add_done_callback(self._fetch_ended)
        return await asyncio.shield(task)

    def _fetch_ended(self, task: asyncio.Task[bytes]) -> None:
        self._fetches.discard(task)
        if not task.cancelled():
            task.exception()  # seen: it need not be awaited

    async def _fetch(self, entry: ImageEntry, leased: LeasedRecord, tenant: str) -> bytes:
        async with asyncio.timeout(self._config.fetch_timeout_s), self._fetching.turn(tenant):
            if self._config.fetch_delay_ms:  # as if the store were further away
                await asyncio.sleep(self._config.fetch_delay_ms / 1e3)
            return await self._records.fetch(entry, leased)

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """One of the threads that decompress."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


async def timed(stages: Stages, name: str, work: Awaitable[Result]) -> Result:
    """Await, with a span of its own, and note the microseconds."""
    started = time.perf_counter_ns()
    try:
        with tracer().start_as_current_span(names.DECODER_STAGES + name):
            return await work
    finally:
        stages[name] = stages.get(name, 0) + (time.perf_counter_ns() - started) // 1000
