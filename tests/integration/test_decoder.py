"""Decoders with real VAEs and codecs, over the in-memory data plane: spillover, joined requests, failing owners."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import imagecodecs
import numpy as np
import pytest

from quire.client.memory.quarantine import may_be_in_use
from quire.client.memory.remote_memory import PeerTransfers
from quire.model.descriptor import RdmaTarget
from quire.model.errors import (
    ChunkMissing,
    CorruptData,
    DeadlineExceeded,
    InvalidRequest,
    NodeUnavailable,
    NoStorageNode,
    NotImplementedHere,
    PeerLost,
    QuireError,
)
from quire.model.images import ImageEntry, LeasedRecord, Rendering
from quire.model.latents import LatentInfo, Vae, encode_record
from quire.model.nodes import KnownVae
from quire.transport.memory import MemoryTransport
from quire_decoder.adapters.encoding import ImagecodecsEncoder
from quire_decoder.adapters.encoding_process import EncodingProcess
from quire_decoder.adapters.engines import make_engine
from quire_decoder.adapters.pictures import read_picture
from quire_decoder.adapters.vae import DiffusersVaes, VaeSettings
from quire_decoder.adapters.weights import find_weights, weights_digest
from quire_decoder.cache import Cache
from quire_decoder.config import DecoderConfig
from quire_decoder.ports import CachedForm, Decoded, Pixels
from quire_decoder.runtime import Decoder, _Kept
from quire_server.clock import SystemClock
from tests.polling import eventually
from tests.unit.decoder.small_vae import write_small_vae

PNG = Rendering("png")


@dataclass
class Records:
    """The chunk store, as far as a decoder sees it."""

    held: dict[bytes, bytes] = field(default_factory=dict)
    fetches: int = 0
    gate: asyncio.Event | None = None
    fails: QuireError | None = None

    def put(self, name: str, record: bytes, info: LatentInfo) -> ImageEntry:
        digest = hashlib.sha256(record).digest()
        self.held[digest] = record
        from quire.model.latents import read_info

        return ImageEntry(
            name, digest, len(record), read_info(record).sha256, info.vae.weights_sha256, info.height, info.width
        )

    async def fetch(self, entry: ImageEntry, leased: LeasedRecord) -> bytes:
        self.fetches += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        try:
            return self.held[entry.record_sha256]
        except KeyError:
            raise ChunkMissing("gone") from None


@dataclass
class Owners:
    """Other decoders, by address."""

    decoders: dict[str, Decoder] = field(default_factory=dict)
    away: bool = False

    def _of(self, address: str) -> Decoder:
        if self.away:
            raise NodeUnavailable(address)
        return self.decoders[address]

    async def read_cached(self, address: str, entry: ImageEntry, target: RdmaTarget) -> CachedForm | None:
        return await self._of(address).read_cached(entry, target)

    async def write_back(
        self,
        address: str,
        entry: ImageEntry,
        record: tuple[RdmaTarget, int] | None,
        image: tuple[RdmaTarget, int] | None,
        build: str = "",
    ) -> None:
        await self._of(address).write_back(entry, record, image, build=build)


@dataclass
class Scene:
    records: Records
    owners: Owners
    home: Decoder
    other: Decoder
    vae: Path


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae")
    write_small_vae(folder)
    return folder


@pytest.fixture
async def scene(vae: Path) -> AsyncIterator[Scene]:
    records, owners, transports = Records(), Owners(), []
    for name in ("home", "other"):
        transport = MemoryTransport()
        await transport.start()
        transports.append(transport)
        owners.decoders[name] = Decoder(
            config=DecoderConfig(cache_bytes=1 << 20),
            records=records,
            vaes=[DiffusersVaes(find_weights([vae]), make_engine("auto", "cpu"), VaeSettings())],
            encoder=ImagecodecsEncoder(),
            make_encoder_process=partial(EncodingProcess, 1 << 30, 60.0),
            read_picture=read_picture,
            remote_memory=PeerTransfers(transport),
            owners=owners,
            clock=SystemClock(),
        )
    yield Scene(records, owners, owners.decoders["home"], owners.decoders["other"], vae)
    for decoder in owners.decoders.values():
        decoder.close()
    for transport in transports:
        await transport.close()


def _image(scene: Scene, seed: int, name: str = "x") -> ImageEntry:
    values = np.random.default_rng(seed).normal(size=(4, 8, 8)).astype(np.float16)
    info = LatentInfo((4, 8, 8), "float16", Vae("tiny", "", weights_digest(scene.vae)), 16, 16)
    return scene.records.put(name, encode_record(values, info), info)


def _pixels(image: bytes) -> Pixels:
    return np.asarray(imagecodecs.png_decode(image))


async def test_work_moves_and_the_cache_entry_stays_at_home(scene: Scene) -> None:
    """Decoded elsewhere: the owner keeps the latent, then the image; the other one nothing."""
    entry = _image(scene, 1)
    got = [await scene.other.serve(entry, PNG, "home") for _ in range(3)]
    assert [each.source for each in got] == ["miss", "latent", "image"]
    assert len({each.image for each in got}) == 1
    assert scene.records.fetches == 1, "the latent is shipped along"
    small = await scene.other.serve(entry, Rendering("jpeg", width=8), "home")
    assert small.source == "image"
    assert scene.home.stats["cache.image_bytes"] > 0 < scene.home.stats["cache.latent_bytes"]
    assert scene.other.stats["cache.bytes"] == 0
    at_home = await scene.home.serve(entry, PNG, "")
    assert at_home.source == "image"
    assert at_home.image == got[0].image


async def test_what_is_cached_takes_no_decoding(scene: Scene) -> None:
    """Every request counts at the owner, whether it has anything; a rendition is encoded once."""
    entry, small = _image(scene, 11), Rendering("jpeg", width=8)
    assert await scene.home.serve_cached(entry, small) is None
    served = await scene.home.serve(entry, small)
    assert served.source == "miss"
    again = await scene.home.serve_cached(entry, small)
    assert again is not None and (again.source, again.image, again.stages_us) == ("rendition", served.image, {})
    async with asyncio.timeout(20):
        while not scene.home.stats["cache.image_bytes"]:  # made after the answer
            await asyncio.sleep(0.01)
    other = await scene.home.serve_cached(entry, Rendering("jpeg", width=9))
    assert other is not None and other.source == "image"
    made = await scene.home._make(entry, LeasedRecord(), {}, "")
    assert isinstance(made, _Kept), "a decode that begins when the image has just been kept is none"
    lossless = await scene.home.serve_cached(entry, PNG)
    assert lossless is not None and _pixels(lossless.image).shape == (16, 16, 3)
    stats = scene.home.stats
    assert (stats["requests"], stats["hits.rendition"], stats["hits.image"], stats["misses"]) == (4, 1, 2, 1)


async def test_an_owner_that_is_away_costs_its_cache_only(scene: Scene) -> None:
    entry = _image(scene, 2)
    scene.owners.away = True
    served = await scene.other.serve(entry, PNG, "home")
    assert served.source == "miss"
    assert _pixels(served.image).shape == (16, 16, 3)


async def test_requests_for_one_image_join(scene: Scene) -> None:
    """In whatever format; one that gives up while others wait ends no other."""
    entry = _image(scene, 3)
    scene.records.gate = asyncio.Event()
    first = asyncio.create_task(scene.home.serve(entry, PNG, ""))
    await asyncio.sleep(0)
    joined = [asyncio.create_task(scene.home.serve(entry, Rendering(name), "")) for name in ("png", "webp", "jpeg")]
    await asyncio.sleep(0)
    joined[0].cancel()
    scene.records.gate.set()
    async with asyncio.timeout(20):
        served = await first
        others = await asyncio.gather(*joined[1:])
    assert scene.records.fetches == 1
    assert [each.source for each in others] == ["joined"] * 2
    assert np.array_equal(imagecodecs.webp_decode(others[0].image)[..., :3], _pixels(served.image))
    assert scene.home.stats["joined"] == 3


async def test_a_failure_ends_those_that_joined_and_no_others(scene: Scene) -> None:
    entry = _image(scene, 4)
    record = scene.records.held.pop(entry.record_sha256)
    scene.records.gate = asyncio.Event()
    waiting = [asyncio.create_task(scene.home.serve(entry, PNG, "")) for _ in range(3)]
    await asyncio.sleep(0)
    scene.records.gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, ChunkMissing) for result in results)
    scene.records.held[entry.record_sha256] = record
    assert (await scene.home.serve(entry, PNG, "")).source == "miss", "the next one tries anew"


async def test_the_decode_that_was_waited_for_is_given_up(scene: Scene) -> None:
    """Its client went away: those that joined get the image all the same."""
    entry = _image(scene, 5)
    scene.records.gate = asyncio.Event()
    first = asyncio.create_task(scene.home.serve(entry, PNG, ""))
    await asyncio.sleep(0)
    second = asyncio.create_task(scene.home.serve(entry, PNG, ""))
    await asyncio.sleep(0)
    first.cancel()
    scene.records.gate.set()
    async with asyncio.timeout(20):
        assert (await second).source == "joined"
    assert scene.records.fetches == 1


async def test_damaged_records_and_lying_neighbours(scene: Scene) -> None:
    """A record that is not the entry's is never shown, and never kept."""
    entry, other = _image(scene, 6), _image(scene, 7, "y")
    right = scene.records.held[entry.record_sha256]
    scene.records.held[entry.record_sha256] = scene.records.held[other.record_sha256]
    with pytest.raises(CorruptData):
        await scene.home.serve(entry, PNG, "")
    scene.records.held[entry.record_sha256] = right[:-3]
    with pytest.raises(QuireError):
        await scene.home.serve(entry, PNG, "")
    scene.records.held[entry.record_sha256] = right
    assert (await scene.home.serve(entry, PNG, "")).image


