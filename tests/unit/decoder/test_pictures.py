"""Pictures become sRGB of 8 bits, upright and opaque, compared with conversions that Pillow has no part in."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, PngImagePlugin

from quire.model.errors import InvalidRequest, MediaUnsupported, PictureTooLarge
from quire.model.latents import HEADER_BYTES_MAX
from quire.model.pictures import READ_FORMATS, format_of
from quire_decoder.adapters.pictures import read_picture
from tests.unit.decoder.icc_profiles import ADOBE_RGB, encoded, grey_profile, in_srgb, rgb_profile

Bytes = npt.NDArray[np.uint8]
_RNG = np.random.default_rng(7)
_GREY: Bytes = _RNG.integers(0, 256, (12, 17), dtype=np.uint8)
_RGB: Bytes = _RNG.integers(0, 256, (12, 17, 3), dtype=np.uint8)
_ALPHA: Bytes = _RNG.integers(0, 256, (12, 17), dtype=np.uint8)
_MOST = 1 << 16


def _file(image: Image.Image, name: str = "png", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def _read(file: bytes, background: tuple[int, int, int] = (0, 0, 0)) -> Bytes:
    return read_picture(file, _MOST, background).pixels


def _grey(values: Bytes) -> Bytes:
    return np.repeat(values[..., None], 3, axis=2)


def _on(colours: Bytes, alpha: Bytes, background: tuple[int, int, int]) -> npt.NDArray[np.float64]:
    share = alpha[..., None] / 255.0
    return np.asarray(colours * share + np.array(background) * (1 - share))


@pytest.mark.parametrize("name", ["png", "tiff", "webp", "gif"])
def test_grey_and_colours_stay_as_they_are(name: str) -> None:
    lossless = {"lossless": True} if name == "webp" else {}
    assert np.array_equal(_read(_file(Image.fromarray(_GREY), name, **lossless)), _grey(_GREY))
    if name != "gif":
        assert np.array_equal(_read(_file(Image.fromarray(_RGB), name, **lossless)), _RGB)


def test_two_levels_and_palettes() -> None:
    levels = Image.fromarray(_GREY).convert("1")
    assert np.array_equal(_read(_file(levels)), _grey(np.where(np.asarray(levels), 255, 0).astype(np.uint8)))
    colours = _RNG.integers(0, 256, (5, 3), dtype=np.uint8)
    indexed = Image.fromarray((_GREY % 5).astype(np.uint8), "L")
    indexed.putpalette(colours.tobytes())
    assert np.array_equal(_read(_file(indexed)), colours[_GREY % 5])
    assert np.array_equal(
        _read(_file(indexed, transparency=bytes([255, 255, 0, 255, 255])), (9, 8, 7)),
        np.where((_GREY % 5 == 2)[..., None], np.array([9, 8, 7], np.uint8), colours[_GREY % 5]),
    )


@pytest.mark.parametrize("name", ["png", "tiff"])
def test_samples_of_16_bits_are_scaled(name: str) -> None:
    """Samples were clipped: a grey picture came out near white."""
    values = np.arange(0, 65536, 321, dtype=np.uint16)[:204].reshape(12, 17)
    file = bytes(imagecodecs.png_encode(values)) if name == "png" else _file(Image.fromarray(values), "tiff")
    assert np.array_equal(_read(file), _grey(np.rint(values / 257.0).astype(np.uint8)))


def test_16_bits_of_each_colour() -> None:
    values = _RNG.integers(0, 65536, (12, 17, 3), dtype=np.uint16)
    assert np.abs(_read(bytes(imagecodecs.png_encode(values))) - values / 257.0).max() <= 1


def _with_clear(file: bytes, *samples: int) -> bytes:
    """A PNG with a transparent colour."""
    end = file.index(b"IDAT") - 4
    return file[:end] + _chunk(b"tRNS", struct.pack(f">{len(samples)}H", *samples)) + file[end:]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_clear_grey_of_few_bits(bits: int) -> None:
    """Pillow compares the unscaled sample of the file with scaled ones."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 1, bits, 0, 0, 0, 0))
    white = (1 << bits) - 1
    row = int("".join(f"{sample:0{bits}b}" for sample in (white, 0) * 4), 2).to_bytes(bits, "big")
    data = _chunk(b"IDAT", zlib.compress(b"\0" + row)) + _chunk(b"IEND", b"")
    file = b"\x89PNG\r\n\x1a\n" + header + _chunk(b"tRNS", struct.pack(">H", white)) + data
    assert _read(file, (1, 2, 3)).tolist() == [[[1, 2, 3], [0, 0, 0]] * 4]


def test_a_clear_colour_of_16_bits_is_refused() -> None:
    file = bytes(imagecodecs.png_encode(np.zeros((2, 2, 3), np.uint16)))
    with pytest.raises(InvalidRequest, match="a transparent colour of 16 bits"):
        _read(_with_clear(file, 0x8000, 0, 0))


