"""A diffusers pipeline whose latents are kept: tiny and random, but the real classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from quire.client import ImageClient, QuireClient
from quire.integrations.diffusers import LatentKeeper
from quire.model.errors import InvalidRequest
from quire_decoder.adapters.vae import weights_digest
from quire_tools.local import LocalCluster

STEPS = 3
Kl: Any = AutoencoderKL


class TinyPipeline:
    """What a latent diffusion pipeline does, with a real VAE and a real callback: noise, a few steps, latents.

    (Text encoders and a UNet of millions of weights would add nothing that is seen here.)
    """

    vae_scale_factor = 8

    def __init__(self, vae: Any, folder: Path) -> None:
        self.vae, self.name_or_path = vae, str(folder)

    def __call__(self, batch: int, callback_on_step_end: Any, dtype: torch.dtype) -> torch.Tensor:
        latents = torch.randn(batch, 4, 8, 8).to(dtype)
        for step in range(STEPS):
            latents = latents * 0.9
            latents = callback_on_step_end(self, step, torch.tensor(step), {"latents": latents})["latents"]
        return latents


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small AutoencoderKL, as SD has one: ×8, four channels, scaling factor."""
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("pipeline")
    Kl(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.18215,
    ).save_pretrained(folder / "vae")
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, vae_folder: Path) -> Iterator[LocalCluster]:
    settings = {"QUIRE_DECODER_MODELS": str(vae_folder / "vae")}
    with LocalCluster(tmp_path_factory.mktemp("diffusers"), arena_bytes=128 << 20, settings=settings) as running:
        yield running


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
async def test_a_pipelines_latents_are_kept_and_decode_to_its_pixels(
    cluster: LocalCluster, vae_folder: Path, dtype: torch.dtype
) -> None:
    """Stored as they are; what comes back as PNG is what the pipeline's own VAE makes of them."""
    import imagecodecs

    vae: Any = Kl.from_pretrained(vae_folder / "vae").eval()
    pipeline = TinyPipeline(vae, vae_folder)
    async with QuireClient(cluster.gateway_address) as client:
        images = ImageClient(client)
        keeper = LatentKeeper(pipeline, images)
        with pytest.raises(InvalidRequest, match="not run"):
            await keeper.store("early")
        latents = pipeline(2, keeper, dtype)
        name = str(dtype).removeprefix("torch.")
        entries = await keeper.store(name)
        assert [entry.image_id for entry in entries] == [f"{name}-0", f"{name}-1"]
        assert entries[0].weights_sha256 == weights_digest(vae_folder / "vae")
        for index, entry in enumerate(entries):
            with torch.inference_mode():
                sample = vae.decode(latents[index : index + 1].float() / 0.18215).sample[0]
            expected = ((sample / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            image = await images.get(entry.image_id)
            difference = np.abs(imagecodecs.png_decode(image.data).astype(int) - expected)
            assert difference.max() <= 1, "another division may round a level differently"
            _, info = await images.get_latent(entry.image_id)
            assert info.vae.class_name == "AutoencoderKL"
            assert info.normalisation.scaling_factor == pytest.approx(0.18215)
            assert info.versions["torch"] == torch.__version__