@pytest.mark.parametrize("error", [NodeUnavailable("away"), PeerLost("cut"), DeadlineExceeded("slow")])
async def test_storage_that_fails_is_not_the_decoders_failure(scene: Scene, error: QuireError) -> None:
    """Nothing was written for the caller, and the decoder is well: both must show in the error."""
    entry = _image(scene, 70, "unread")
    scene.records.fails = error
    with pytest.raises(NoStorageNode) as raised:
        await scene.home.serve(entry, PNG, "")
    assert not may_be_in_use(raised.value)
    scene.records.fails = None
    assert (await scene.home.serve(entry, PNG, "")).image


@pytest.mark.parametrize("kind", ["forms", "latentbox"])
@pytest.mark.parametrize("cache_bytes", [1 << 20, 20_000])
async def test_the_cache_holds_what_it_says(scene: Scene, cache_bytes: int, kind: str) -> None:
    """Also where hardly anything fits."""
    home = scene.home
    home._cache = Cache(DecoderConfig(cache=kind, cache_bytes=cache_bytes, cache_history=64))
    entries = [_image(scene, seed, f"n{seed}") for seed in range(100, 130)]
    rng = np.random.default_rng(3)
    for _ in range(200):
        wanted = [entries[min(29, int(rng.exponential(6)))] for _ in range(3)]
        rendering = Rendering("jpeg", width=int(rng.integers(8, 16)))
        for entry in wanted:
            await home.serve_cached(entry, rendering)
        await asyncio.gather(*(home.serve(entry, rendering, "") for entry in wanted))
        held = home._cache._bytes
        assert home.stats["cache.bytes"] == sum(map(len, held.values())) <= cache_bytes
        assert len(held) == len(home._cache._cache)


