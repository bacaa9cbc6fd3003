"""The decoder: cache, decode pipeline, and what is shared with other decoders.

A request passes three bounded stages: fetching (a number at a time), threads (decompressing, encoding), the device
(one batch at a time). Requests for an image that is being decoded wait for that decode.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from quire.model.descriptor import RdmaTarget
from quire.model.errors import (
    CorruptData,
    DeadlineExceeded,
    InvalidRequest,
    NotImplementedHere,
    QuireError,
    TooManyRequests,
)
from quire.model.images import ImageEntry, LeasedRecord, Rendering
from quire.model.latents import decode_record, denormalised
from quire.model.nodes import DecoderInfo
from quire.telemetry import logger, names, tracer
from quire_decoder.config import DecoderConfig
from quire_decoder.core.dual_cache import Costs, DualCache, Outcome, Tuning
from quire_decoder.device import Device
from quire_decoder.ports import Clock, Owner, PixelEncoder, Pixels, RecordSource, RemoteMemory, VaeRunner

Result = TypeVar("Result")
_LOSSLESS = Rendering("png")
_NOT_LEASED = LeasedRecord()


@dataclass(slots=True)
class Served:
    """An encoded image, where it was found, and microseconds by stage."""

    image: bytes
    source: str
    stages_us: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Made:
    """A decode: the pixels, and what may be kept of it."""

    pixels: Pixels
    source: str
    record: bytes | None
    promote: bool
    lossless: bytes | None = None


class Decoder:
    """Every public method is one request."""

    def __init__(
        self,
        *,
        config: DecoderConfig,
        records: RecordSource,
        vae: VaeRunner,
        encoder: PixelEncoder,
        remote_memory: RemoteMemory,
        owners: Owner,
        clock: Clock,
    ) -> None:
        self._config = config
        self._records = records
        self._vae = vae
        self._encoder = encoder
        self._remote_memory = remote_memory
        self._owners = owners
        self._clock = clock
        tuning = Tuning(
            config.tune_step, config.tune_window, config.tail_share, config.promote_hits, adaptive=config.tune
        )
        self._cache: DualCache[bytes] = DualCache(config.cache_bytes, min(1.0, config.alpha), tuning, Costs(0.04, 0.14))
        self._bytes: dict[bytes, bytes] = {}
        self._running: dict[bytes, asyncio.Task[_Made | bytes]] = {}
        self._fetching = asyncio.Semaphore(config.fetches_max)
        self._unpacked = asyncio.Semaphore(2 * config.batch_max + config.threads)
        self._device = Device(vae, config.batch_max)
        self._threads = ThreadPoolExecutor(config.threads, "decoder")
        self._joined = 0

    @property
    def _only_images(self) -> bool:
        """A cache of images alone takes them at the first miss: there are no latent hits to count."""
        return self._config.alpha >= 1 and not self._config.tune

    @property
    def build(self) -> str:
        return f"{self._vae.build}, {self._encoder.build}"

    @property
    def info(self) -> DecoderInfo:
        """What others decide by."""
        cache = self._cache
        return DecoderInfo(
            build=self.build,
            capacity_bytes=cache.capacity_bytes,
            used_bytes=cache.images.used_bytes + cache.latents.used_bytes,
        )

    @property
    def stats(self) -> dict[str, float]:
        """For `quire status`."""
        cache, total = self._cache, self._cache.total
        return {
            "requests": total.requests,
            "hits.image": total.image_hits,
            "hits.latent": total.latent_hits,
            "misses": total.full_misses,
            "joined": self._joined,
            "queue": self._device.waiting,
            "batches": self._device.batches,
            "cache.alpha": cache.alpha,
            "cache.gradient": cache.last_gradient,
            "cache.images": len(cache.images),
            "cache.latents": len(cache.latents),
            "cache.bytes": cache.images.used_bytes + cache.latents.used_bytes,
            "decode_ms": cache.costs.decode_s * 1e3,
            "fetch_ms": cache.costs.fetch_s * 1e3,
        }

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._device.close()

    async def serve(
        self, entry: ImageEntry, rendering: Rendering, owner_address: str = "", leased: LeasedRecord = _NOT_LEASED
    ) -> Served:
        """An image, encoded as asked. `owner_address`: of the decoder whose cache it belongs to, if not this one's.

        `leased`: its record, should no cache have it.

        Raises `InvalidRequest`, `VaeUnknown`, `DeviceFull`, `ChunkMissing`, `CorruptData`.
        """
        height, width = rendering.size(entry)
        if max(height * width, entry.height * entry.width) > self._config.pixels_max:
            raise InvalidRequest(f"{height} × {width}: {self._config.pixels_max} pixels at most", field="width")
        stages: dict[str, int] = {}
        with tracer().start_as_current_span(names.DECODER_SERVE) as span:
            made, lossless = await self._find(entry, owner_address, leased, stages)
            if made is None:
                assert lossless is not None, "an image hit has the image"
                source = "image"
                image = lossless
                if rendering != _LOSSLESS:
                    pixels = await self._timed(
                        stages, "transcode", self._in_thread(self._encoder.decode_lossless, lossless)
                    )
                    image = await self._timed(
                        stages, "encode", self._in_thread(self._encoder.encode, pixels, rendering)
                    )
            else:
                source = made.source
                if rendering == _LOSSLESS and made.lossless is not None:
                    image = made.lossless
                else:
                    encoding = self._in_thread(self._encoder.encode, made.pixels, rendering)
                    image = await self._timed(stages, "encode", encoding)
            span.set_attribute("quire.source", source)
        return Served(image, source, stages)

    async def read_cached(self, entry: ImageEntry, target: RdmaTarget) -> tuple[str, int]:
        """A request that was sent elsewhere counts here all the same; what this cache has goes there."""
        key = entry.record_sha256
        outcome, data = self._look_up(key)
        if data is None:
            return "", 0
        await self._remote_memory.push(data, target)
        kind = {Outcome.IMAGE: "image", Outcome.LATENT: "latent", Outcome.PROMOTE: "promote"}[outcome]
        return kind, len(data)

    async def write_back(
        self, entry: ImageEntry, record: tuple[RdmaTarget, int] | None, image: tuple[RdmaTarget, int] | None
    ) -> None:
        """Another decoder made this, for this one's cache. Raises `CorruptData` for another record than the entry's."""
        if record is not None:
            data = await self._pull(record, entry.record_bytes)
            await self._in_thread(_check, data, entry)
            self._keep_latent(entry, data)
        if image is not None:
            data = await self._pull(image, _LOSSLESS.bytes_max(entry))
            pixels = await self._in_thread(self._encoder.decode_lossless, data)
            if pixels.shape != (entry.height, entry.width, 3):
                raise CorruptData(f"what came back as {entry.image_id!r} is {pixels.shape}")
            if entry.record_sha256 in self._cache.latents:
                self._keep_image(entry, data)

    # ----

    async def _find(
        self, entry: ImageEntry, owner_address: str, leased: LeasedRecord, stages: dict[str, int]
    ) -> tuple[_Made | None, bytes | None]:
        """A decode, own or joined; or the image as it lies in a cache."""
        key = entry.record_sha256
        joined = (running := self._running.get(key)) is not None
        if running is None:
            if len(self._running) >= self._config.requests_max:
                raise TooManyRequests(f"{len(self._running)} decodes are running; retry later")
            if owner_address:
                making = self._make_for(entry, owner_address, leased, stages)
            else:
                outcome, data = self._look_up(key)
                if outcome is Outcome.IMAGE:
                    return None, data
                making = self._make(entry, outcome, data, leased, stages)
            # A task of its own: a client that goes away does not end it for those that have joined.
            running = self._running[key] = asyncio.create_task(making)
            running.add_done_callback(partial(self._made, key))
        self._joined += joined
        made = await self._timed(stages, "joined" if joined else "make", asyncio.shield(running))
        if isinstance(made, bytes):
            return None, made
        return (replace(made, source="joined") if joined else made), None

    def _made(self, key: bytes, task: asyncio.Task[_Made | bytes]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # seen: it need not be awaited

    async def _make(
        self, entry: ImageEntry, outcome: Outcome, record: bytes | None, leased: LeasedRecord, stages: dict[str, int]
    ) -> _Made | bytes:
        """Decode at home: from the latent tier, or from storage."""
        if record is None:
            record = await self._fetch(entry, leased, stages)
            self._keep_latent(entry, record)
        source = "miss" if outcome is Outcome.MISS else "latent"
        promote = self._only_images or (outcome is Outcome.PROMOTE and self._cache.alpha > 0)
        made = _Made(await self._decode(entry, record, stages), source, None, promote)
        if made.promote:
            made.lossless = await self._timed(
                stages, "keep", self._in_thread(self._encoder.encode, made.pixels, _LOSSLESS)
            )
            self._keep_image(entry, made.lossless)
        return made

    async def _make_for(
        self, entry: ImageEntry, owner_address: str, leased: LeasedRecord, stages: dict[str, int]
    ) -> _Made | bytes:
        """Decode for another's cache: with the owner's latent if it has one, and with its cache told."""
        kind, record, length = "", None, max(entry.record_bytes, _LOSSLESS.bytes_max(entry))
        try:
            with self._remote_memory.room(length) as (target, view):
                kind, got = await self._timed(stages, "owner", self._owners.read_cached(owner_address, entry, target))
                if kind:
                    record = bytes(view[:got])
            if kind in ("latent", "promote"):
                await self._in_thread(_check, record, entry)
        except QuireError as error:
            kind, record = "", None
            logger().warning("the owner's cache does not answer", owner=owner_address, error=str(error))
        if kind == "image" and record is not None:
            return record
        fetched = record is None
        record = record if record is not None else await self._fetch(entry, leased, stages)
        made = _Made(await self._decode(entry, record, stages), "latent" if kind else "miss", record, kind == "promote")
        if made.promote:
            made.lossless = await self._timed(
                stages, "keep", self._in_thread(self._encoder.encode, made.pixels, _LOSSLESS)
            )
        if fetched or made.promote:
            await self._timed(
                stages, "owner", self._tell_owner(entry, owner_address, record if fetched else None, made.lossless)
            )
        return made

    async def _tell_owner(
        self, entry: ImageEntry, owner_address: str, record: bytes | None, image: bytes | None
    ) -> None:
        try:
            with (
                self._remote_memory.lend(record or b"") as lent_record,
                self._remote_memory.lend(image or b"") as lent_image,
            ):
                await self._owners.write_back(
                    owner_address,
                    entry,
                    (lent_record, len(record)) if record else None,
                    (lent_image, len(image)) if image else None,
                )
        except QuireError as error:
            logger().warning("the owner's cache was not told", owner=owner_address, error=str(error))

    async def _fetch(self, entry: ImageEntry, leased: LeasedRecord, stages: dict[str, int]) -> bytes:
        started = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s), self._fetching:
                fetching = self._delayed(self._records.fetch(entry, leased))
                record = await self._timed(stages, "fetch", fetching)
        except TimeoutError:
            raise DeadlineExceeded(f"no record within {self._config.fetch_timeout_s} s") from None
        await self._in_thread(_check, record, entry)
        self._cache.costs.fetched(self._clock.monotonic_s() - started)
        return record

    async def _decode(self, entry: ImageEntry, record: bytes, stages: dict[str, int]) -> Pixels:
        async with self._unpacked:  # so that what waits for the device is bounded, and not in its large form
            values, info = await self._timed(stages, "decompress", self._in_thread(decode_record, record))
            if (info.height, info.width) != (entry.height, entry.width) or info.sha256 != entry.latent_sha256:
                raise CorruptData("the record is another than the catalogue says")
            if info.layout != "chw" or info.normalisation.batch_norm:
                raise NotImplementedHere(
                    f"layout {info.layout}, batch norm {info.normalisation.batch_norm}", field="record"
                )
            latent = await self._in_thread(denormalised, values, info)
            started = self._clock.monotonic_s()
            with tracer().start_as_current_span(names.DECODER_STAGES + "decode") as span:
                pixels, decode_s = await self._device.decode(latent, info)
                span.set_attribute("quire.device_us", int(decode_s * 1e6))
        spent_s = self._clock.monotonic_s() - started
        stages["decode"] = int(decode_s * 1e6)
        stages["queue"] = max(0, int((spent_s - decode_s) * 1e6))
        self._cache.costs.decoded(spent_s)
        if pixels.shape != (entry.height, entry.width, 3):
            raise CorruptData(f"the VAE makes {pixels.shape}, the record says {entry.height} × {entry.width}")
        return pixels

    async def _pull(self, source: tuple[RdmaTarget, int], most: int) -> bytes:
        target, length = source
        if not 0 < length <= most:
            raise InvalidRequest(f"{length} bytes, {most} at most", field="length")
        return await self._remote_memory.pull(target, length)

    def _look_up(self, key: bytes) -> tuple[Outcome, bytes | None]:
        """Where it is, and its bytes, taken before anything else can happen: looking up may move the split."""
        outcome = self._cache.look_up(key)
        data = None if outcome is Outcome.MISS else self._bytes[key]
        self._drop_gone()
        return outcome, data

    def _keep_latent(self, entry: ImageEntry, record: bytes) -> None:
        key = entry.record_sha256
        if not self._cache.holds(key):
            self._bytes[key] = record
            self._cache.fetched(key, len(record))
            self._drop_gone()

    def _keep_image(self, entry: ImageEntry, lossless: bytes) -> None:
        key = entry.record_sha256
        if (self._only_images or key in self._cache.latents) and self._cache.promote(key, len(lossless)):
            self._bytes[key] = lossless
        self._drop_gone()

    def _drop_gone(self) -> None:
        for key in self._cache.gone:
            if not self._cache.holds(key):  # it may have come back since
                self._bytes.pop(key, None)
        self._cache.gone.clear()

    async def _delayed(self, fetching: Awaitable[bytes]) -> bytes:
        """As if the store were further away (`fetch_delay_ms`)."""
        if self._config.fetch_delay_ms:
            await asyncio.sleep(self._config.fetch_delay_ms / 1e3)
        return await fetching

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _timed(self, stages: dict[str, int], name: str, work: Awaitable[Result]) -> Result:
        started = time.perf_counter_ns()
        try:
            with tracer().start_as_current_span(names.DECODER_STAGES + name):
                return await work
        finally:
            stages[name] = stages.get(name, 0) + (time.perf_counter_ns() - started) // 1000


def _check(record: bytes, entry: ImageEntry) -> None:
    """Before anything is kept or shown. Raises `CorruptData`."""
    if hashlib.sha256(record).digest() != entry.record_sha256:
        raise CorruptData(f"what came as the record of {entry.image_id!r} is another")
