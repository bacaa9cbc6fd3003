"""Images over HTTP as caches and owners need them: parts, versions, metadata, times to live, many deletes, pictures."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import c2pa
import imagecodecs
import numpy as np
import pytest
from PIL import Image

from quire.client import Client
from quire.model.errors import ImageMissing, InvalidRequest, QuireError
from quire.model.images import MEDIA_TYPES, ImageAttributes
from quire.model.latents import LatentInfo, Vae, encode_record
from quire_decoder.adapters.weights import weights_digest
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import pictures
from tests.signers import make_signer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, vae: Path) -> Iterator[LocalCluster]:
    certificates, key = make_signer(tmp_path_factory.mktemp("signer"))
    settings = {
        "QUIRE_DECODER_MODELS": str(vae),
        "QUIRE_DECODER_PROVENANCE_CERTIFICATES": str(certificates),
        "QUIRE_DECODER_PROVENANCE_KEY": str(key),
    }
    with LocalCluster(
        tmp_path_factory.mktemp("caches"), decoders=1, arena_bytes=64 << 20, settings=settings
    ) as running:
        yield running


@pytest.fixture
async def http(cluster: LocalCluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{cluster.http_address}") as session:
        yield session


def _record(vae: Path, seed: int) -> bytes:
    values = np.random.default_rng(seed).normal(size=(4, 16, 16)).astype(np.float16)
    return encode_record(values, LatentInfo((4, 16, 16), "float16", Vae("tiny", "", weights_digest(vae)), 64, 64))


async def test_parts_versions_and_metadata(http: aiohttp.ClientSession, vae: Path) -> None:
    """A part of a rendition; a URL that means one record for ever; what the owner says of an image."""
    record, path = _record(vae, 90), "/v1/images/parts"
    said = {"Content-Type": "application/x-quire-latent", "X-Quire-Meta-Prompt": "a cat", "x-quire-meta-seed": "90"}
    async with http.put(path, data=record, headers=said) as answer:
        version = (await answer.json())["version"]
    small = {"width": "32", "format": "jpeg"}
    async with http.get(path, params=small) as answer:
        whole, headers = await answer.read(), answer.headers
        assert (headers["Accept-Ranges"], headers["X-Quire-Meta-Prompt"]) == ("bytes", "a cat")
        assert (headers["X-Quire-Version"], headers["Cache-Control"]) == (version, "public, no-cache")
    size, etag = len(whole), headers["ETag"]
    for asked, condition, status, expected in (
        ("bytes=2-9", "", 206, whole[2:10]),
        ("bytes=-5", etag, 206, whole[-5:]),
        ("bytes=2-", headers["Last-Modified"], 206, whole[2:]),
        ("bytes=2-9", '"another"', 200, whole),
        ("bytes=0-1,3-4", "", 200, whole),
        (f"bytes={size}-", "", 416, None),
    ):
        wanted = {"Range": asked} | ({"If-Range": condition} if condition else {})
        async with http.get(path, params=small, headers=wanted) as answer:
            body = await answer.read()
            assert answer.status == status and expected in (body, None), (asked, condition)
            if status == 206:
                start = size - len(body) if asked != "bytes=2-9" else 2
                assert answer.headers["Content-Range"] == f"bytes {start}-{start + len(body) - 1}/{size}"
            if status == 416:
                assert answer.headers["Content-Range"] == f"bytes */{size}"
    async with http.get(path, params=small | {"v": version}) as answer:
        assert (await answer.read(), answer.headers["Cache-Control"]) == (whole, "public, max-age=31536000, immutable")
    async with http.get(path, params=small | {"v": version, "preset": ""}) as answer:
        assert answer.status == 400
    for other in ("0" * 16, version.upper(), version[:8]):
        async with http.get(path, params=small | {"v": other}) as answer:
            assert answer.status == 404 and "immutable" not in answer.headers.get("Cache-Control", "")
    async with http.put(path, data=record, headers=said | {"X-Quire-Meta-Prompt": "x" * 3000}) as answer:
        assert answer.status in (400, 431)
    async with http.get("/v1/images", params={"prefix": "parts"}) as answer:
        (listed,) = (await answer.json())["images"]
        assert (listed["version"], listed["metadata"]) == (version, {"prompt": "a cat", "seed": "90"})


async def test_times_to_live_and_many_deletes(http: aiohttp.ClientSession, vae: Path) -> None:
    """An image whose time is up is not there, and caches were told so; many go at once."""
    record, kind = _record(vae, 91), {"Content-Type": "application/x-quire-latent"}
    for name, ttl in (("brief-1", "1"), ("brief-2", "3600"), ("brief-3", "0")):
        async with http.put(f"/v1/images/{name}", params={"ttl": ttl}, data=record, headers=kind) as answer:
            assert answer.status == 201
            version = (await answer.json())["version"]
    async with http.get("/v1/images/brief-2", params={"v": version}) as answer:
        (age,) = (part for part in answer.headers["Cache-Control"].split(", ") if part.startswith("max-age="))
        assert 3000 < int(age.removeprefix("max-age=")) <= 3600
    async with asyncio.timeout(20):
        while True:
            async with http.get("/v1/images/brief-1") as answer:
                if answer.status == 404:
                    break
            await asyncio.sleep(0.1)
    async with http.get("/v1/images", params={"prefix": "brief-"}) as answer:
        assert [each["id"] for each in (await answer.json())["images"]] == ["brief-2", "brief-3"]
    async with http.post("/v1/images", json={"delete": ["brief-3", "brief-9", "brief-2", "brief-2"]}) as answer:
        assert await answer.json() == {"deleted": ["brief-3", "brief-2"], "missing": ["brief-9"]}
    for body in (
        "{",
        "[]",
        '{"delete": "brief"}',
        '{"delete": []}',
        '{"delete": ["../x"]}',
        '{"delete": ["a"], "b": 1}',
    ):
        async with http.post("/v1/images", data=body) as answer:
            assert answer.status == 400, body
    async with http.put("/v1/images/brief-4", params={"ttl": "999999999999"}, data=record, headers=kind) as answer:
        assert answer.status == 400


def _file(frames: Sequence[Image.Image], name: str) -> bytes:
    file = io.BytesIO()
    frames[0].save(file, name, save_all=True, append_images=frames[1:])
    return file.getvalue()


async def test_pictures_are_put_and_say_what_they_lost(http: aiohttp.ClientSession, cluster: LocalCluster) -> None:
    """What comes back is as far from the picture as was said. A size that the VAE cannot make, and what is no picture,
    are refused.
    """
    (picture,) = pictures(1, 128)
    file, path = bytes(imagecodecs.png_encode(picture)), "/v1/images/painted"
    async with http.get("/v1/vaes") as answer:
        vaes = {vae["name"]: vae["weights_sha256"] for vae in (await answer.json())["vaes"]}
    weights = {"weights_sha256": vaes["demo_vae"]}
    async with http.put(path, data=file, headers={"Content-Type": "image/png"}) as answer:
        assert answer.status == 400 and (await answer.json())["field"] == "weights_sha256", "there are two"
    async with http.put(path, params=weights, data=file, headers={"Content-Type": "image/png"}) as answer:
        assert answer.status == 201, await answer.text()
        said = (await answer.json())["fidelity"]
    async with http.get(path, params={"format": "png"}) as answer:
        back = imagecodecs.png_decode(await answer.read())
        assert answer.headers["X-Quire-Meta-Fidelity-Psnr-Db"] == f"{said['psnr_db']:.2f}"
    errors = np.abs(back.astype(int) - picture)
    assert 10 * np.log10(255**2 / (errors**2).mean()) == pytest.approx(said["psnr_db"], abs=0.1)
    assert int(errors.max()) == said["error_max"] and said["psnr_db"] > 15
    wrong: tuple[tuple[bytes, dict[str, str], int], ...] = (
        (bytes(imagecodecs.png_encode(picture[:100, :99])), weights, 400),
        (file[:500], weights, 400),
        (b"BM" + bytes(90), weights, 415),
        (_file([Image.new("1", (8200, 8200))], "png"), weights, 413),
        (file, {"weights_sha256": "ab" * 32}, 400),
        (file, weights | {"background": "white"}, 400),
    )
    for body, query, status in wrong:
        async with http.put(path, params=query, data=body, headers={"Content-Type": "image/png"}) as answer:
            assert answer.status == status, await answer.text()
            assert answer.content_type == "application/problem+json"


async def test_pictures_are_known_by_their_bytes_where_their_type_does_not_tell(
    http: aiohttp.ClientSession, cluster: LocalCluster
) -> None:
    """`curl -T` sends no type. For other files 415 names the formats, not a header of 18121296894642503 bytes."""
    async with http.get("/v1/vaes") as answer:
        vaes = {vae["name"]: vae["weights_sha256"] for vae in (await answer.json())["vaes"]}
    weights, path = {"weights_sha256": vaes["demo_vae"]}, "/v1/images/untold"
    colours = np.full((64, 64, 4), (250, 10, 10, 0), np.uint8)  # red, and clear
    frames = [Image.new("L", (64, 64), level) for level in (200, 40)]
    for body, kind, query, of_several in (
        (bytes(imagecodecs.png_encode(colours)), "application/octet-stream", {"background": "00ff00"}, False),
        (bytes(imagecodecs.jpeg_encode(colours[..., :3].copy())), "image/jpg", {}, False),
        (_file(frames, "gif"), "image/gif", {}, True),
    ):
        async with http.put(path, params=weights | query, data=body, headers={"Content-Type": kind}) as answer:
            assert answer.status == 201, await answer.text()
            assert (await answer.json())["first_of_several"] is of_several
        if "background" in query:
            async with http.get(path, params={"format": "png"}) as answer:
                assert "Vary" not in answer.headers
                red, green, _ = imagecodecs.png_decode(await answer.read()).reshape(-1, 3).mean(axis=0)
                assert green > 200 > 60 > red
    async with http.get(path, headers={"Accept": "image/webp"}) as answer:
        assert answer.headers["Vary"] == "Accept"
    heic = b"\0\0\0\x18ftypheic" + bytes(90)
    for body, kind, field in (
        (heic, "image/heic", "body"),
        (heic, "application/octet-stream", "body"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", "body"),
        (b"just some text, which is long enough", "text/plain", "body"),
    ):
        async with http.put(path, params=weights, data=body, headers={"Content-Type": kind}) as answer:
            problem = await answer.json()
            assert (answer.status, problem["code"], problem["field"]) == (415, "MediaUnsupported", field), problem
            assert "png, jpeg, webp, avif, tiff, gif" in problem["detail"]


async def test_provenance_is_in_every_image(http: aiohttp.ClientSession, vae: Path) -> None:
    """Made, from the decoder's cache, and from the gateway: signed; with a tag that says that its bytes change."""
    record, path = _record(vae, 92), "/v1/images/signed"
    said = {"Content-Type": "application/x-quire-latent", "X-Quire-Provenance": "generated"}
    async with http.put(path, data=record, headers=said) as answer:
        version = (await answer.json())["version"]
        assert (answer.status, answer.headers["ETag"].startswith("W/")) == (201, False)
    for form, query in product(MEDIA_TYPES, ({}, {"width": "32"}, {"v": version})):
        for _ in range(2):
            async with http.get(path, params={"format": form} | query) as answer:
                body, etag = await answer.read(), answer.headers["ETag"]
            assert (etag[:2], answer.headers["Accept-Ranges"]) == ("W/", "none")
            with c2pa.Reader(MEDIA_TYPES[form], io.BytesIO(body)) as reader:
                assert reader.get_validation_state() == "Valid" and "trainedAlgorithmicMedia" in reader.json()
    async with http.get(path, params={"format": form} | query, headers={"If-None-Match": etag}) as answer:
        assert answer.status == 304
    wanted = {"Range": "bytes=0-9", "If-Range": etag}
    async with http.get(path, params={"format": form} | query, headers=wanted) as answer:
        assert (answer.status, len(await answer.read())) == (200, len(body))
    async with http.put(path, data=record, headers=said | {"X-Quire-Provenance": "{}"}) as answer:
        assert answer.status == 400 and "assertions" in (await answer.json())["detail"]
    async with http.put(path, data=record, headers={"Content-Type": "application/x-quire-latent"}) as answer:
        assert (await answer.json())["version"] != version
    async with http.get(path, params={"format": "png"}) as answer:
        plain = await answer.read()
    with pytest.raises(c2pa.C2paError):
        c2pa.Reader("image/png", io.BytesIO(plain))


