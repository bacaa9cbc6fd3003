"""Pictures as files to pixels, by Pillow: sRGB with 8 bits a channel, upright, opaque."""

from __future__ import annotations

from io import BytesIO
from typing import Final

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from quire.model.errors import InvalidRequest, MediaUnsupported, PictureTooLarge, QuireError
from quire.model.pictures import READ_FORMATS
from quire_decoder.ports import Picture, Pixels

_SIXTEEN_BITS: Final = ("I;16", "I;16L", "I;16B", "I;16N")
_PROFILED: Final = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK"}
"""The colour space of a profile for pixels of a mode."""


def read_picture(file: bytes, pixels_max: int, background: tuple[int, int, int] = (0, 0, 0)) -> Picture:
    """Read the first frame of a picture.

    Samples of 16 bits are rounded to 8, colours converted from the file's profile to sRGB, transparent pixels composed
    on `background` (R, G, B). Blocks. The size is known before anything is decompressed.

    Raises:
        MediaUnsupported: No format of `READ_FORMATS`.
        PictureTooLarge: More than `pixels_max` pixels.
        InvalidRequest: A damaged file, or samples or a profile without a defined conversion.
    """
    try:
        with Image.open(BytesIO(file), formats=[name.upper() for name in READ_FORMATS]) as image:
            width, height = image.size
            if width * height > pixels_max:
                raise PictureTooLarge(f"{height} × {width}, {pixels_max} pixels at most", field="body")
            frames = getattr(image, "n_frames", 1)
            image.seek(0)
            return Picture(_pixels(ImageOps.exif_transpose(image), background), frames)
    except Image.DecompressionBombError:
        raise PictureTooLarge(f"more than {pixels_max} pixels", field="body") from None
    except UnidentifiedImageError:
        raise MediaUnsupported(f"the body is none of {', '.join(READ_FORMATS)}", field="body") from None
    except QuireError:
        raise
    except Exception as error:  # whatever a reader of Pillow's raises for a damaged file
        raise InvalidRequest(f"a damaged picture: {error!s:.200}", field="body") from None


def _pixels(image: Image.Image, background: tuple[int, int, int]) -> Pixels:
    profile = image.info.get("icc_profile")
    image, alpha = _opaque(_eight_bits(image))
    colours = np.asarray(_in_srgb(image, profile), dtype=np.uint8)
    if alpha is None:
        return colours
    share = np.asarray(alpha, dtype=np.float32)[..., None] / 255
    return np.rint(colours * share + np.array(background, np.float32) * (1 - share)).astype(np.uint8)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale samples of 16 bits. Raises `InvalidRequest` for larger ones, whose range no format defines."""
    if image.mode not in ("I", "F", *_SIXTEEN_BITS):
        return image
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):  # grey PNG was "I" before Pillow 10.3
        raise InvalidRequest("its samples have 32 bits; 16 at most", field="body")
    samples = np.asarray(image).astype(np.uint32)
    grey = Image.fromarray(((samples * 255 + 32767) // 65535).astype(np.uint8))
    if (clear := image.info.get("transparency")) is None:
        return grey
    return Image.merge("LA", (grey, Image.fromarray(np.where(samples == clear, 0, 255).astype(np.uint8))))


def _opaque(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the colours alone, and the share of each pixel that covers the background."""
    grey = image.mode in ("1", "L", "LA")
    alpha = None
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
        image = image.convert("RGB")
    if grey:
        return image.convert("L"), alpha
    return (image if image.mode in _PROFILED else image.convert("RGB")), alpha


def _in_srgb(image: Image.Image, icc_profile: bytes | None) -> Image.Image:
    """Convert colours by the file's profile. Raises `InvalidRequest` for one that is not of them."""
    if not icc_profile:
        return image.convert("RGB")
    try:
        profile = ImageCms.ImageCmsProfile(BytesIO(icc_profile))
        space = profile.profile.xcolor_space.strip()
        if image.mode == "L" and space == "RGB":  # grey pictures often keep the profile of those that they were made of
            image = image.convert("RGB")
        if _PROFILED[image.mode] != space:
            raise InvalidRequest(f"its colour profile is of {space}, its pixels are {image.mode}", field="body")
        converted = ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError) as error:
        raise InvalidRequest(f"its colour profile cannot be used: {error!s:.200}", field="body") from None
    assert converted is not None, "it is not in place"
    return converted
