"""Pictures as files to pixels, by Pillow: sRGB with 8 bits a channel, upright, opaque."""

from __future__ import annotations

from io import BytesIO
from typing import Final

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from quire.model.errors import InvalidRequest, MediaUnsupported, PictureTooLarge, QuireError
from quire.model.pictures import READ_FORMATS, format_of
from quire_decoder.ports import Picture, Pixels

_PROFILED: Final = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK"}
"""The colour space of a profile for pixels of a mode."""
_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
"""Tags of TIFF, and a value of the second."""


def read_picture(file: bytes, pixels_max: int, background: tuple[int, int, int] = (0, 0, 0)) -> Picture:
    """Read the first frame of a picture.

    Samples of 16 bits are reduced to 8, colours converted from the file's ICC profile to sRGB, transparent pixels
    composed on `background` (R, G, B). Blocks. The size is known before anything is decompressed.

    Raises:
        MediaUnsupported: No format of `READ_FORMATS`.
        PictureTooLarge: More than `pixels_max` pixels.
        InvalidRequest: A damaged file, or samples, a profile or transparency without a defined conversion.
    """
    try:
        with Image.open(BytesIO(file), formats=[name.upper() for name in READ_FORMATS]) as image:
            width, height = image.size
            if width * height > pixels_max:
                raise PictureTooLarge(f"{height} × {width}, {pixels_max} pixels at most", field="body")
            depth = _png_depth(file, image)
            covered = image.tile[0][1] if image.format == "GIF" and image.tile else None
            image.load()
            if image.format == "PNG" and image.mode == "L" and "transparency" in image.info:
                image.info["transparency"] *= 255 // ((1 << depth) - 1)  # a sample as it is in the file
            frame = _on_canvas(image, covered) if covered else _eight_bits(image)
            pixels = _pixels(ImageOps.exif_transpose(frame), background)
            return Picture(pixels, is_first_of_several=_has_another(image))
    except Image.DecompressionBombError:
        raise PictureTooLarge(f"more than {pixels_max} pixels", field="body") from None
    except UnidentifiedImageError:
        name = format_of(file)
        if name in READ_FORMATS:
            raise InvalidRequest(f"a damaged {name}, or one with samples that are not read", field="body") from None
        raise MediaUnsupported(f"the body is none of {', '.join(READ_FORMATS)}", field="body") from None
    except QuireError:
        raise
    except Exception as error:  # whatever a reader of Pillow's raises for a damaged file
        raise InvalidRequest(f"a damaged picture: {error!s:.200}", field="body") from None


def _on_canvas(image: Image.Image, covered: tuple[int, int, int, int]) -> Image.Image:
    """Return a GIF's first frame, transparent where the frame does not cover the canvas."""
    if covered == (0, 0, *image.size):
        return image
    frame = image.convert("RGBA")
    alpha = Image.new("L", image.size, 0)
    alpha.paste(frame.getchannel("A").crop(covered), covered)
    frame.putalpha(alpha)
    return frame


def _has_another(image: Image.Image) -> bool:
    """Return whether a frame follows the first one. Counting all would read the whole file."""
    if image.format == "MPO":  # a still picture of a phone, with previews
        return False
    try:
        image.seek(1)
    except Exception:  # there is none, or it is damaged
        return False
    return True


def _png_depth(file: bytes, image: Image.Image) -> int:
    """Return the bits of a PNG's samples, 8 for other formats.

    Raises `InvalidRequest` for a transparent colour of 16 bits, of which Pillow compares 8.
    """
    if image.format != "PNG":
        return 8
    depth, colour_type = file[24], file[25]
    if (depth, colour_type) == (16, 2) and "transparency" in image.info:
        raise InvalidRequest("a transparent colour of 16 bits a channel; use an alpha channel", field="body")
    return depth


def _pixels(image: Image.Image, background: tuple[int, int, int]) -> Pixels:
    profile = image.info.get("icc_profile")
    image, alpha = _opaque(image)
    colours = _in_srgb(image, profile)
    if alpha is not None:
        colours = Image.composite(colours, Image.new("RGB", colours.size, background), alpha)
    return np.array(colours, dtype=np.uint8)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale grey samples of more bits. Raises `InvalidRequest` for signed ones, and those of 32 bits."""
    if image.mode in ("I", "F"):
        raise InvalidRequest("its samples are signed, or have 32 bits; 16 at most", field="body")
    if not image.mode.startswith("I;16"):
        return image
    samples = np.asarray(image).astype(np.uint32)
    white = 65535
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]
        bits = tags.get(_BITS, 16)
        white = (1 << int(bits[0] if isinstance(bits, tuple) else bits)) - 1
        if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
            samples = white - samples
    grey = Image.fromarray(((samples * 255 + white // 2) // white).astype(np.uint8))
    if (clear := image.info.get("transparency")) is not None:
        grey = Image.merge("LA", (grey, Image.fromarray(np.where(samples == clear, 0, 255).astype(np.uint8))))
    grey.info = {name: value for name, value in image.info.items() if name != "transparency"}
    grey.getexif().update(image.getexif())
    return grey


def _opaque(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the colours alone, and the share of each pixel that covers the background."""
    if image.mode == "LA":
        return image.getchannel("L"), image.getchannel("A")
    if image.mode == "1":
        image = image.convert("L")
    alpha = None
    if image.mode in ("PA", "RGBA", "RGBa") or "transparency" in image.info:
        is_grey = image.mode == "L"
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
        image = image.getchannel("R") if is_grey else image.convert("RGB")
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
        if image.mode == "RGB" and space == "GRAY" and _is_grey(image):  # formats and palettes without grey
            image = image.getchannel("R")
        if _PROFILED[image.mode] != space:
            raise InvalidRequest(f"its colour profile is of {space}, its pixels are {image.mode}", field="body")
        converted = ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError) as error:
        raise InvalidRequest(f"its colour profile cannot be used: {error!s:.200}", field="body") from None
    assert converted is not None, "it is not in place"
    return converted


def _is_grey(image: Image.Image) -> bool:
    red, green, blue = (np.asarray(channel) for channel in image.split())
    return bool(np.array_equal(red, green) and np.array_equal(green, blue))