def test_pictures_by_the_blocking_client(cluster: LocalCluster, vae: Path, tmp_path: Path) -> None:
    """By path and as bytes; what is wrong with them is said before anything is sent, or as the decoder says."""
    pixels = np.random.default_rng(5).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "cat.png")
    with Client(cluster.gateway_address) as client:
        images = client.images
        weights = weights_digest(vae)
        assert weights in [each.weights_sha256 for each in images.vaes()]
        attributes = ImageAttributes(metadata=(("by", "me"),))
        put = images.put_picture("blocking/cat", tmp_path / "cat.png", weights_sha256=weights, attributes=attributes)
        assert put.entry.weights_sha256 == weights and 0 < put.psnr_db < 99 and not put.first_of_several
        same = images.put_picture("blocking/dog", (tmp_path / "cat.png").read_bytes(), weights_sha256=weights.upper())
        assert same.entry.record_sha256 == put.entry.record_sha256 and same.psnr_db == put.psnr_db
        metadata = dict(images.head("blocking/cat").metadata)
        assert metadata["by"] == "me" and float(metadata["fidelity-psnr-db"]) == round(put.psnr_db, 2)
        images.get("blocking/cat", "webp").save(tmp_path / "cat.webp")
        with Image.open(tmp_path / "cat.webp") as picture:
            assert (picture.format, picture.size) == ("WEBP", (96, 64))
        assert [entry.image_id for entry in images.list("blocking/")] == ["blocking/cat", "blocking/dog"]
        assert images.delete("blocking/dog") and not images.delete("blocking/dog")
        wrong: Any = 7
        for file, why in (
            (b"", "no bytes"),
            (wrong, "int; a path, or the bytes of a file"),
            (b"GIF89a", "a damaged gif"),
            (b"nothing", "is none of png"),
        ):
            with pytest.raises(QuireError, match=why):
                images.put_picture("blocking/bad", file, weights_sha256=weights)
        with pytest.raises(InvalidRequest, match="which of 2 VAEs"):
            images.put_picture("blocking/bad", tmp_path / "cat.png")
        with pytest.raises(FileNotFoundError):
            images.put_picture("blocking/bad", tmp_path / "none.png")
        with pytest.raises(QuireError, match="VAE"):
            images.put_picture("blocking/bad", tmp_path / "cat.png", weights_sha256=64 * "0")
        with pytest.raises(ImageMissing):
            images.head("blocking/bad")
