"""Images through the real services: a latent is put once, an image is got in the format asked for."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import imagecodecs
import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny
from PIL import Image as PillowImage
from safetensors.torch import save
from yarl import URL

from quire.client import AsyncClient, ImageClient
from quire.model.errors import ImageMissing, InvalidRequest, QuireError, VaeUnknown
from quire.model.images import Rendering
from quire.model.latents import LatentInfo, Normalisation, Vae, encode_record
from quire.model.nodes import Role
from quire_decoder.adapters.weights import weights_digest
from quire_tools.local import LocalCluster
from tests.e2e.helpers import metric

DECODERS = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, vae: Path) -> Iterator[LocalCluster]:
    settings = {
        "QUIRE_DECODER_MODELS": str(vae),
        "QUIRE_DECODER_CACHE_BYTES": str(8 << 20),
    }
    folder = tmp_path_factory.mktemp("images")
    with LocalCluster(folder, decoders=DECODERS, storage_nodes=2, arena_bytes=128 << 20, settings=settings) as running:
        yield running


@pytest.fixture
async def images(cluster: LocalCluster) -> AsyncIterator[ImageClient]:
    async with AsyncClient(cluster.gateway_address) as client:
        yield ImageClient(client)


def _latent(
    vae: Path, seed: int, size: int = 16
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float16]], LatentInfo]:
    values = np.random.default_rng(seed).normal(size=(4, size, size)).astype(np.float16)
    info = LatentInfo(
        (4, size, size),
        "float16",
        Vae("test/tiny", "", weights_digest(vae), "AutoencoderTiny"),
        size * 4,
        size * 4,
        Normalisation(0.5, 0.1),
    )
    return values, info


def _reference(
    vae: Path, values: np.ndarray[tuple[int, ...], np.dtype[np.float16]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """What diffusers makes of it by itself."""
    tiny: Any = AutoencoderTiny
    model = tiny.from_pretrained(vae).eval()
    with torch.inference_mode():
        latent = torch.from_numpy(values.astype(np.float32) / np.float32(0.5) + np.float32(0.1))[None]
        sample = model.decode(latent).sample[0]
    pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (
        ((sample / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    )
    return pixels


async def test_put_once_get_in_every_format(images: ImageClient, vae: Path) -> None:
    """Lossless formats are the VAE's pixels exactly; the others are near; the latent comes back bit by bit."""
    values, info = _latent(vae, 1)
    entry = await images.put("picture-1", values, info)
    expected = _reference(vae, values)
    png = await images.get("picture-1")
    assert png.source in ("latent", "miss"), "it may lie in its decoder's cache already"
    assert png.entry.latent_sha256 == entry.latent_sha256
    assert np.array_equal(imagecodecs.png_decode(png.data), expected)
    webp = await images.get("picture-1", Rendering("webp"))
    assert np.array_equal(imagecodecs.webp_decode(webp.data)[..., :3], expected)
    lossy = await images.get("picture-1", Rendering("webp", 80))
    assert len(lossy.data) < 0.7 * len(webp.data)
    for name, decode in (("jpeg", imagecodecs.jpeg_decode), ("avif", imagecodecs.avif_decode)):
        image = await images.get("picture-1", Rendering(name, 95))
        error = np.abs(decode(image.data)[..., :3].astype(int) - expected)
        assert error.mean() < 12, name
    small = await images.get("picture-1", Rendering("png", width=32))
    assert imagecodecs.png_decode(small.data).shape == (32, 32, 3)
    back, said = await images.get_latent("picture-1")
    assert np.array_equal(back.view(np.uint16), values.view(np.uint16))
    assert said.vae == info.vae


async def test_the_way_through_the_forms(images: ImageClient, vae: Path) -> None:
    """A decode, then the image that was kept; of it a rendition, which then is kept too: nothing is encoded for it."""
    values, info = _latent(vae, 2)
    await images.put("forms", values, info)
    got = [await images.get("forms") for _ in range(3)]
    assert got[0].source in ("latent", "miss")
    assert [each.source for each in got[1:]] == ["image", "image"]
    assert len({each.data for each in got}) == 1
    small = [await images.get("forms", Rendering("jpeg", 80, 32)) for _ in range(3)]
    assert [each.source for each in small] == ["image", "rendition", "rendition"]
    assert len({each.data for each in small}) == 1
    assert "encode" in small[0].stages_us and not small[1].stages_us
    assert len({each.decoder for each in got + small}) == 1, "its owner serves it"


