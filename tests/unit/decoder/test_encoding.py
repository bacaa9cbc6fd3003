"""What decoders write: formats as they are asked for, and nothing besides the picture."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from quire.model.fitting import Fit, Gravity
from quire.model.images import Rendering
from quire_decoder.adapters.encoding import ImagecodecsEncoder
from quire_decoder.ports import Pixels


def _picture(height: int = 96, width: int = 64) -> Pixels:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack((rows * 2 % 256, columns * 3 % 256, (rows + columns) % 256), axis=-1).astype(np.uint8)


@pytest.mark.parametrize("format_name", ["jpeg", "png", "webp", "avif"])
def test_no_metadata_is_written(format_name: str) -> None:
    rendering = Rendering(format_name, 80 if format_name in ("jpeg", "avif") else 0)
    data = ImagecodecsEncoder().encode(_picture(), rendering)
    with Image.open(BytesIO(data)) as image:
        assert (image.format, image.size) == (rendering.format.upper(), (64, 96))
        assert not image.getexif() and "icc_profile" not in image.info and "xmp" not in image.info
        assert np.abs(np.asarray(image.convert("RGB")).astype(int) - _picture()).mean() < 8


def test_jpegs_are_progressive() -> None:
    with Image.open(BytesIO(ImagecodecsEncoder().encode(_picture(), Rendering("jpeg", 80)))) as image:
        assert image.info.get("progressive")


def test_quality_is_what_it_says() -> None:
    sizes = [len(ImagecodecsEncoder().encode(_picture(), Rendering("jpeg", quality))) for quality in (10, 50, 95)]
    assert sizes == sorted(sizes) and sizes[0] < 0.7 * sizes[2]


def test_a_crop_keeps_what_it_is_told() -> None:
    """The top of a picture whose rows grow brighter."""
    wanted = Rendering("png", width=64, height=48, fit=Fit.COVER, gravity=Gravity.NORTH)
    encoder = ImagecodecsEncoder()
    assert np.array_equal(encoder.decode_lossless(encoder.encode(_picture(), wanted)), _picture()[:48])