async def test_a_record_that_promises_more_than_the_vae_makes(scene: Scene) -> None:
    """Few bytes, a huge decode: refused before the device sees it."""
    values = np.zeros((4, 512, 512), dtype=np.float16)
    info = LatentInfo((4, 512, 512), "float16", Vae("tiny", "", weights_digest(scene.vae)), 512, 512)
    record = encode_record(values, info)
    assert len(record) < 5000
    with pytest.raises(InvalidRequest, match="shape"):
        await scene.home.serve(scene.records.put("bomb", record, info), PNG, "")
    packed = replace(info, layout="packed", height=1024, width=1024)
    with pytest.raises(NotImplementedHere):
        await scene.home.serve(scene.records.put("packed", encode_record(values, packed), packed), PNG, "")


async def test_what_is_wanted_no_more_is_not_decoded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record comes all the same; the device is not asked, and who comes next begins anew."""
    device = scene.home._pipeline.devices
    asked, decode = list[str](), device.decode

    async def counted(latent: Any, info: LatentInfo, tenant: str) -> Any:
        asked.append(info.vae.repository)
        return await decode(latent, info, tenant)

    monkeypatch.setattr(device, "decode", counted)
    entry = _image(scene, 8)
    scene.records.gate = asyncio.Event()
    waiting = [asyncio.create_task(scene.home.serve(entry, PNG, "")) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert not scene.home._running
    scene.records.gate.set()
    async with asyncio.timeout(20):
        assert (await scene.home.serve(entry, PNG, "")).source == "miss"
    assert len(asked) == 1 and scene.records.fetches == 2


class Rebuilding:
    """A `VaeRunner` with a build of its own: with a `suffix` its pixels are inverted."""

    def __init__(self, vae: DiffusersVaes) -> None:
        self._vae, self.suffix, self.lanes = vae, "", 1

    @property
    def build(self) -> str:
        return self._vae.build + self.suffix

    @property
    def known(self) -> tuple[KnownVae, ...]:
        return self._vae.known

    def encode(self, pixels: Pixels, weights_sha256: str) -> Any:
        return self._vae.encode(pixels, weights_sha256)

    def close(self) -> None:
        self._vae.close()

    def decode(self, latents: Any, info: LatentInfo) -> Decoded:
        decoded = self._vae.decode(latents, info)
        if not self.suffix:
            return replace(decoded, build=self.build)
        return replace(decoded, pixels=[255 - pixels for pixels in decoded.pixels], build=self.build)


async def test_pixels_of_an_earlier_build_are_not_served(scene: Scene) -> None:
    """After an engine was built, earlier images and renditions are evicted, also for other decoders; latents stay."""
    vaes = []
    for decoder in (scene.home, scene.other):
        devices = decoder._pipeline.devices
        vaes.append(Rebuilding(cast(DiffusersVaes, devices._runners[0])))
        lanes = [replace(lane, runner=vaes[-1]) for lane in devices._idle]
        devices._idle, devices._lanes, devices._runners = lanes, tuple(lanes), [vaes[-1]]
    entry, small = _image(scene, 77), Rendering("png", width=8)
    plain = [await scene.home.serve(entry, PNG) for _ in range(2)]
    rendition = await scene.home.serve(entry, small)
    assert plain[1].source == "image" and plain[0].build == plain[1].build == rendition.build == scene.home.build
    vaes[0].suffix = ", another"
    await scene.home.serve(_image(scene, 79), PNG)  # the first batch of the new build
    assert await scene.home.serve_cached(entry, PNG) is None and await scene.home.serve_cached(entry, small) is None
    inverted = await scene.home.serve(entry, PNG)
    assert inverted.source == "latent" and inverted.build == scene.home.build != plain[0].build
    assert np.array_equal(_pixels(inverted.image), 255 - _pixels(plain[0].image))
    await eventually(lambda: scene.home.stats["cache.image_bytes"] > 0, "the new image is kept")
    elsewhere = await scene.other.serve(entry, PNG, "home")
    assert elsewhere.image == plain[0].image and elsewhere.build == plain[0].build, "of the other decoder's own build"
    at_home = await scene.home.serve(entry, PNG)
    assert at_home.source == "image" and at_home.image == inverted.image, "what the other one made is not kept here"


async def test_an_image_that_was_made_before_another_build_is_not_kept(scene: Scene) -> None:
    entry = _image(scene, 78)
    served = await scene.home.serve(entry, PNG)
    image = np.frombuffer(served.image, np.uint8)
    memory = scene.home._remote_memory
    await eventually(lambda: scene.home.stats["cache.image_bytes"] > 0, "it is kept")
    scene.home._cache.forget_pixels()
    for build, is_kept in (("another", False), (served.build, True)):
        with memory.lend(image.tobytes()) as target:
            await scene.home.write_back(entry, None, (target, len(image)), build=build)
        assert (scene.home.stats["cache.image_bytes"] > 0) == is_kept
