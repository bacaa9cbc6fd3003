"""Ways to run a VAE make the same picture, by a step of 255 at most; those that cannot run here say so at the start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.model.errors import ConfigInvalid
from quire.model.latents import LatentInfo, denormalised
from quire.testing.devices import LateDevice
from quire.transport.devices import CopyStream, Event, copy_stream
from quire_bench.decoder.quality import psnr, ssim
from quire_decoder.adapters import loading
from quire_decoder.adapters.engines import Decode, RecordedShapes, make_engine
from quire_decoder.adapters.loading import _chosen
from quire_decoder.adapters.vae import DiffusersVaes, VaeSettings, device_names
from quire_decoder.adapters.weights import find_weights
from quire_decoder.core.precision import candidates, error_of, is_small
from quire_decoder.errors import DeviceFull
from quire_tools.local.pictures import VAE_FOLDER, encode, landscapes
from tests.unit.decoder.small_vae import SCALE, random_latents, small_vae


def _vaes(engine: str = "eager", streams: Callable[[Any], CopyStream] = copy_stream, **settings: Any) -> DiffusersVaes:
    device = settings.get("device", "cpu")
    return DiffusersVaes(find_weights([VAE_FOLDER]), make_engine(engine, device), VaeSettings(**settings), streams)


@functools.cache
def _latents(count: int, side: int) -> tuple[list[Any], LatentInfo]:
    latents = encode(landscapes(count, side))
    return [denormalised(*latent) for latent in latents], latents[0][1]


@pytest.mark.parametrize("engine", ["eager", "channels_last", "graphs"])
def test_engines_make_the_same_picture(engine: str) -> None:
    device = "cuda:0" if engine == "graphs" else "cpu"
    if engine == "graphs" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    originals = landscapes(3, 64)
    inputs, info = _latents(3, 64)
    reference, vaes = _vaes(), _vaes(engine, device=device)
    assert reference.build != vaes.build or engine == "eager"
    for _ in range(2):
        alone = [vaes.decode([latent], info).pixels[0] for latent in inputs]
        for made, latent, original in zip(alone, inputs, originals, strict=True):
            expected = reference.decode([latent], info).pixels[0]
            assert int(np.abs(made.astype(int) - expected).max()) <= 1
            assert psnr(made, original) > 15, "a recognisable picture"


def test_what_cannot_run_here_is_found_at_the_start() -> None:
    for name in ("graphs", "tensorrt", "magic"):
        with pytest.raises(ConfigInvalid):
            make_engine(name, "cpu")
    with pytest.raises(ConfigInvalid):
        find_weights([Path("/nowhere")])
    for device in ("cuda:97", "tpu"):
        with pytest.raises(ConfigInvalid, match=device):
            device_names(device)
    if not torch.cuda.is_available():
        assert device_names("auto") == device_names("cpu") == ["cpu"]
        with pytest.raises(ConfigInvalid, match="no CUDA device"):
            device_names("cuda")


class LateCopies(LateDevice):
    """Copies that run late, for a decoder that runs at once."""

    def order(self, event: Event) -> None:
        event.synchronize()


class Unordered(LateCopies):
    """A device whose decoder does not wait for its latents."""

    def order(self, event: Event) -> None:
        pass


def test_copies_are_waited_for() -> None:
    """Latents arrive before they are decoded, and pixels before they are returned."""
    inputs, info = _latents(2, 64)
    expected = _vaes().decode(inputs, info).pixels
    pixels = _vaes(streams=lambda device: LateCopies()).decode(inputs, info).pixels
    assert all(np.array_equal(*pair) for pair in zip(pixels, expected, strict=True))
    with pytest.raises(IndexError):
        _vaes(streams=lambda device: Unordered()).decode(inputs, info)


def test_pixels_are_read_behind_their_event() -> None:
    """The returned bytes differ without the wait, so the comparison above finds a missing wait."""
    inputs, info = _latents(2, 64)
    expected = _vaes().decode(inputs, info).pixels
    vaes = _vaes(streams=lambda device: LateCopies())
    batch = vaes._begin(inputs, info)
    early = batch.pixels.numpy().copy()
    batch.copied.synchronize()
    assert all(np.array_equal(*pair) for pair in zip(batch.pixels.numpy(), expected, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(early, expected, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_number_format_makes_other_pixels(dtype: str) -> None:
    inputs, info = _latents(1, 64)
    exact, rounded = _vaes(), _vaes(dtype=dtype)
    assert dtype in rounded.build and exact.build != rounded.build
    assert 25 < psnr(rounded.decode(inputs, info).pixels[0], exact.decode(inputs, info).pixels[0]) < 90


def test_auto_takes_the_first_format_whose_pictures_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 overflows in VAEs that say `force_upcast`, and in some that do not."""
    assert candidates("record", record="bfloat16", force_upcast=True, device_type="cuda") == ("bfloat16",)
    assert candidates("auto", record="float16", force_upcast=False, device_type="cpu") == ("float32",)
    assert candidates("auto", record="float32", force_upcast=True, device_type="cuda")[0] == "bfloat16"
    assert candidates("auto", record="float32", force_upcast=False, device_type="cuda")[0] == "float16"
    exact = np.zeros((4, 4, 3), np.uint8)
    assert is_small(error_of(exact, exact)) and not is_small(error_of(exact + np.uint8(9), exact))
    (about,) = find_weights([VAE_FOLDER]).values()
    monkeypatch.setattr(
        "quire_decoder.adapters.loading.candidates", lambda *_, **__: ("float16", "bfloat16", "float32")
    )
    measured = loading._measured
    monkeypatch.setattr(
        loading, "_measured", lambda vae, *rest: (measured(vae, *rest)[0], vae.dtype is not torch.float16)
    )
    monkeypatch.setattr("quire_decoder.core.precision._PSNR_MIN_DB", 10.0)
    chosen, error = _chosen(about, "auto", "float32", torch.device("cpu"))
    assert chosen.dtype is torch.bfloat16 and error is not None
    monkeypatch.setattr("quire_decoder.core.precision._PSNR_MIN_DB", 99.0)
    chosen, _ = _chosen(about, "auto", "float32", torch.device("cpu"))
    assert chosen.dtype is torch.float32, "none is near enough"


