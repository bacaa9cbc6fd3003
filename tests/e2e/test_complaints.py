"""Complaints about other image proxies, tried here; each test names where it was made.

They are about behaviour, so that a service with the same faults fails. Pictures go in and come out over HTTP.
"""

from __future__ import annotations

import asyncio
import io
import struct
import zlib
from collections.abc import AsyncIterator, Iterator

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from quire_tools.local import LocalCluster
from tests.unit.decoder.icc_profiles import ADOBE_RGB, in_srgb, rgb_profile

_SIDE = 64
_ORIENTATION = 0x0112
Pixels = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {"QUIRE_GATEWAY_HTTP_REQUESTS_MAX": "8", "QUIRE_DECODER_PIXELS_MAX": str(1 << 20)}
    with LocalCluster(
        tmp_path_factory.mktemp("complaints"), decoders=1, arena_bytes=64 << 20, settings=settings
    ) as running:
        yield running


@pytest.fixture
async def http(cluster: LocalCluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{cluster.http_address}") as session:
        yield session


def _encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


async def _put(
    http: aiohttp.ClientSession, name: str, body: bytes, kind: str, **params: str
) -> tuple[int, dict[str, object]]:
    async with http.put(f"/v1/images/{name}", data=body, params=params, headers={"Content-Type": kind}) as answer:
        return answer.status, await answer.json()


async def _seen(http: aiohttp.ClientSession, name: str) -> Pixels:
    """Return the picture as a client receives it."""
    async with http.get(f"/v1/images/{name}", params={"format": "png"}) as answer:
        assert answer.status == 200
        return np.asarray(Image.open(io.BytesIO(await answer.read())).convert("RGB"))


def _halves(above: tuple[int, int, int], below: tuple[int, int, int]) -> Image.Image:
    picture = Image.new("RGB", (_SIDE, _SIDE), above)
    picture.paste(below, (0, _SIDE // 2, _SIDE, _SIDE))
    return picture


def _mean(pixels: Pixels) -> list[float]:
    return [float(value) for value in pixels.reshape(-1, 3).mean(axis=0)]


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_orientation(http: aiohttp.ClientSession, orientation: int) -> None:
    """imgproxy/imgproxy#14: EXIF's orientation was dropped; h2non/imaginary#284: 2, 4, 5 and 7 came out wrong."""
    upright = Image.new("RGB", (_SIDE, _SIDE // 2), "red")
    upright.paste("blue", (_SIDE // 2, 0, _SIDE, _SIDE // 2))
    stored_as = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    stored = upright.transpose(stored_as) if stored_as is not None else upright
    status, _ = await _put(http, f"turned/{orientation}", _encoded(stored, "PNG", exif=exif.tobytes()), "image/png")
    assert status == 201
    pixels = await _seen(http, f"turned/{orientation}")
    assert pixels.shape == (_SIDE // 2, _SIDE, 3), "image-size/image-size#352: width and height were swapped"
    west, east = _mean(pixels[:, : _SIDE // 3]), _mean(pixels[:, -_SIDE // 3 :])
    assert west[0] > west[2] + 60 and east[2] > east[0] + 60, "red is left, blue is right"


async def test_transparency(http: aiohttp.ClientSession) -> None:
    """willnorris/imageproxy#118: all that was transparent became black, with no choice."""
    picture = _encoded(Image.new("RGBA", (_SIDE, _SIDE), (0, 255, 0, 0)))
    assert (await _put(http, "clear", picture, "image/png"))[0] == 201
    assert (await _put(http, "white", picture, "image/png", background="ffffff"))[0] == 201
    assert max(_mean(await _seen(http, "clear"))) < 60, "black, as documented, and not the hidden green"
    assert min(_mean(await _seen(http, "white"))) > 195


async def test_wide_gamut(http: aiohttp.ClientSession) -> None:
    """thumbor/thumbor#586: pictures with a profile lost their colours."""
    stored = np.array([60, 190, 60], np.uint8)
    converted = in_srgb(stored, ADOBE_RGB, 2.2).round().astype(np.uint8)
    colours = {"wide": stored, "converted": converted, "unprofiled": stored}
    means = {}
    for name, colour in colours.items():
        picture = Image.fromarray(np.full((_SIDE, _SIDE, 3), colour, np.uint8))
        profile = {"icc_profile": rgb_profile(ADOBE_RGB, 2.2)} if name == "wide" else {}
        assert (await _put(http, name, _encoded(picture, "PNG", **profile), "image/png"))[0] == 201
        means[name] = np.array(_mean(await _seen(http, name)))
    assert np.allclose(means["wide"], means["converted"], atol=3)
    assert not np.allclose(means["wide"], means["unprofiled"], atol=15), "the profile matters"


async def test_cmyk(http: aiohttp.ClientSession) -> None:
    """lovell/sharp#1649 and cubicdaiya/ngx_small_light#21: CMYK came out as a negative."""
    body = _encoded(Image.new("CMYK", (_SIDE, _SIDE), (0, 0, 0, 0)), "JPEG")
    assert (await _put(http, "paper", body, "image/jpeg"))[0] == 201
    assert min(_mean(await _seen(http, "paper"))) > 195, "no ink is white"


async def test_animation(http: aiohttp.ClientSession) -> None:
    """weserv/images#77: of an animation the first frame was kept, and the answer did not say so."""
    frames = [_halves((255, 0, 0), (255, 0, 0)), _halves((0, 0, 255), (0, 0, 255))]
    moving = _encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    status, stored = await _put(http, "moving", moving, "image/gif")
    assert status == 201 and stored["first_of_several"] is True
    status, stored = await _put(http, "still", _encoded(frames[0], "GIF"), "image/gif")
    assert status == 201 and not stored.get("first_of_several")


async def test_formats_for_caches(http: aiohttp.ClientSession) -> None:
    """vercel/next.js#26788 and rosell-dk/webp-express#116: caches sent WebP to those who could not read it.

    The answer says that it depends on Accept, also where the fallback is sent; not where the URL names the format.
    """
    assert (await _put(http, "varied", _encoded(_halves((255, 0, 0), (0, 0, 255))), "image/png"))[0] == 201
    for accept, kind in (("image/webp,*/*;q=0.1", "image/webp"), ("image/png", "image/png"), ("*/*", "image/png")):
        async with http.get("/v1/images/varied", headers={"Accept": accept}) as answer:
            assert (answer.content_type, answer.headers["Vary"]) == (kind, "Accept"), accept
    async with http.get("/v1/images/varied", params={"format": "webp"}, headers={"Accept": "image/png"}) as answer:
        assert answer.content_type == "image/webp" and "Accept" not in answer.headers.get("Vary", "")


async def test_unchanged_images_are_not_sent_again(http: aiohttp.ClientSession) -> None:
    """opennextjs/opennextjs-aws#398: without an ETag each stale copy was made anew."""
    assert (await _put(http, "kept", _encoded(_halves((255, 0, 0), (0, 0, 255))), "image/png"))[0] == 201
    async with http.get("/v1/images/kept") as answer:
        etag = answer.headers["ETag"]
    async with http.get("/v1/images/kept", headers={"If-None-Match": etag}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")


async def test_a_missing_image_is_not_kept_by_caches(http: aiohttp.ClientSession) -> None:
    """magento/pwa-studio#2778: the 404 of an image was cached, and stayed after the image was there."""
    async with http.get("/v1/images/later") as answer:
        assert answer.status == 404 and "max-age" not in answer.headers.get("Cache-Control", "")
        assert "ETag" not in answer.headers
    assert (await _put(http, "later", _encoded(_halves((255, 0, 0), (0, 0, 255))), "image/png"))[0] == 201
    assert (await _seen(http, "later")).shape == (_SIDE, _SIDE, 3)


async def test_a_bomb_is_refused_by_its_size_and_with_the_limit(http: aiohttp.ClientSession) -> None:
    """thumbor/thumbor#781: the answer to an oversized picture was 400, without the limit."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20))
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    status, problem = await _put(http, "bomb", bomb, "image/png")
    assert status == 413 and str(1 << 20) in str(problem["detail"]), problem


async def test_many_requests_at_once(http: aiohttp.ClientSession) -> None:
    """willnorris/imageproxy#200 and thumbor/thumbor#1693: a page of pictures had the process killed.

    Here they wait for each other: more than the gateway answers at a time, each for a form of its own.
    """
    assert (await _put(http, "busy", _encoded(_halves((255, 0, 0), (0, 0, 255))), "image/png"))[0] == 201

    async def get(width: int) -> int:
        async with http.get("/v1/images/busy", params={"width": str(width), "format": "webp"}) as answer:
            await answer.read()
            return answer.status

    async with asyncio.timeout(120):
        statuses = await asyncio.gather(*(get(2 + number) for number in range(150)))
    assert set(statuses) == {200}
