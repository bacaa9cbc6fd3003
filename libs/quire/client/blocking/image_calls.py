"""Calls of `Client.images`. Made of `ImageClient` by `make generated`; do not edit."""

from __future__ import annotations

from pathlib import Path

from quire.client.blocking.loop import SyncLoop
from quire.client.images import EncodedImage, Image, ImageClient
from quire.model.durability import Durability
from quire.model.images import NO_ATTRIBUTES, ImageAttributes, ImageEntry, Rendering
from quire.model.latents import LatentInfo, Values
from quire.model.nodes import KnownVae


class ImageCalls:
    """Methods as in `ImageClient`, blocking; safe from any thread."""

    def __init__(self, loop: SyncLoop, images: ImageClient) -> None:
        self._loop = loop
        self._images = images

    def put(
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
        return self._loop.run(
            self._images.put(
                image_id,
                values,
                info,
                durability=durability,
                attributes=attributes,
                allow_unknown_vae=allow_unknown_vae,
            )
        )

    def put_record(
        self,
        image_id: str,
        record: bytes,
        *,
        durability: Durability | str = Durability.LOCAL,
        attributes: ImageAttributes = NO_ATTRIBUTES,
        allow_unknown_vae: bool = False,
    ) -> ImageEntry:
        """Store a record unchanged. Raises as `put`."""
        return self._loop.run(
            self._images.put_record(
                image_id, record, durability=durability, attributes=attributes, allow_unknown_vae=allow_unknown_vae
            )
        )

    def put_picture(
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
        return self._loop.run(
            self._images.put_picture(
                image_id,
                picture,
                weights_sha256=weights_sha256,
                background=background,
                durability=durability,
                attributes=attributes,
            )
        )

    def vaes(self) -> list[KnownVae]:
        """Return the VAEs of the cluster's decoders, by name."""
        return self._loop.run(self._images.vaes())

    def get(self, image_id: str, rendering: Rendering | str | None = None, *, if_none_match: str = "") -> Image:
        """An image, decoded and encoded as asked. A decoder that does not answer is passed over once.

        `rendering`: or its format alone, as "webp"; None for a PNG.

        Raises `ImageMissing`, `NoDecoder`, `VaeUnknown`, `CorruptData`, …
        """
        return self._loop.run(self._images.get(image_id, rendering, if_none_match=if_none_match))

    def etag(self, image_id: str, rendering: Rendering | str | None = None) -> tuple[ImageEntry, str]:
        """Return the metadata of an image and its ETag, without decoding."""
        return self._loop.run(self._images.etag(image_id, rendering))

    def get_record(self, image_id: str) -> bytes:
        """Return the stored latent record. Raises `ImageMissing`, `ChunkMissing`."""
        return self._loop.run(self._images.get_record(image_id))

    def get_record_of(self, entry: ImageEntry) -> bytes:
        """Read the record of this entry.

        Raises `ChunkMissing` or `TargetInvalid` if the image was replaced since, `CorruptData` for other bytes.
        """
        return self._loop.run(self._images.get_record_of(entry))

    def get_latent(self, image_id: str) -> tuple[Values, LatentInfo]:
        """Return the stored latent, bit for bit."""
        return self._loop.run(self._images.get_latent(image_id))

    def head(self, image_id: str) -> ImageEntry:
        """Return an image's metadata. Raises `ImageMissing`."""
        return self._loop.run(self._images.head(image_id))

    def delete(self, image_id: str) -> bool:
        """Delete an image; whether there was one."""
        return self._loop.run(self._images.delete(image_id))
