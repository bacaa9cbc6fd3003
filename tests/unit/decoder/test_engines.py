"""Ways to run a VAE make the same picture, by a step of 255 at most; those that cannot run here say so at the start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.model.errors import ConfigInvalid
from quire.model.latents import denormalised
from quire_bench.decoder.fidelity import psnr, ssim
from quire_decoder.adapters.engines import make_engine
from quire_decoder.adapters.vae import DiffusersVaes
from quire_decoder.errors import DeviceFull
from quire_tools.local.pictures import VAE_FOLDER, encode, pictures


@pytest.mark.parametrize("engine", ["eager", "channels_last", "compile", "graphs"])
def test_engines_make_the_same_picture(engine: str) -> None:
    if engine == "compile" and (shutil.which("g++") is None or not os.environ.get("QUIRE_TEST_LONG")):
        pytest.skip("torch.compile needs a compiler, and a while: make chaos runs it")
    device = "cuda" if engine == "graphs" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    originals = pictures(3, 64)
    latents = encode(originals)
    info = latents[0][1]
    inputs = [denormalised(*latent) for latent in latents]
    reference = DiffusersVaes([VAE_FOLDER], "cpu", 1 << 30, "eager")
    other = DiffusersVaes([VAE_FOLDER], device, 1 << 30, engine)
    assert reference.build != other.build or engine == "eager"
    for _ in range(2):
        alone = [other.decode([latent], info)[0] for latent in inputs]
        for made, latent, original in zip(alone, inputs, originals, strict=True):
            expected = reference.decode([latent], info)[0]
            assert int(np.abs(made.astype(int) - expected).max()) <= 1
            assert psnr(made, original) > 15, "a recognisable picture"


def test_what_cannot_run_here_is_found_at_the_start() -> None:
    for name in ("graphs", "tensorrt", "magic"):
        if name == "graphs" or shutil.which("trtexec") is None:
            with pytest.raises(ConfigInvalid):
                make_engine(name, "cpu")
    with pytest.raises(ConfigInvalid):
        DiffusersVaes([Path("/nowhere")], "cpu", 1 << 30)


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
    originals = pictures(2, 512)
    latents = encode(originals)
    info = latents[0][1]
    inputs = [denormalised(*latent) for latent in latents]
    whole = DiffusersVaes([VAE_FOLDER], "cpu", 1 << 30, "eager")
    tiling = DiffusersVaes([VAE_FOLDER], "cpu", 1 << 30, "eager", decode_bytes=1 << 20)
    assert whole.build != tiling.build, "their pixels differ: neither decodes for the other"
    made = tiling.decode(inputs[:1], info)[0]
    assert psnr(made, whole.decode(inputs[:1], info)[0]) > 30
    with pytest.raises(DeviceFull, match="QUIRE_DECODER_DECODE_BYTES"):
        tiling.decode(inputs, info)
