"""Images through the SDK: latents in, encoded images out; bytes by UCX between this process and the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from quire.client.client import AsyncClient
from quire.client.memory.buffers import Buffer
from quire.client.memory.quarantine import may_be_in_use
from quire.model.durability import Durability
from quire.model.errors import (
    ChunkMissing,
    DeadlineExceeded,
    InvalidRequest,
    TargetInvalid,
    Unavailable,
)
from quire.model.images import (
    NO_ATTRIBUTES,
    RECORD_BYTES_MAX,
    ImageAttributes,
    ImageEntry,
    Rendering,
    check_image_id,
    check_record,
)
from quire.model.latents import LatentInfo, Values, decode_record, encode_record
from quire.model.nodes import DecoderInfo, KnownVae
from quire.telemetry import names, tracer
from quire.wire import convert, convert_images
from quire.wire.channels import call
from quire.wire.v1 import images_pb2 as pb

_PAGE: Final = 500
_RGB_MAX: Final = 0xFFFFFF
_SEEN_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image. `data` is empty where the ETag that was given is still good.

    `source`: rendition, image, latent or miss, by the cache of the decoder `decoder`, or joined to another's request;
    times by stage in microseconds.
    """

    entry: ImageEntry
    data: bytes
    etag: str
    source: str
    decoder: str
    stages_us: dict[str, int]

    def save(self, path: str | Path) -> None:
        """Write the file. Raises `OSError`, `InvalidRequest` where there are no bytes as the ETag was still good."""
        if not self.data:
            raise InvalidRequest("there are no bytes: the version that you have is still good", field="data")
        Path(path).write_bytes(self.data)


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A picture that was stored as a latent.

    `psnr_db`: of the latent's image against the picture, infinite where they are equal; `error_max`: the largest
    difference of a channel, of 255. `first_of_several`: the picture has more frames than the one that is stored.
    """

    entry: ImageEntry
    psnr_db: float
    error_max: int
    first_of_several: bool


class ImageClient:
    """Image calls of a `AsyncClient`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        # How large images are, so that memory for one can be had before the request. An old size shows as too
        # small a buffer.
        self._seen: OrderedDict[str, ImageEntry] = OrderedDict()

    async def put(
        self,
        image_id: str,
        values: Values,
        info: LatentInfo,
        *,
        durability: Durability | str = Durability.LOCAL,
        attributes: ImageAttributes = NO_ATTRIBUTES,
        allow_unknown_vae: bool = False,
    ) -> ImageEntry:
        """Store a latent; an image of that id is replaced. `attributes`: metadata, and for how long it stays.

        Raises `InvalidRequest` for one that no VAE of the cluster decodes, unless `allow_unknown_vae`, and `NoDecoder`
        where no decoder has said which it has.
        """
        if not isinstance(values, np.ndarray) or not isinstance(info, LatentInfo):
            raise InvalidRequest(
                f"{type(values).__name__} with {type(info).__name__}; a latent is a numpy array with a LatentInfo. "
                "put_picture takes pictures",
                field="values",
            )
        record = await asyncio.to_thread(encode_record, values, info)
        return await self.put_record(
            image_id, record, durability=durability, attributes=attributes, allow_unknown_vae=allow_unknown_vae
        )

    async def put_record(
        self,
        image_id: str,
        record: bytes,
        *,
        durability: Durability | str = Durability.LOCAL,
        attributes: ImageAttributes = NO_ATTRIBUTES,
        allow_unknown_vae: bool = False,
    ) -> ImageEntry:
        """Store a record unchanged. Raises as `put`."""
        check_image_id(image_id)
        if not isinstance(record, bytes | bytearray | memoryview):
            raise InvalidRequest(f"{type(record).__name__}; the bytes of a record are wanted", field="record")
        if not 0 < len(record) <= RECORD_BYTES_MAX:
            raise InvalidRequest(f"{len(record)} bytes, 1 to {RECORD_BYTES_MAX}", field="record")
        await self._client.reach()
        with (
            tracer().start_as_current_span(names.CLIENT_IMAGE, attributes={"quire.image": image_id}),
            self._lent_copy(record) as buffer,
        ):
            request = pb.PutLatentRequest(
                image_id=image_id,
                source=convert.target_to(buffer.target()),
                record_bytes=len(record),
                durability=convert.durability_to(durability),
                allow_unknown_vae=allow_unknown_vae,
                ttl_ms=attributes.ttl_ms,
                metadata=dict(attributes.metadata),
                provenance=attributes.provenance,
            )
            answer = await self._once(self._client.gateway.PutLatent, request, buffer)
        return self._remember(convert_images.image_from(answer.entry))

    async def put_picture(
        self,
        image_id: str,
        picture: str | Path | bytes,
        *,
        weights_sha256: str = "",
        background: int = 0,
        durability: Durability | str = Durability.LOCAL,
        attributes: ImageAttributes = NO_ATTRIBUTES,
    ) -> EncodedImage:
        """Store a picture as the latent that a VAE of the cluster makes of it; an image of that id is replaced.

        Args:
            image_id: Its id.
            picture: The path of a file, or its bytes: PNG, JPEG, WebP, AVIF, TIFF, or a GIF's first frame.
            weights_sha256: Digest of the VAE's weights, in hexadecimal (`vaes`); "" for the cluster's only one.
            background: The colour behind transparent pixels, 0xRRGGBB.
            durability: What the acknowledgement means.
            attributes: Metadata, and for how long it stays.

        Raises:
            InvalidRequest: No such picture, sides that the VAE does not take, or a VAE that the cluster does not have.
            NoDecoder: No decoder with that VAE is alive.
            OSError: The file cannot be read.
        """
        check_image_id(image_id)
        if not isinstance(picture, str | Path | bytes | bytearray | memoryview):
            raise InvalidRequest(f"{type(picture).__name__}; a path, or the bytes of a file", field="picture")
        if isinstance(picture, str | Path):
            data: bytes | memoryview = await asyncio.to_thread(Path(picture).read_bytes)
        else:
            data = memoryview(picture).cast("B")
        if not len(data):
            raise InvalidRequest("no bytes", field="picture")
        if not isinstance(background, int) or not 0 <= background <= _RGB_MAX:
            raise InvalidRequest(f"{background!r}; a colour as 0xRRGGBB", field="background")
        if not isinstance(weights_sha256, str):
            raise InvalidRequest(f"{weights_sha256!r}; a digest in hexadecimal", field="weights_sha256")
        await self._client.reach()
        with (
            tracer().start_as_current_span(names.CLIENT_IMAGE, attributes={"quire.image": image_id}),
            self._lent_copy(data) as buffer,
        ):
            request = pb.PutPictureRequest(
                image_id=image_id,
                source=convert.target_to(buffer.target()),
                picture_bytes=len(data),
                weights_sha256=weights_sha256,
                background_rgb=background,
                ttl_ms=attributes.ttl_ms,
                metadata=dict(attributes.metadata),
                provenance=attributes.provenance,
                durability=convert.durability_to(durability),
            )
            answer = await self._once(self._client.gateway.PutPicture, request, buffer)
        entry = self._remember(convert_images.image_from(answer.entry))
        return EncodedImage(entry, answer.psnr_db, answer.error_max, answer.first_of_several)

    async def vaes(self) -> list[KnownVae]:
        """Return the VAEs of the cluster's decoders, by name."""
        members = await self._client.status()
        vaes = {
            vae.weights_sha256: vae
            for node in members
            if isinstance(node.about, DecoderInfo)
            for vae in node.about.vaes
        }
        return sorted(vaes.values(), key=lambda vae: (vae.name, vae.weights_sha256))

    async def get(self, image_id: str, rendering: Rendering | str | None = None, *, if_none_match: str = "") -> Image:
        """An image, decoded and encoded as asked. A decoder that does not answer is passed over once.

        `rendering`: or its format alone, as "webp"; None for a PNG.

        Raises `ImageMissing`, `NoDecoder`, `VaeUnknown`, `CorruptData`, …
        """
        requested = _rendering(rendering)
        entry = self._seen.get(image_id) or await self.head(image_id)
        try:
            return await self._get(entry, requested, if_none_match)
        except (Unavailable, DeadlineExceeded):
            return await self._get(entry, requested, if_none_match)
        except (ChunkMissing, TargetInvalid):
            current = await self.head(image_id)
            if current == entry:
                raise
            return await self._get(current, requested, if_none_match)  # it was replaced meanwhile

    async def etag(self, image_id: str, rendering: Rendering | str | None = None) -> tuple[ImageEntry, str]:
        """Return the metadata of an image and its ETag, without decoding."""
        request = pb.GetImageRequest(
            image_id=image_id, rendering=convert_images.rendering_to(_rendering(rendering)), if_none_match="*"
        )
        answer = await self._once(self._client.gateway.GetImage, request)
        return convert_images.image_from(answer.entry), answer.etag

    async def _get(self, entry: ImageEntry, requested: Rendering, if_none_match: str) -> Image:
        """Try once, with memory for this try alone."""
        image_id = entry.image_id
        await self._client.reach()
        with (
            tracer().start_as_current_span(names.CLIENT_IMAGE, attributes={"quire.image": image_id}),
            self._lent(requested.bytes_max(entry)) as buffer,
        ):
            request = pb.GetImageRequest(
                image_id=image_id,
                rendering=convert_images.rendering_to(requested),
                target=convert.target_to(buffer.target()),
                if_none_match=if_none_match,
            )
            answer: Any = await self._once(self._client.gateway.GetImage, request, buffer)
            assert buffer.view is not None, "host memory"
            data = buffer.view[: answer.length].tobytes()
        entry = self._remember(convert_images.image_from(answer.entry))
        return Image(entry, data, answer.etag, answer.source, answer.decoder, dict(answer.stages_us))

    async def get_record(self, image_id: str) -> bytes:
        """Return the stored latent record. Raises `ImageMissing`, `ChunkMissing`."""
        entry = self._seen.get(image_id) or await self.head(image_id)
        try:
            return await self.get_record_of(entry)
        except (ChunkMissing, TargetInvalid):
            current = await self.head(image_id)
            if current == entry:
                raise
            return await self.get_record_of(current)  # it was replaced meanwhile

    async def get_record_of(self, entry: ImageEntry) -> bytes:
        """Read the record of this entry.

        Raises `ChunkMissing` or `TargetInvalid` if the image was replaced since, `CorruptData` for other bytes.
        """
        await self._client.reach()
        with self._lent(entry.namespace.layout.chunk_bytes) as buffer:
            request = pb.GetLatentRequest(image_id=entry.image_id, target=convert.target_to(buffer.target()))
            answer = await self._once(self._client.gateway.GetLatent, request, buffer)
            current = self._remember(convert_images.image_from(answer.entry))
            if current.record_sha256 != entry.record_sha256:
                raise ChunkMissing(f"{entry.image_id!r} was replaced during the request", field="id")
            assert buffer.view is not None, "host memory"
            record = buffer.view[: current.record_bytes].tobytes()
        await asyncio.to_thread(check_record, record, entry)
        return record

    async def get_latent(self, image_id: str) -> tuple[Values, LatentInfo]:
        """Return the stored latent, bit for bit."""
        return await asyncio.to_thread(decode_record, await self.get_record(image_id))

    async def head(self, image_id: str) -> ImageEntry:
        """Return an image's metadata. Raises `ImageMissing`."""
        check_image_id(image_id)
        answer = await call(
            self._client.gateway.HeadImage, pb.HeadImageRequest(image_id=image_id), timeout_s=self._client.timeout_s
        )
        return self._remember(convert_images.image_from(answer.entry))

    async def delete(self, image_id: str) -> bool:
        """Delete an image; whether there was one."""
        check_image_id(image_id)
        answer = await self._once(self._client.gateway.DeleteImage, pb.DeleteImageRequest(image_id=image_id))
        return bool(answer.deleted)

    async def list(self, prefix: str = "", after: str = "") -> AsyncIterator[ImageEntry]:
        """Yield the images whose ids begin with `prefix` and come after `after`, in order."""
        while True:
            request = pb.ListImagesRequest(prefix=prefix, after=after, limit=_PAGE)
            page = await call(self._client.gateway.ListImages, request, timeout_s=self._client.timeout_s)
            for entry in page.entries:
                yield convert_images.image_from(entry)
            after = page.next_after
            if not after:
                return

    async def _once(self, method: Any, request: Any, buffer: Buffer | None = None) -> Any:
        """A request that names memory, or whose second answer would be another.

        `buffer`: that memory. If the request ends so that a peer may still use it, it is quarantined.
        """
        try:
            return await call(method, request, timeout_s=self._client.timeout_s, again=False)
        except BaseException as error:
            if buffer is not None and may_be_in_use(error):
                self._client.quarantine.add(buffer)
            raise

    def _remember(self, entry: ImageEntry) -> ImageEntry:
        self._seen[entry.image_id] = entry
        self._seen.move_to_end(entry.image_id)
        if len(self._seen) > _SEEN_MAX:
            self._seen.popitem(last=False)
        return entry

    @contextlib.contextmanager
    def _lent_copy(self, data: bytes | bytearray | memoryview) -> Iterator[Buffer]:
        """Memory for one request, which begins with a copy of `data`."""
        with self._lent(len(data)) as buffer:
            assert buffer.view is not None, "host memory"
            memoryview(buffer.view.data)[: len(data)] = data
            yield buffer

    @contextlib.contextmanager
    def _lent(self, length: int) -> Iterator[Buffer]:
        """Memory for one request, which names it by `_once`."""
        self._client.quarantine.check()
        buffer = self._client.allocate(length)
        try:
            yield buffer
        finally:
            if buffer not in self._client.quarantine.buffers:
                buffer.close()


def _rendering(rendering: Rendering | str | None) -> Rendering:
    """Return how an image is wanted. Raises `InvalidRequest`."""
    if isinstance(rendering, str):
        return Rendering(rendering)
    if not isinstance(rendering, Rendering | None):
        raise InvalidRequest(f"{rendering!r}; a Rendering, or a format as 'webp', is wanted", field="rendering")
    return rendering or Rendering()
