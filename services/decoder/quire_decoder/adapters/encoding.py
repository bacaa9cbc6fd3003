"""Pixels to formats and back, by imagecodecs; JPEG by Pillow, which writes progressive ones. No metadata is written."""

from __future__ import annotations

from importlib.metadata import version
from io import BytesIO
from typing import Any, Final

import imagecodecs
import numpy as np
from PIL import Image

from quire.model.errors import CorruptData, InvalidRequest, NotImplementedHere
from quire.model.images import Geometry, Rendering
from quire_decoder.ports import Pixels

_PNG_LEVEL = 3


class ImagecodecsEncoder:
    """The `PixelEncoder` port."""

    build: Final = f"imagecodecs {version('imagecodecs')}, pillow {version('pillow')}"

    def encode(self, pixels: Pixels, rendering: Rendering) -> bytes:
        """Encode pixels. Raises `NotImplementedHere` for a format that this build of imagecodecs cannot write."""
        pixels = np.ascontiguousarray(_shaped(pixels, rendering.geometry(*pixels.shape[:2])))
        quality = rendering.encoded_quality
        if rendering.format == "jpeg":
            return _jpeg(pixels, quality)
        options: dict[str, dict[str, Any]] = {
            "png": {"level": _PNG_LEVEL},
            "webp": {"lossless": True} if not quality else {"level": quality, "lossless": False},
            "avif": {"level": quality, "speed": 8},
        }
        codec = getattr(imagecodecs, f"{rendering.format}_encode")
        try:
            return bytes(codec(pixels, **options[rendering.format]))
        except imagecodecs.DelayedImportError as error:
            raise NotImplementedHere(f"{rendering.format} cannot be written here: {error}", field="format") from None
        except (RuntimeError, ValueError) as error:
            shape = f"{pixels.shape[0]} × {pixels.shape[1]}"
            raise InvalidRequest(f"{rendering.format} cannot hold {shape}: {error}", field="format") from None

    def decode_lossless(self, image: bytes) -> Pixels:
        try:
            return np.asarray(imagecodecs.png_decode(image), dtype=np.uint8)
        except (RuntimeError, ValueError) as error:
            raise CorruptData(f"a cached image does not decode: {error}") from None


def _jpeg(pixels: Pixels, quality: int) -> bytes:
    """Progressive: a browser shows it while it comes."""
    file = BytesIO()
    try:
        Image.fromarray(pixels).save(file, "jpeg", quality=quality, progressive=True)
    except (OSError, ValueError) as error:
        shape = f"{pixels.shape[0]} × {pixels.shape[1]}"
        raise InvalidRequest(f"jpeg cannot hold {shape}: {error}", field="format") from None
    return file.getvalue()


def _shaped(pixels: Pixels, shape: Geometry) -> Pixels:
    if (shape.scaled_height, shape.scaled_width) != pixels.shape[:2]:
        pixels = _resized(pixels, shape.scaled_height, shape.scaled_width)
    return pixels[shape.top : shape.top + shape.height, shape.left : shape.left + shape.width]


def _resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Smooth, without aliasing."""
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