@dataclass
class Recorded:
    """A recording that decodes anew, and counts."""

    decode: Decode
    size: int
    replays: int = 0

    def replay(self, latents: Any) -> Any:
        self.replays += 1
        return self.decode(latents)


def test_recordings_are_bounded_by_their_memory() -> None:
    """100 bytes for each value of a latent's side: of three sides two fit together, and one fits never."""
    recorded: dict[int, list[Recorded]] = {}
    given_up = 0

    def record(decode: Decode, latents: Any) -> Recorded:
        side = latents.shape[-1]
        recording = Recorded(decode, 100 * side)
        recorded.setdefault(side, []).append(recording)
        return recording

    def released() -> None:
        nonlocal given_up
        given_up += 1

    vaes = DiffusersVaes(small_vae(), engine := RecordedShapes(2500, record, released), VaeSettings())
    plain = DiffusersVaes(small_vae(), make_engine("eager", "cpu"), VaeSettings())
    for side in (8, 16, 8, 8, 16, 4, 32, 32, 8):
        inputs, info = random_latents(1, SCALE * side)
        assert np.array_equal(vaes.decode(inputs, info).pixels[0], plain.decode(inputs, info).pixels[0])
        assert engine._recordings.bytes <= 2500
    assert {side: len(recordings) for side, recordings in recorded.items()} == {8: 2, 16: 1, 4: 1, 32: 1}
    assert [recording.replays for recording in recorded[8]] == [3, 1] and given_up == 2


def test_recordings_leave_with_the_weights_that_they_read() -> None:
    """A reloaded VAE has its weights at other addresses: an old recording would read another VAE's memory."""
    recorded: list[Recorded] = []

    def record(decode: Decode, latents: Any) -> Recorded:
        recorded.append(Recorded(decode, 100))
        return recorded[-1]

    engine = RecordedShapes(2500, record)
    vaes = DiffusersVaes(small_vae() | find_weights([VAE_FOLDER]), engine, VaeSettings(bytes_max=1))
    small, demo = random_latents(1, 16), _latents(1, 64)
    for inputs, info in (small, demo, small, small):
        vaes.decode(inputs, info)
        assert len(engine._recordings) == 1, "of the VAE that is loaded"
    assert [recording.replays for recording in recorded] == [1, 1, 2]
    with pytest.raises(DeviceFull), vaes._memory_for(small[0]):
        raise RuntimeError("cannot allocate memory")
    assert not len(engine._recordings)


def test_measures_of_fidelity() -> None:
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
    assert psnr(image, image) == float("inf")
    assert ssim(image, image) == pytest.approx(1.0)
    off_by_one = np.where(image < 255, image + 1, 254).astype(np.uint8)
    assert psnr(image, off_by_one) == pytest.approx(48.13, abs=0.01)
    noisy = np.clip(image + rng.normal(0, 40, image.shape), 0, 255).astype(np.uint8)
    assert ssim(image, noisy) < ssim(image, off_by_one) < 1
    flat = np.full((40, 50, 3), 100, np.uint8)
    # Without variance or covariance only luminance is left: (2·100·110 + C1) / (100² + 110² + C1).
    c1 = (0.01 * 255) ** 2
    assert ssim(flat, flat + np.uint8(10)) == pytest.approx((22000 + c1) / (22100 + c1))


def test_an_image_too_large_for_its_memory_is_decoded_in_tiles() -> None:
    """Finding 19: the estimate keeps the decoder alive; tiles make nearly the same picture."""
    inputs, info = _latents(2, 512)
    reference, tiling = _vaes(), _vaes(decode_bytes=1 << 20)
    assert reference.build != tiling.build, "their pixels differ: neither decodes for the other"
    pixels = tiling.decode(inputs[:1], info).pixels[0]
    assert psnr(pixels, reference.decode(inputs[:1], info).pixels[0]) > 30
    with pytest.raises(DeviceFull, match="QUIRE_DECODER_DECODE_BYTES"):
        tiling.decode(inputs, info)