def test_grey_where_white_is_zero() -> None:
    values = np.arange(0, 65536, 321, dtype=np.uint16)[:204].reshape(12, 17)
    tags = struct.pack("<HHI", 262, 3, 1)
    file = _file(Image.fromarray(values), "tiff")
    at = file.index(tags) + len(tags)
    inverted = file[:at] + b"\0" + file[at + 1 :]
    assert np.array_equal(_read(inverted), 255 - _grey(np.rint(values / 257.0).astype(np.uint8)))


def test_a_clear_grey_of_16_bits() -> None:
    values = np.full((4, 4), 40_000, np.uint16)
    values[1, 2] = 12_345
    file = _with_clear(bytes(imagecodecs.png_encode(values)), 12_345)
    expected = np.full((4, 4, 3), round(40_000 / 257), np.uint8)
    expected[1, 2] = (1, 2, 3)
    assert np.array_equal(_read(file, (1, 2, 3)), expected)


@pytest.mark.parametrize("background", [(0, 0, 0), (255, 255, 255), (200, 30, 4)])
def test_transparent_pixels_are_composed_on_the_background(background: tuple[int, int, int]) -> None:
    """Hidden colours were shown."""
    colours = np.dstack([_RGB, _ALPHA])
    for name, options in (("png", {}), ("webp", {"lossless": True, "exact": True}), ("tiff", {})):
        pixels = _read(_file(Image.fromarray(colours), name, **options), background)
        assert np.abs(pixels - _on(_RGB, _ALPHA, background)).max() <= 1, name
    grey = Image.merge("LA", (Image.fromarray(_GREY), Image.fromarray(_ALPHA)))
    assert np.abs(_read(_file(grey), background) - _on(_grey(_GREY), _ALPHA, background)).max() <= 1


def test_colours_of_a_wide_profile_are_converted_to_srgb() -> None:
    file = _file(Image.fromarray(_RGB), icc_profile=rgb_profile(ADOBE_RGB, 2.19921875))
    expected = in_srgb(_RGB, ADOBE_RGB, 2.19921875)
    assert np.abs(_read(file) - expected).max() <= 2
    assert np.abs(_RGB - expected).max() > 40, "it makes a difference"
    palette = Image.fromarray(_RGB).quantize(7)
    colours = np.asarray(palette.convert("RGB"))
    file = _file(palette, icc_profile=rgb_profile(ADOBE_RGB, 2.19921875))
    assert np.abs(_read(file) - in_srgb(colours, ADOBE_RGB, 2.19921875)).max() <= 2


def test_a_profile_does_not_touch_alpha() -> None:
    file = _file(Image.fromarray(np.dstack([_RGB, _ALPHA])), icc_profile=rgb_profile(ADOBE_RGB, 2.19921875))
    expected = _on(np.rint(in_srgb(_RGB, ADOBE_RGB, 2.19921875)).astype(np.uint8), _ALPHA, (0, 0, 0))
    assert np.abs(_read(file) - expected).max() <= 2.5


def test_grey_with_a_profile_of_grey_or_of_colours() -> None:
    """WebP has no grey: a grey profile may come with equal channels."""
    expected = _grey(np.rint(encoded((_GREY / 255.0) ** 1.8)).astype(np.uint8)).astype(int)
    for name, profile in (
        ("png", grey_profile(1.8)),
        ("png", rgb_profile(ADOBE_RGB, 1.8)),
        ("webp", grey_profile(1.8)),
    ):
        options = {"lossless": True} if name == "webp" else {}
        file = _file(Image.fromarray(_GREY), name, icc_profile=profile, **options)
        assert np.abs(_read(file) - expected).max() <= 2


@pytest.mark.parametrize(
    ("image", "profile", "says"),
    [
        (Image.fromarray(_RGB), grey_profile(2.2), "is of GRAY, its pixels are RGB"),
        (Image.fromarray(_RGB).convert("CMYK"), rgb_profile(ADOBE_RGB, 2.2), "is of RGB, its pixels are CMYK"),
        (Image.fromarray(_RGB), b"no profile at all", "cannot be used"),
        (Image.fromarray(_GREY.astype(np.float32)), b"", "32 bits"),
        (Image.fromarray(_GREY.astype(np.int32)), b"", "32 bits"),
    ],
    ids=["grey", "cmyk", "damaged", "float", "int32"],
)
def test_what_has_no_defined_conversion_is_refused(image: Image.Image, profile: bytes, says: str) -> None:
    options = {"icc_profile": profile} if profile else {}
    with pytest.raises(InvalidRequest, match=says):
        _read(_file(image, "tiff", **options))