async def test_many_at_once_are_decoded_once(cluster: LocalCluster, images: ImageClient, vae: Path) -> None:
    """Forty requests for a new image: one decodes it, and the others join that decode or come to what it kept."""
    values, info = _latent(vae, 3, 48)
    await images.put("popular", values, info)
    before = await _misses(cluster)
    got = await asyncio.gather(*(images.get("popular") for _ in range(40)))
    assert len({each.data for each in got}) == 1
    sources = [each.source for each in got]
    assert sources.count("miss") + sources.count("latent") == 1, sources
    assert set(sources) <= {"miss", "latent", "joined", "image"}, sources
    assert await _misses(cluster) - before <= 1


async def _misses(cluster: LocalCluster) -> float:
    await asyncio.sleep(0.3)  # a scrape within a quarter of a second of another one is told the same
    decoders = [name for name in cluster.names if name.startswith("decoder")]
    return sum(metric(cluster.metrics[name], "quire_decoder_misses_total") for name in decoders)


async def test_ids_replaced_listed_deleted(images: ImageClient, vae: Path) -> None:
    first, info = _latent(vae, 4)
    second, _ = _latent(vae, 5)
    await images.put("replaced", first, info)
    assert (await images.get("replaced")).data
    await images.put("replaced", second, info)
    image = await images.get("replaced")
    assert np.array_equal(imagecodecs.png_decode(image.data), _reference(vae, second))
    for name in ("list-b", "list-a", "other"):
        await images.put(name, first, info)
    assert [entry.image_id async for entry in images.list("list-")] == ["list-a", "list-b"]
    assert await images.delete("list-a")
    assert not await images.delete("list-a")
    with pytest.raises(ImageMissing, match="list-a"):
        await images.get("list-a")
    assert (await images.get("list-b")).data, "the same record, still in use by others"


async def test_a_dead_decoders_images_come_from_others(cluster: LocalCluster, images: ImageClient, vae: Path) -> None:
    """Every image is still served, whichever decoder owned it."""
    names = [f"spread-{number}" for number in range(12)]
    for number, name in enumerate(names):
        await images.put(name, *_latent(vae, 60 + number))
    owners = {name: (await images.get(name)).decoder for name in names}
    assert len(set(owners.values())) > 1, "records are spread"
    victim = owners[names[0]]
    cluster.kill(victim)
    for name in names:
        image = await images.get(name)
        assert image.decoder != victim
        if owners[name] != victim:
            assert image.decoder == owners[name], "others keep their share"
    cluster.restart(victim)


async def test_puts_and_deletes_of_one_record_at_once(images: ImageClient, vae: Path) -> None:
    """Ids that share a record come and go: one that was acknowledged can be got."""
    values, info = _latent(vae, 77)

    async def come_and_go(name: str) -> None:
        for _ in range(5):
            await images.put(name, values, info)
            await images.delete(name)

    async def put_and_get(name: str) -> None:
        for _ in range(5):
            await images.put(name, values, info)
            assert (await images.get_record(name))[:4] == b"QLAT"

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(come_and_go(f"gone-{number}"))
            tasks.create_task(put_and_get(f"kept-{number}"))
    for number in range(4):
        assert (await images.get(f"kept-{number}")).data


async def test_bad_latents(images: ImageClient, vae: Path) -> None:
    """Typed errors; the node goes on."""
    values, info = _latent(vae, 7)
    record = encode_record(values, info)
    for damaged in (record[:-5], record[:40], b"", b"QLAT" + bytes(30), record[:200] + b"\xff" + record[201:]):
        with pytest.raises(QuireError):
            await images.put_record("bad", damaged)
    with pytest.raises(ImageMissing):
        await images.get("bad")
    for name in ("", "a//b", "x" * 600, "u\u0308"):
        with pytest.raises(InvalidRequest):
            await images.put_record(name, record)
    unknown = LatentInfo((4, 16, 16), "float16", Vae("no/such-vae", "", "00" * 32), 64, 64)
    wrong = LatentInfo((3, 16, 16), "float16", info.vae, 64, 64)
    lies = LatentInfo((4, 16, 16), "float16", info.vae, 128, 128)
    refused = (
        ("unknown-vae", values, unknown, "no decoder has a VAE", VaeUnknown),
        ("wrong-channels", values[:3], wrong, "channels", InvalidRequest),
        ("wrong-size", values, lies, "128", QuireError),
    )
    for name, latent, said, why, later in refused:
        with pytest.raises(InvalidRequest, match=why):
            await images.put(name, latent, said)
        with pytest.raises(ImageMissing):
            await images.head(name)
        await images.put(name, latent, said, allow_unknown_vae=True)
        with pytest.raises(later):
            await images.get(name)
        assert (await images.get_latent(name))[1].shape == said.shape
    for rendering in ({"format": "gif"}, {"quality": 101}, {"width": 10**6}):
        with pytest.raises(InvalidRequest):
            Rendering(**rendering)
    await images.put("good", values, info)
    assert (await images.get("good")).data


