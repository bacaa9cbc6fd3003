"""The decoder: requests for images, answered from the cache, by a decode of its own, or for another decoder's cache.

Requests for an image that is being decoded wait for that decode. A frontend first asks the image's owner for a cached
form (`serve_cached`), and has it decoded, there or elsewhere, if that is not enough (`serve`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from quire.model.descriptor import RdmaTarget
from quire.model.errors import InvalidRequest, QuireError, TooManyRequests
from quire.model.images import ImageEntry, LeasedRecord, Rendering
from quire.model.nodes import DecoderInfo
from quire.telemetry import logger, names, tracer
from quire_decoder.cache import Cache
from quire_decoder.config import DecoderConfig
from quire_decoder.core.form_cache import Form
from quire_decoder.device import Picture
from quire_decoder.lossless_writer import LosslessWriter
from quire_decoder.pictures import EncodedLatent, PictureEncoder, ReadPicture
from quire_decoder.pipeline import LOSSLESS, Pipeline, Stages, timed
from quire_decoder.ports import (
    CachedForm,
    CacheOwner,
    Clock,
    EncoderProcess,
    PeerMemoryPort,
    PixelEncoder,
    ProvenanceSigner,
    RecordSource,
    VaeRunner,
)

_NOT_LEASED = LeasedRecord()
PICTURE_BYTES_MAX: Final = 256 << 20


@dataclass(slots=True)
class Served:
    """An encoded image, where it was found, the build that made it, and microseconds by stage."""

    image: bytes
    source: str
    build: str
    stages_us: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Made:
    """A decode: the pixels, and where the latent was found."""

    picture: Picture
    source: str


@dataclass(slots=True)
class _Kept:
    """A lossless image out of a cache, and the build that made it."""

    image: bytes
    build: str


@dataclass(slots=True, eq=False)
class _Running:
    """A decode, and the number of its waiters.

    `ends_early`: with the last of them; else another's cache receives it.
    """

    task: asyncio.Task[_Made | _Kept]
    ends_early: bool
    waiters: int = 0


class Decoder:
    """Every public method is one request."""

    def __init__(
        self,
        *,
        config: DecoderConfig,
        records: RecordSource,
        vaes: Sequence[VaeRunner],
        encoder: PixelEncoder,
        make_encoder_process: Callable[[], EncoderProcess],
        read_picture: ReadPicture,
        remote_memory: PeerMemoryPort,
        owners: CacheOwner,
        clock: Clock,
        signer: ProvenanceSigner | None = None,
    ) -> None:
        self._config = config
        self._signer = signer
        self._remote_memory = remote_memory
        self._owners = owners
        self._encoder = encoder
        self._cache = Cache(config)
        self._cached_build = ""
        self._pipeline = Pipeline(
            config=config,
            records=records,
            vaes=vaes,
            encoder=encoder,
            make_encoder_process=make_encoder_process,
            clock=clock,
            costs=self._cache.costs,
        )
        self._running: dict[bytes, _Running] = {}
        self._pictures = PictureEncoder(
            self._pipeline, read_picture, lambda: self._pipeline.devices.known, config.pixels_max
        )
        self._keeping = LosslessWriter(self._pipeline, self._keep_image)
        self._joined = self._fetched = 0

    @property
    def build(self) -> str:
        """Build of images that are decoded now. Images of one build are equal, but for the bytes of signatures."""
        return self._build_with(self._pipeline.devices.build)

    @property
    def info(self) -> DecoderInfo:
        """The facts that others decide by."""
        return DecoderInfo(
            build=self.build,
            capacity_bytes=self._cache.capacity_bytes,
            used_bytes=self._cache.used_bytes,
            vaes=self._pipeline.devices.known,
            signer=self._signer.name if self._signer is not None else "",
            queued=self._pipeline.devices.waiting,
            devices=self._pipeline.devices.count,
        )

    @property
    def stats(self) -> dict[str, float]:
        """Figures for `quire status`."""
        devices = self._pipeline.devices
        queues = {"queue": devices.waiting, "queue.encode": self._pipeline.encoding, "devices": devices.count}
        counts = {"joined": self._joined, "batches": devices.batches, "misses": self._fetched}
        return self._cache.stats | queues | counts

    def close(self) -> None:
        self._keeping.close()
        self._pipeline.close()

    async def serve(
        self,
        entry: ImageEntry,
        rendering: Rendering,
        owner_address: str = "",
        leased: LeasedRecord = _NOT_LEASED,
        tenant: str = "",
    ) -> Served:
        """An image, encoded as asked. `owner_address`: of the decoder whose cache it belongs to, if not this one's.

        `leased`: where its record can be fetched from, if no cache has it. `tenant`: the caller's; the device and the
        encoders serve tenants in turn. A cancelled request releases the device and the encoder, unless other requests
        wait for the same image.

        Raises `InvalidRequest`, `VaeUnknown`, `DeviceFull`, `ChunkMissing`, `CorruptData`.
        """
        self._check(entry, rendering)
        served = await self._serve(entry, rendering, owner_address, leased, tenant)
        return await self._signed(entry, rendering, served)

    async def serve_cached(self, entry: ImageEntry, rendering: Rendering, tenant: str = "") -> Served | None:
        """Answer a request for an image of this decoder's, if that needs no decoding.

        Every request counts, also those that are decoded elsewhere then: the choice of kept forms depends on it.
        """
        self._check(entry, rendering)
        form, data = self._current_cache.look_up(entry, rendering.variant(entry))
        if data is None or form is Form.LATENT:
            return None
        with tracer().start_as_current_span(names.DECODER_SERVE):
            served = await self._from_cache(entry, rendering, form, data, {}, tenant)
            return await self._signed(entry, rendering, served)

    async def encode_latent(
        self, source: RdmaTarget, length: int, weights_sha256: str, background: tuple[int, int, int]
    ) -> EncodedLatent:
        """Encode a picture in the caller's memory. Raises what `PictureEncoder.encode` raises."""
        file = await self._pull((source, length), PICTURE_BYTES_MAX)
        return await self._pictures.encode(file, weights_sha256, background)

    async def read_cached(self, entry: ImageEntry, target: RdmaTarget) -> CachedForm | None:
        """Send this cache's form of an image that is being made elsewhere."""
        form, data = self._current_cache.find(entry, "")
        if data is None:
            return None
        build = self.build
        await self._remote_memory.push(data, target)
        kind = "image" if form is Form.IMAGE else "promote" if self._cache.wants_image(entry) else "latent"
        return CachedForm(kind, len(data), build)

    async def write_back(
        self,
        entry: ImageEntry,
        record: tuple[RdmaTarget, int] | None,
        image: tuple[RdmaTarget, int] | None,
        *,
        build: str = "",
        stored: bool = False,
    ) -> None:
        """Take an image for this cache that another decoder made, or that was `stored` just now.

        `build`: of the decoder that made it; one of another build than this one's is not kept.

        Raises `CorruptData` for another record than the entry's.
        """
        if record is not None:
            data = await self._pull(record, entry.record_bytes)
            await self._pipeline.check(data, entry)
            if stored:
                self._cache.announce(entry)
            if not stored or self._cache.takes_new:
                self._cache.keep_latent(entry, data)
        if image is not None:
            data = await self._pull(image, LOSSLESS.bytes_max(entry))
            await self._pipeline.check_lossless(data, entry)
            self._keep_own(entry, data, build)

    # ----

    def _check(self, entry: ImageEntry, rendering: Rendering) -> None:
        if (pixels := rendering.pixels(entry)) > self._config.pixels_max:
            raise InvalidRequest(f"{pixels} pixels, {self._config.pixels_max} at most", field="width, height")

    async def _serve(
        self, entry: ImageEntry, rendering: Rendering, owner_address: str, leased: LeasedRecord, tenant: str
    ) -> Served:
        stages: Stages = {}
        with tracer().start_as_current_span(names.DECODER_SERVE) as span:
            if not owner_address:
                form, data = self._current_cache.find(entry, rendering.variant(entry))
                if data is not None and form is not Form.LATENT:
                    return await self._from_cache(entry, rendering, form, data, stages, tenant)
            result = await self._find(entry, owner_address, leased, stages, tenant)
            source = "image" if isinstance(result, _Kept) else result.source
            span.set_attribute("quire.source", source)
            if isinstance(result, _Kept):
                image = await self._rendered(entry, rendering, result.image, stages, tenant)
                return Served(image, source, result.build, stages)
            build = self._build_with(result.picture.build)
            lossless: bytes | None = None
            if rendering.is_original(entry):
                lossless = await timed(stages, "keep", self._keeping.image(entry))
            image = lossless or await self._pipeline.encode(
                result.picture.pixels, rendering, stages, entry=entry, tenant=tenant
            )
            if not owner_address and not rendering.is_original(entry) and build == self.build:
                self._current_cache.keep_rendition(entry, rendering.variant(entry), image)
        return Served(image, result.source, build, stages)

    async def _signed(self, entry: ImageEntry, rendering: Rendering, served: Served) -> Served:
        """Sign the image with the manifest of its provenance, if it has one. Cached forms are not signed."""
        if not entry.provenance:
            return served
        if self._signer is None:
            logger().warning("an image with provenance is served without: this decoder signs nothing")
            return served
        signing = self._signer.sign(served.image, rendering, entry)
        return replace(served, image=await timed(served.stages_us, "sign", signing))

    async def _from_cache(
        self,
        entry: ImageEntry,
        rendering: Rendering,
        form: Form | None,
        data: bytes,
        stages: Stages,
        tenant: str,
    ) -> Served:
        """`data`: the rendition, or the lossless image."""
        build = self.build
        if form is Form.RENDITION:
            return Served(data, "rendition", build, stages)
        image = await self._rendered(entry, rendering, data, stages, tenant)
        if not rendering.is_original(entry) and build == self.build:
            self._current_cache.keep_rendition(entry, rendering.variant(entry), image)
        return Served(image, "image", build, stages)

    async def _rendered(
        self, entry: ImageEntry, rendering: Rendering, lossless: bytes, stages: Stages, tenant: str
    ) -> bytes:
        if rendering.is_original(entry):
            return lossless
        return await self._pipeline.encode(lossless, rendering, stages, entry=entry, tenant=tenant)

    async def _find(
        self, entry: ImageEntry, owner_address: str, leased: LeasedRecord, stages: Stages, tenant: str
    ) -> _Made | _Kept:
        """A decode, own or joined; or the lossless image as the owner's cache has it."""
        if (picture := self._keeping.picture(entry)) is not None:
            self._joined += 1
            return _Made(picture, "joined")
        key = entry.record_name
        is_running = (running := self._running.get(key)) is not None
        if running is None:
            if len(self._running) >= self._config.requests_max:
                raise TooManyRequests(f"{len(self._running)} decodes are running; retry later")
            if owner_address:
                making = self._make_for(entry, owner_address, leased, stages, tenant)
            else:
                making = self._make(entry, leased, stages, tenant)
            # A task of its own: a client that disconnects does not end it for those that have joined.
            task = asyncio.create_task(making)
            running = self._running[key] = _Running(task, ends_early=not owner_address)
            task.add_done_callback(partial(self._ended, key, running))
        self._joined += is_running
        running.waiters += 1
        try:
            rendition = await timed(stages, "joined" if is_running else "make", asyncio.shield(running.task))
        finally:
            running.waiters -= 1
            if not running.waiters and running.ends_early and not running.task.done():
                self._forget(key, running)  # who comes now begins anew
                running.task.cancel()
        return replace(rendition, source="joined") if is_running and isinstance(rendition, _Made) else rendition

    def _ended(self, key: bytes, running: _Running, task: asyncio.Task[_Made | _Kept]) -> None:
        self._forget(key, running)
        if not task.cancelled():
            task.exception()  # seen: it need not be awaited

    def _forget(self, key: bytes, running: _Running) -> None:
        if self._running.get(key) is running:
            del self._running[key]

    async def _make(self, entry: ImageEntry, leased: LeasedRecord, stages: Stages, tenant: str) -> _Made | _Kept:
        """Decode for this cache, of its latent or of the record from storage; or take the image, if it has it."""
        form, record = self._current_cache.find(entry, "")
        if form is Form.IMAGE and record is not None:
            return _Kept(record, self.build)
        source = "latent"
        if record is None:
            source = "miss"
            record = await self._fetch(entry, leased, stages, tenant)
            self._cache.keep_latent(entry, record)
        picture = await self._pipeline.decode(entry, record, stages, tenant)
        if self._cache.wants_image(entry):
            self._keeping.begin(entry, picture, "", tenant)
        return _Made(picture, source)

    async def _fetch(self, entry: ImageEntry, leased: LeasedRecord, stages: Stages, tenant: str) -> bytes:
        self._fetched += 1
        return await self._pipeline.fetch(entry, leased, stages, tenant)

    async def _make_for(
        self, entry: ImageEntry, owner_address: str, leased: LeasedRecord, stages: Stages, tenant: str
    ) -> _Made | _Kept:
        """Decode for another's cache: of the owner's latent if it has one, and notify its cache."""
        kind, record = await self._ask_owner(entry, owner_address, stages)
        if kind == "image" and record is not None:
            return _Kept(record, self.build)
        fetched = record is None
        record = record if record is not None else await self._fetch(entry, leased, stages, tenant)
        picture = await self._pipeline.decode(entry, record, stages, tenant)
        if kind == "promote":
            self._keeping.begin(entry, picture, owner_address, tenant)
        if fetched:
            await timed(stages, "owner", self._tell_owner(entry, owner_address, record, None))
        return _Made(picture, "latent" if kind else "miss")

    async def _keep_image(self, entry: ImageEntry, image: bytes, device_build: str, owner_address: str) -> None:
        build = self._build_with(device_build)
        if owner_address:
            await self._tell_owner(entry, owner_address, None, image, build)
        else:
            self._keep_own(entry, image, build)

    def _keep_own(self, entry: ImageEntry, image: bytes, build: str) -> None:
        """Keep an image, unless its pixels are not those that are decoded now: an ETag says that they are equal."""
        if build == self.build:
            self._current_cache.keep_image(entry, image)

    @property
    def _current_cache(self) -> Cache:
        """The cache, without pixels of earlier builds."""
        build = self._pipeline.devices.build
        if build != self._cached_build:
            self._cache.forget_pixels()
            self._cached_build = build
        return self._cache

    def _build_with(self, device_build: str) -> str:
        signs = f", signs as {self._signer.name}" if self._signer is not None else ""
        return f"{device_build}, {self._encoder.build}{signs}"

    async def _ask_owner(self, entry: ImageEntry, owner_address: str, stages: Stages) -> tuple[str, bytes | None]:
        """Return the form in the owner's cache: "image", "latent" or "promote" with the bytes, or nothing.

        An image of another build is nothing: it is decoded here.
        """
        length = max(entry.record_bytes, LOSSLESS.bytes_max(entry))
        try:
            with self._remote_memory.room(length) as (target, view):
                form = await timed(stages, "owner", self._owners.read_cached(owner_address, entry, target))
                if form is None or (form.kind == "image" and form.build != self.build):
                    return "", None
                record = bytes(view[: form.length])
            if form.kind != "image":
                await self._pipeline.check(record, entry)
            return form.kind, record
        except QuireError as error:
            logger().warning("the owner's cache does not answer", owner=owner_address, error=str(error))
            return "", None

    async def _tell_owner(
        self, entry: ImageEntry, owner_address: str, record: bytes | None, image: bytes | None, build: str = ""
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
                    build,
                )
        except QuireError as error:
            logger().warning("the owner's cache was not notified", owner=owner_address, error=str(error))

    async def _pull(self, source: tuple[RdmaTarget, int], limit: int) -> bytes:
        target, length = source
        if not 0 < length <= limit:
            raise InvalidRequest(f"{length} bytes, {limit} at most", field="length")
        return await self._remote_memory.pull(target, length)