def test_ink_without_a_profile() -> None:
    inks = Image.fromarray(np.dstack([_RGB, np.zeros_like(_GREY)]), "CMYK")
    assert np.abs(_read(_file(inks, "tiff")).astype(int) - (255 - _RGB.astype(int))).max() <= 1


@pytest.mark.parametrize(
    ("orientation", "turns", "mirrored"),
    [
        (1, 0, False),
        (2, 0, True),
        (3, 2, False),
        (4, 2, True),
        (5, 3, True),
        (6, 3, False),
        (7, 1, True),
        (8, 1, False),
    ],
)
def test_pictures_are_upright(orientation: int, turns: int, mirrored: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = np.rot90(_RGB, turns)
    assert np.array_equal(_read(_file(Image.fromarray(_RGB), exif=exif)), upright[:, ::-1] if mirrored else upright)
    clear = np.dstack([_RGB, np.where(_GREY > 99, 255, 0).astype(np.uint8)])
    expected = _read(_file(Image.fromarray(np.rot90(clear, turns)[:, :: -1 if mirrored else 1])), (3, 2, 1))
    assert np.array_equal(_read(_file(Image.fromarray(clear), exif=exif), (3, 2, 1)), expected)


@pytest.mark.parametrize("name", ["gif", "webp", "png", "tiff", "avif"])
def test_of_several_frames_the_first_is_read_and_all_are_counted(name: str) -> None:
    frames = [Image.fromarray(np.full((16, 16, 3), level, np.uint8)) for level in (20, 130, 240)]
    options: dict[str, Any] = {"lossless": True} if name == "webp" else {}
    picture = read_picture(_file(frames[0], name, save_all=True, append_images=frames[1:], **options), _MOST)
    assert picture.is_first_of_several
    assert not read_picture(_file(frames[0], name, **options), _MOST).is_first_of_several
    assert np.abs(picture.pixels.astype(int) - 20).max() <= (2 if name == "avif" else 0)


def test_a_large_picture_is_refused_before_it_is_read() -> None:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    with pytest.raises(PictureTooLarge, match="more than 65536 pixels"):
        _read(b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", b"") + _chunk(b"IEND", b""))
    with pytest.raises(PictureTooLarge, match="256 × 257, 65536 pixels at most"):
        _read(_file(Image.new("1", (257, 256))))


@pytest.mark.parametrize("file", [b"", b"BM" + bytes(60), b"<svg/>", b"\x00\x00\x00\x0cJXL \r\n\x87\n", b"{}" * 99])
def test_other_files_are_named_as_such(file: bytes) -> None:
    with pytest.raises(MediaUnsupported, match="png, jpeg, webp, avif, tiff, gif"):
        _read(file)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["png", "jpeg", "webp", "avif", "tiff", "gif"])
def test_damaged_files_are_refused_or_read(name: str) -> None:
    """A damage costs its own request."""
    file = _file(Image.fromarray(_RGB), name)
    refused = 0
    for _ in range(150):
        damaged = bytearray(file[: _RNG.integers(4, len(file) + 1)])
        for at in _RNG.integers(0, len(damaged), 3):
            damaged[at] ^= 1 << _RNG.integers(0, 8)
        try:
            _read(bytes(damaged))
        except InvalidRequest:
            refused += 1
    assert refused > 20


def test_a_frame_that_covers_a_part_of_its_canvas() -> None:
    """Pillow fills the rest with the first colour of the palette."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 4, 2, 0x80, 0, 0) + bytes([9, 9, 9, 200, 100, 50])
    frame = b"," + struct.pack("<HHHHB", 1, 0, 2, 1, 0) + b"\x02\x02\x4c\x0a\x00;"
    pixels = _read(screen + frame, (1, 2, 3))
    assert pixels[0, 1:3].tolist() == [[200, 100, 50]] * 2
    assert pixels[1].tolist() == [[1, 2, 3]] * 4 and pixels[0, ::3].tolist() == [[1, 2, 3]] * 2


def test_text_beside_the_pixels_changes_nothing() -> None:
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Comment", "hello")
    assert np.array_equal(_read(_file(Image.fromarray(_RGB), pnginfo=notes)), _RGB)


def test_formats_by_their_first_bytes() -> None:
    colours = Image.fromarray(_RGB)
    for name in READ_FORMATS:
        assert format_of(_file(colours, name)) == name
    assert format_of(b"\0\0\0\x20ftypmif1\0\0\0\0mif1avif" + bytes(90)) == "avif"
    assert format_of(b"\0\0\0\x20ftypheic\0\0\0\0mif1heic" + bytes(90)) == "heif"
    assert format_of(b"II+\0" + bytes(9)) == "tiff"
    for length in (0, 2815, 19_778, HEADER_BYTES_MAX):
        assert format_of(struct.pack("<Q", length) + b'{"a":1}') == "", "a safetensors file"
