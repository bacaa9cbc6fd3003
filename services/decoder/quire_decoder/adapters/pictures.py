"""Pictures as files to pixels, by Pillow: of formats that pictures are put in."""

from __future__ import annotations

from io import BytesIO
from typing import Final

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from quire.model.errors import InvalidRequest
from quire_decoder.ports import Pixels

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "AVIF")


def read_picture(file: bytes, pixels_max: int) -> Pixels:
    """Read a picture: RGB, upright, the first frame; transparent pixels are black. Blocks. Raises `InvalidRequest`.

    The size is known before anything is decompressed.
    """
    try:
        with Image.open(BytesIO(file), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > pixels_max:
                raise InvalidRequest(f"{height} × {width}, {pixels_max} pixels at most", field="body")
            return np.array(ImageOps.exif_transpose(image).convert("RGB"), dtype=np.uint8)
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise InvalidRequest(f"not one of {', '.join(_FORMATS)}", field="body") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise InvalidRequest(f"a damaged picture: {error}", field="body") from None