# ---- HTTP


@pytest.fixture
async def http(cluster: LocalCluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{cluster.http_address}") as session:
        yield session


async def test_http_from_put_to_304(http: aiohttp.ClientSession, vae: Path) -> None:
    values, _ = _latent(vae, 8)
    query = {"weights_sha256": weights_digest(vae)}
    body = save({"latent": torch.from_numpy(values.copy())[None]})
    async with http.put("/v1/images/web-1", params=query, data=body) as answer:
        assert answer.status == 201, await answer.text()
        assert (await answer.json())["id"] == "web-1"
    raw = query | {"shape": "4,16,16", "dtype": "float16", "scaling_factor": "0.5", "shift_factor": "0.1"}
    for name, value in (("scaling_factor", "0.18215"), ("shift_factor", "0")):
        async with http.put("/v1/images/web-2", params=query | {name: value}, data=body) as answer:
            problem = await answer.json()
            assert (answer.status, problem["field"]) == (400, name)
            assert value in problem["detail"] and "of tiny is" in problem["detail"]
    async with http.put(
        "/v1/images/web-2", params=raw, data=values.tobytes(), headers={"Content-Type": "application/octet-stream"}
    ) as answer:
        assert answer.status == 201, await answer.text()
    expected = _reference(vae, values)
    etags = []
    for name in ("web-1", "web-2"):
        async with http.get(f"/v1/images/{name}") as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "image/png"
            assert answer.headers["Vary"] == "Accept"
            assert np.array_equal(imagecodecs.png_decode(await answer.read()), expected)
            etags.append(answer.headers["ETag"])
    assert etags[0] != "" and len(set(etags)) == 1, "the same record, the same tag"
    etag = etags[0]
    changed = query | {"do_scaling": "false"}
    async with http.put("/v1/images/web-2", params=changed, data=body) as answer:
        assert answer.status == 201
    async with http.get("/v1/images/web-2", headers={"If-None-Match": etag}) as answer:
        assert answer.status == 200, "the same values, but other pixels"
    async with http.get("/v1/images/web-1", headers={"If-None-Match": etag}) as answer:
        assert answer.status == 304
        assert await answer.read() == b""
        modified = answer.headers["Last-Modified"]
    for said in (f"W/{etag}", f'"x, y", {etag}', "*"):
        async with http.get("/v1/images/web-1", headers={"If-None-Match": said}) as answer:
            assert answer.status == 304, said
    async with http.get("/v1/images/web-1", headers={"If-Modified-Since": modified}) as answer:
        assert answer.status == 304
    async with http.get("/v1/images/web-1", headers={"If-Match": '"another"'}) as answer:
        assert answer.status == 412
    async with http.get(
        "/v1/images/web-1", params={"format": "jpeg", "quality": "80"}, headers={"If-None-Match": etag}
    ) as answer:
        assert answer.status == 200
        assert answer.headers["ETag"] != etag
        assert PillowImage.open(io.BytesIO(await answer.read())).format == "JPEG"
    accept = {"Accept": "text/html, image/webp;q=0.8, image/avif;q=0.9, */*;q=0.1"}
    async with http.get("/v1/images/web-1", headers=accept) as answer:
        assert answer.content_type == "image/avif"
        assert answer.headers["ETag"] != etag
        size = answer.headers["Content-Length"]
    async with http.head("/v1/images/web-1", headers=accept) as answer:
        assert (answer.status, answer.headers["Content-Length"]) == (200, size)
        assert answer.content_type == "image/avif"
    async with http.head("/v1/images/web-1", headers={"If-None-Match": etag}) as answer:
        assert answer.status == 304


async def test_http_boxes(http: aiohttp.ClientSession, images: ImageClient, vae: Path) -> None:
    """Short names, a crop, and no enlarging."""
    values, info = _latent(vae, 9)
    await images.put("web-1", values, info)
    async with http.get("/v1/images/web-1") as answer:
        etag = answer.headers["ETag"]
    box = {"w": "20", "h": "10", "dpr": "2", "fit": "cover", "gravity": "north", "fm": "png"}
    async with http.get("/v1/images/web-1", params=box) as answer:
        assert imagecodecs.png_decode(await answer.read()).shape == (20, 40, 3)
    async with http.get("/v1/images/web-1", params={"width": "4000"}) as answer:
        assert answer.headers["ETag"] == etag, "it is not enlarged: the same bytes"


async def test_http_puts_on_conditions(http: aiohttp.ClientSession, vae: Path) -> None:
    """Create only, replace only what was seen; of many at once that have seen the same, one."""
    query = {"weights_sha256": weights_digest(vae), "vae_scale_factor": "4"}
    bodies = [save({"latent": torch.from_numpy(_latent(vae, 20 + number)[0])[None]}) for number in range(6)]

    async def put(number: int, **headers: str) -> tuple[int, str]:
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        async with http.put("/v1/images/once", params=query, data=bodies[number], headers=said) as answer:
            return answer.status, answer.headers.get("ETag", "")

    assert (await put(0, If_Match="*"))[0] == 412, "there is none"
    created = await asyncio.gather(*(put(number, If_None_Match="*") for number in range(4)))
    assert sorted(status for status, _ in created) == [201, 412, 412, 412]
    (tag,) = (etag for status, etag in created if status == 201)
    async with http.get("/v1/latents/once") as answer:
        assert answer.headers["ETag"] == tag
    assert (await put(4, If_Match='"another"'))[0] == 412
    replaced = await asyncio.gather(*(put(number, If_Match=tag) for number in (4, 5)))
    assert sorted(status for status, _ in replaced) == [201, 412]
    (now,) = (etag for status, etag in replaced if status == 201)
    async with http.get("/v1/latents/once") as answer:
        assert answer.headers["ETag"] == now != tag


@pytest.mark.parametrize("name", ["shelf/cat.1", "\u732b/\U0001f431 1", "100%25?"])
async def test_http_ids_are_what_a_path_holds(
    http: aiohttp.ClientSession, images: ImageClient, vae: Path, name: str
) -> None:
    """With slashes as they are or escaped; what is escaped twice is another id."""
    values, info = _latent(vae, 30)
    await images.put(name, values, info)
    slashes, escaped = quote(name), quote(name, safe="")
    for path in {slashes, escaped}:
        for kind in ("images", "latents"):
            async with http.get(URL(f"/v1/{kind}/{path}", encoded=True)) as answer:
                assert answer.status == 200, path
    async with http.get(URL(f"/v1/images/{quote(escaped)}", encoded=True)) as answer:
        assert answer.status == 404
    async with http.get(URL("/v1/images?prefix=%FF&after=%ED%A0%80", encoded=True)) as answer:
        assert (await answer.json())["images"] == []
    async with http.get("/v1/images", params={"prefix": name[:-1]}) as answer:
        assert name in [each["id"] for each in (await answer.json())["images"]]
    async with http.delete(URL(f"/v1/images/{escaped}", encoded=True)) as answer:
        assert answer.status == 204


async def test_http_lists_and_deletes(http: aiohttp.ClientSession, images: ImageClient, vae: Path) -> None:
    values, info = _latent(vae, 9)
    for name in ("web-1", "web-2"):
        await images.put(name, values, info)
    async with http.get("/v1/latents/web-1") as answer:
        assert (await answer.read())[:4] == b"QLAT"
    async with http.get("/v1/images", params={"prefix": "web-"}) as answer:
        listed = await answer.json()
        assert ([each["id"] for each in listed["images"]], listed["next"]) == (["web-1", "web-2"], None)
    async with http.get("/v1/images", params={"prefix": "web-", "limit": "1"}) as answer:
        listed = await answer.json()
        assert [each["id"] for each in listed["images"]] == ["web-1"]
    async with http.get("/v1/images", params={"prefix": "web-", "after": listed["next"]}) as answer:
        assert [each["id"] for each in (await answer.json())["images"]] == ["web-2"]
    async with http.delete("/v1/images/web-2") as answer:
        assert answer.status == 204


async def test_http_errors_are_problems(http: aiohttp.ClientSession) -> None:
    cases = [
        (http.get("/v1/images/nothing-here"), 404),
        (http.get("/v1/images/nothing-here", params={"format": "gif"}), 400),
        (http.get("/v1/images/nothing-here", params={"quality": "lots"}), 400),
        (http.get("/v1/images/nothing-here", params={"width": "-1"}), 400),
        (http.get("/v1/images/nothing-here", params={"widht": "1"}), 400),
        (http.get("/v1/images/nothing-here", params={"enlarge": "1"}), 400),
        (http.get("/v1/images/nothing-here", headers={"Accept": "text/html"}), 406),
        (http.get("/v1/images", params={"pre": "x"}), 400),
        (http.get(URL("/v1/images/%FF", encoded=True)), 404),
        (http.get(URL("/v1/images/a%00b", encoded=True)), 400),
        (http.get(URL("/v1/images/a%2F..%2Fb", encoded=True)), 400),
        (http.put("/v1/images/x", data=b"", params={"vea": "x"}), 400),
        (http.put("/v1/images/x", data=b"no latent"), 415),
        (
            http.put(
                "/v1/images/x", params={"shape": "1,2"}, data=b"", headers={"Content-Type": "application/octet-stream"}
            ),
            400,
        ),
        (http.put("/v1/images/x", data=b"", params={"durability": "forever"}), 400),
        (http.delete("/v1/images/nothing-here"), 404),
        (http.post("/v1/images/x"), 405),
        (http.get("/elsewhere"), 404),
    ]
    for request, status in cases:
        async with request as answer:
            text = await answer.text()
            assert answer.status == status, text
            record = json.loads(text)
            assert record["request_id"] == answer.headers["X-Request-Id"]
            assert record["code"] and record["title"] and record["status"] == status
            assert answer.content_type == "application/problem+json"
            assert "Traceback" not in text
            if status == 405:
                assert set(answer.headers["Allow"].split(",")) == {"DELETE", "GET", "HEAD", "PUT"}


async def test_without_a_decoder_what_a_client_has_stays_good(
    cluster: LocalCluster, http: aiohttp.ClientSession, images: ImageClient, vae: Path
) -> None:
    """And who has nothing hears when to ask again."""
    await images.put("seen", *_latent(vae, 90))
    async with http.get("/v1/images/seen") as answer:
        etag = answer.headers["ETag"]
    names = [f"decoder-{number}" for number in range(DECODERS)]
    for name in names:
        cluster.kill(name)
    try:
        async with asyncio.timeout(30):
            while any(node.role is Role.DECODER for node in await images._client.status()):
                await asyncio.sleep(0.05)
        for request in (http.get, http.head):
            async with request("/v1/images/seen", headers={"If-None-Match": f'"x", W/{etag}'}) as answer:
                assert (answer.status, answer.headers["ETag"]) == (304, etag)
        async with http.get("/v1/images/seen") as answer:
            assert (answer.status, answer.headers["X-Quire-Source"]) == (200, "gateway"), "it was just sent"
        async with http.get("/v1/images/seen", params={"width": "7"}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        async with http.get("/v1/images/seen", headers={"If-Match": '"x"'}) as answer:
            assert answer.status == 412
    finally:
        for name in names:
            cluster.restart(name)
    async with http.get("/v1/images/seen") as answer:
        assert (answer.status, answer.headers["ETag"]) == (200, etag)


async def test_bodies_that_are_none_over_http(http: aiohttp.ClientSession, vae: Path) -> None:
    """400 with the reason, and nothing is stored; a latent of an unknown VAE is one of them, until it is allowed."""
    values, _ = _latent(vae, 9)
    query = {"weights_sha256": weights_digest(vae).upper(), "vae_scale_factor": "4"}
    body = save({"latent": torch.from_numpy(values.copy())[None]})

    def tensor(header: str) -> bytes:
        return struct.pack("<Q", len(header)) + header.encode() + body[-2048:]

    bad = {
        "deep": tensor("[" * 100_000),
        "offsets": tensor('{"a":{"dtype":"F16","shape":[4,16,16],"data_offsets":[0.0,2048.0]}}'),
        "booleans": tensor('{"a":{"dtype":"F16","shape":[true,16,64],"data_offsets":[0,2048]}}'),
        "cut": body[:-1],
    }
    for name, content in bad.items():
        async with http.put("/v1/images/bad", params=query, data=content) as answer:
            assert answer.status == 400, name
            assert (await answer.json())["code"] == "InvalidRequest", name
    async with http.put("/v1/images/bad", params=query, data=body, headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 400, await answer.text()
    async with http.put("/v1/images/bad", params=query | {"do_scaling": "perhaps"}, data=body) as answer:
        assert answer.status == 400
    unknown = query | {"weights_sha256": "cd" * 32}
    async with http.put("/v1/images/bad", params=unknown, data=body) as answer:
        assert answer.status == 400 and "no decoder has" in (await answer.json())["detail"]
    async with http.get("/v1/latents/bad") as answer:
        assert answer.status == 404
    async with http.put("/v1/images/archive", params=unknown | {"allow_unknown_vae": "1"}, data=body) as answer:
        assert answer.status == 201
    async with http.put(
        "/v1/images/good", params=query, data=gzip.compress(body), headers={"Content-Encoding": "gzip"}
    ) as answer:
        assert answer.status == 201, await answer.text()
    async with http.get("/v1/vaes") as answer:
        assert weights_digest(vae) in {each["weights_sha256"] for each in (await answer.json())["vaes"]}
