"""Encoding of pictures to latents, by a VAE's encoder; and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.model.errors import InvalidRequest, VaeUnknown
from quire.model.latents import LatentInfo, Normalisation, Vae, denormalised, encode_record
from quire.model.nodes import KnownVae
from quire_decoder.core.precision import error_of
from quire_decoder.pipeline import Pipeline
from quire_decoder.ports import Picture

ReadPicture = Callable[[bytes, int, tuple[int, int, int]], Picture]
"""Reads a file of at most so many pixels, on a background; see `adapters.pictures`."""


@dataclass(frozen=True, slots=True)
class EncodedLatent:
    """A record, and the difference of its image from the picture.

    PSNR in dB, infinite for equal ones, and the largest difference of a channel's value, of 255. `first_of_several`:
    the picture has more frames than the one in the record.
    """

    record: bytes
    psnr_db: float
    error_max: int
    first_of_several: bool


class PictureEncoder:
    """`vaes`: returns those that can be decoded with."""

    def __init__(
        self, pipeline: Pipeline, read_picture: ReadPicture, vaes: Callable[[], tuple[KnownVae, ...]], pixels_max: int
    ) -> None:
        self._pipeline = pipeline
        self._read = read_picture
        self._known = vaes
        self._pixels_max = pixels_max

    async def encode(self, file: bytes, weights_sha256: str, background: tuple[int, int, int]) -> EncodedLatent:
        """Encode by the VAE with those weights. `background`: R, G, B behind transparent pixels.

        Raises `InvalidRequest`, `MediaUnsupported`, `PictureTooLarge`, `VaeUnknown`, `DeviceFull`,
        `NotImplementedHere`.
        """
        vae = next((vae for vae in self._known() if vae.weights_sha256 == weights_sha256), None)
        if vae is None:
            raise VaeUnknown(f"no VAE with weights {weights_sha256[:16]}… is here", field="weights_sha256")
        picture = await self._pipeline.in_thread(self._read, file, self._pixels_max, background)
        height, width = picture.pixels.shape[:2]
        if height % vae.scale or width % vae.scale:
            message = f"{height} × {width}: {vae.name} takes multiples of {vae.scale}; crop it"
            raise InvalidRequest(message, field="body")
        values = await self._pipeline.devices.encode(picture.pixels, weights_sha256)
        stored = values.astype(np.float16)
        about = Vae(vae.name, "", weights_sha256)
        info = LatentInfo(values.shape, "float16", about, height, width, Normalisation(undone=True))
        record = await self._pipeline.in_thread(encode_record, stored, info)
        back = await self._pipeline.devices.decode(denormalised(stored, info), info)
        error = await self._pipeline.in_thread(error_of, picture.pixels, back.pixels)
        return EncodedLatent(record, error.psnr_db, error.error_max, picture.is_first_of_several)
