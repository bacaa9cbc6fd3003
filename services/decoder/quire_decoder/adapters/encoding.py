"""Pixels to formats and back, by imagecodecs."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import imagecodecs
import numpy as np

from quire.model.errors import CorruptData, InvalidRequest, NotImplementedHere
from quire.model.images import Rendering
from quire_decoder.ports import Pixels

_QUALITY = 90
_PNG_LEVEL = 3


class ImagecodecsEncoder:
    """The `PixelEncoder` port."""

    @property
    def build(self) -> str:
        return f"imagecodecs {version('imagecodecs')}"

    def encode(self, pixels: Pixels, rendering: Rendering) -> bytes:
        """Raises `NotImplementedHere` for a format that this build of imagecodecs cannot write."""
        if rendering.width and rendering.width != pixels.shape[1]:
            height = max(1, round(pixels.shape[0] * rendering.width / pixels.shape[1]))
            pixels = _resized(pixels, height, rendering.width)
        pixels = np.ascontiguousarray(pixels)
        quality = rendering.quality or _QUALITY
        options: dict[str, dict[str, Any]] = {
            "png": {"level": _PNG_LEVEL},
            "webp": {"lossless": True} if not rendering.quality else {"level": quality, "lossless": False},
            "jpeg": {"level": quality},
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


def _resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Smooth, without aliasing."""
    import torch  # slow to load, and seldom needed here

    tensor = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None].float()
    scaled = torch.nn.functional.interpolate(tensor, (height, width), mode="bicubic", antialias=True)
    return np.asarray(scaled[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).numpy())
