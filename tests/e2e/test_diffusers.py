"""Latents of diffusers pipelines, kept and decoded, for each family of VAEs: tiny and random, but the real classes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import diffusers
import imagecodecs
import numpy as np
import pytest
import torch

from quire.client import AsyncClient, ImageClient
from quire.integrations.diffusers import LatentKeeper
from quire.model.errors import ConfigInvalid, InvalidRequest
from quire_decoder.adapters.weights import weights_digest
from quire_tools.local import LocalCluster

STEPS = 3
_KL: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 8, 8),
    "norm_num_groups": 4,
}
_DC: dict[str, Any] = {
    "in_channels": 3,
    "attention_head_dim": 8,
    "encoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
    "decoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
    "encoder_block_out_channels": [8, 8, 16],
    "decoder_block_out_channels": [8, 8, 16],
    "encoder_layers_per_block": [1, 1, 1],
    "decoder_layers_per_block": [1, 1, 1],
    "encoder_qkv_multiscales": [[], [], []],
    "decoder_qkv_multiscales": [[], [], []],
}
_FLUX2: dict[str, Any] = _KL | {"latent_channels": 32, "use_quant_conv": True, "use_post_quant_conv": True}
_WAN: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "z_dim": 16}
_VIDEO = ("AutoencoderKLQwenImage", "AutoencoderKLWan")
_QWEN: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "z_dim": 16}


@dataclass(frozen=True)
class Family:
    """A VAE as the family has one, and how its pipeline decodes: `undo` makes what the VAE takes of planes."""

    vae: str
    config: dict[str, Any]
    channels: int
    scale: int
    undo: Callable[[torch.Tensor], torch.Tensor]
    packed: bool = False


Flux2: Any = diffusers.Flux2Pipeline
_MEANS, _DEVIATIONS = [0.1 * each - 0.8 for each in range(16)], [1.0 + 0.1 * each for each in range(16)]


def _qwen(latents: torch.Tensor) -> torch.Tensor:
    """As QwenImagePipeline writes it."""
    mean, inverse = (torch.tensor(each).view(1, 16, 1, 1) for each in (_MEANS, [1 / each for each in _DEVIATIONS]))
    return latents / inverse + mean


FAMILIES = {
    "sd-1.5": Family(
        "AutoencoderKL", _KL | {"latent_channels": 4, "scaling_factor": 0.18215}, 4, 8, lambda z: z / 0.18215
    ),
    "sdxl": Family(
        "AutoencoderKL",
        _KL | {"latent_channels": 4, "scaling_factor": 0.13025, "force_upcast": True},
        4,
        8,
        lambda z: z / 0.13025,
    ),
    "sd-3.5": Family(
        "AutoencoderKL",
        _KL
        | {"latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609, "use_quant_conv": False}
        | {"use_post_quant_conv": False},
        16,
        8,
        lambda z: z / 1.5305 + 0.0609,
    ),
    "flux.1": Family(
        "AutoencoderKL",
        _KL
        | {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False}
        | {"use_post_quant_conv": False},
        16,
        8,
        lambda z: z / 0.3611 + 0.1159,
        packed=True,
    ),
    "taesd": Family(
        "AutoencoderTiny",
        {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
        | {"num_encoder_blocks": (1,) * 4, "num_decoder_blocks": (1,) * 4},
        4,
        8,
        lambda z: z,
    ),
    "sana": Family(
        "AutoencoderDC", _DC | {"latent_channels": 8, "scaling_factor": 0.41407}, 8, 4, lambda z: z / 0.41407
    ),
    "qwen-image": Family(
        "AutoencoderKLQwenImage",
        _QWEN | {"latents_mean": _MEANS, "latents_std": _DEVIATIONS},
        16,
        8,
        _qwen,
        packed=True,
    ),
    "flux.2": Family("AutoencoderKLFlux2", _FLUX2, 32, 8, lambda z: z, packed=True),
    "wan-2.2": Family(
        "AutoencoderKLWan",
        _WAN
        | {"latents_mean": _MEANS, "latents_std": _DEVIATIONS, "patch_size": 2, "scale_factor_spatial": 16}
        | {"in_channels": 12, "out_channels": 12, "is_residual": True},
        16,
        16,
        _qwen,
    ),
    "wan-2.1": Family("AutoencoderKLWan", _WAN | {"latents_mean": _MEANS, "latents_std": _DEVIATIONS}, 16, 8, _qwen),
}


class TinyPipeline:
    """What a latent diffusion pipeline does, with a real VAE, real packing and a real callback: noise, a few steps,
    latents. (Text encoders and a denoiser of millions of weights would add nothing that is seen here.)
    """

    def __init__(self, family: Family, folder: Path, *, vae: Any = None) -> None:
        self.family, self.name_or_path = family, str(folder)
        self.vae: Any = vae or getattr(diffusers, family.vae).from_pretrained(folder / "vae").eval()
        if family.vae == "AutoencoderKLWan":
            self.vae_scale_factor_spatial = family.scale
        else:
            self.vae_scale_factor = family.scale

    def __call__(self, batch: int, callback_on_step_end: Any, dtype: torch.dtype) -> torch.Tensor:
        """The planes, whatever the callback sees of them."""
        planes = torch.randn(batch, self.family.channels, 8, 12).to(dtype)
        if self.family.vae == "AutoencoderKLFlux2":
            planes = Flux2._patchify_latents(planes)
        for step in range(STEPS):
            planes = planes * 0.9
            latents = planes
            if self.family.vae == "AutoencoderKLFlux2":
                latents = Flux2._pack_latents(planes)
            elif self.family.packed:
                packing: Any = diffusers.FluxPipeline
                latents = packing._pack_latents(planes, *planes.shape)
            elif self.family.vae == "AutoencoderKLWan":
                latents = planes[:, :, None]
            callback_on_step_end(self, step, torch.tensor(step), {"latents": latents})
        return planes

    def pixels(self, planes: torch.Tensor) -> Any:
        """Of one latent, as the pipeline makes them."""
        latents = self.family.undo(planes.float()[None])
        if self.family.vae in _VIDEO:
            latents = latents[:, :, None]
        elif self.family.vae == "AutoencoderKLFlux2":  # as Flux2Pipeline writes it
            deviations = torch.sqrt(self.vae.bn.running_var.view(1, -1, 1, 1) + self.vae.config.batch_norm_eps)
            latents = Flux2._unpatchify_latents(latents * deviations + self.vae.bn.running_mean.view(1, -1, 1, 1))
        with torch.inference_mode():
            sample = self.vae.decode(latents, return_dict=False)[0]
        sample = sample[:, :, 0] if sample.ndim == 5 else sample
        return ((sample[0] / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


class Flux2TinyPipeline(TinyPipeline):
    """Named as those whose latents are laid out so."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pipelines as diffusers saves them, each with a VAE."""
    made = {}
    for name, family in FAMILIES.items():
        torch.manual_seed(7)
        made[name] = tmp_path_factory.mktemp(name.replace(".", ""))
        vae = getattr(diffusers, family.vae)(**family.config)
        if hasattr(vae, "bn"):
            vae.bn.running_mean.normal_(0, 0.5)
            vae.bn.running_var.uniform_(0.3, 3.0)
        vae.save_pretrained(made[name] / "vae")
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Iterator[LocalCluster]:
    settings = {"QUIRE_DECODER_MODELS": ",".join(str(folder / "vae") for folder in folders.values())}
    with LocalCluster(
        tmp_path_factory.mktemp("diffusers"), decoders=1, arena_bytes=128 << 20, settings=settings
    ) as running:
        yield running


@pytest.mark.parametrize("name", FAMILIES)
async def test_latents_of_each_family_decode_to_the_pipelines_pixels(
    cluster: LocalCluster, folders: dict[str, Path], name: str
) -> None:
    """Stored as they are; what comes back as PNG is what the pipeline's own VAE makes of them."""
    family, dtypes = FAMILIES[name], [torch.float32]
    if name == "sd-1.5":
        dtypes += [torch.float16, torch.bfloat16]
    pipeline = (Flux2TinyPipeline if name == "flux.2" else TinyPipeline)(family, folders[name])
    async with AsyncClient(cluster.gateway_address) as client:
        images = ImageClient(client)
        assert weights_digest(folders[name] / "vae") in {vae.weights_sha256 for vae in await images.vaes()}
        keeper = LatentKeeper(pipeline, images)
        with pytest.raises(InvalidRequest, match="not run"):
            await keeper.store("early")
        for dtype in dtypes:
            planes = pipeline(2, keeper, dtype)
            if family.packed:
                with pytest.raises(InvalidRequest, match="height"):
                    await keeper.store("packed")
            image_id = f"{name}/{str(dtype).removeprefix('torch.')}"
            entries = await keeper.store(image_id, height=8 * family.scale, width=12 * family.scale)
            assert [entry.image_id for entry in entries] == [f"{image_id}-0", f"{image_id}-1"]
            for latent, entry in zip(planes, entries, strict=True):
                assert entry.weights_sha256 == weights_digest(folders[name] / "vae")
                found = imagecodecs.png_decode((await images.get(entry.image_id)).data)
                difference = np.abs(found.astype(int) - pipeline.pixels(latent))
                assert difference.max() <= 1, "another division may round a level differently"
                _, info = await images.get_latent(entry.image_id)
                assert info.vae.class_name == family.vae
                assert info.versions["torch"] == torch.__version__


@pytest.mark.parametrize("name", FAMILIES)
async def test_pictures_become_latents_of_each_family(
    cluster: LocalCluster, folders: dict[str, Path], name: str
) -> None:
    """As diffusers' own encoder makes them, in half precision, and what comes back as far off as was said."""
    family, digest = FAMILIES[name], weights_digest(folders[name] / "vae")
    vae: Any = getattr(diffusers, family.vae).from_pretrained(folders[name] / "vae").eval()
    picture = np.random.default_rng(3).integers(0, 256, (8 * family.scale, 12 * family.scale, 3), dtype=np.uint8)
    async with aiohttp.ClientSession(f"http://{cluster.http_address}") as http:
        headers = {"Content-Type": "image/png"}
        async with http.put(
            f"/v1/images/picture/{name}",
            params={"weights_sha256": digest},
            data=imagecodecs.png_encode(picture),
            headers=headers,
        ) as answer:
            assert answer.status == 201, await answer.text()
            said = (await answer.json())["fidelity"]
    async with AsyncClient(cluster.gateway_address) as client:
        values, _ = await ImageClient(client).get_latent(f"picture/{name}")
        back = imagecodecs.png_decode((await ImageClient(client).get(f"picture/{name}")).data)
    sample = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.inference_mode():
        encoded = vae.encode(sample[:, :, None] if family.vae in _VIDEO else sample)
    expected = encoded.latent_dist.mode() if "latent_dist" in encoded else next(iter(encoded.values()))
    expected = (expected[:, :, 0] if expected.ndim == 5 else expected)[0].numpy()
    assert np.allclose(values.astype(np.float32), expected, atol=2e-3, rtol=2e-3)
    errors = np.abs(back.astype(int) - picture)
    assert int(errors.max()) == said["error_max"]
    assert 10 * np.log10(255**2 / (errors**2).mean()) == pytest.approx(said["psnr_db"], abs=0.02)


async def test_another_pipeline_with_the_vae_of_flux_2_is_refused(folders: dict[str, Path]) -> None:
    """Ideogram's has the same shapes and another order within a patch: its images would be scrambled."""
    images: Any = None

    class Ideogram4Pipeline(TinyPipeline):
        pass

    pipeline = Ideogram4Pipeline(FAMILIES["flux.2"], folders["flux.2"])
    keeper = LatentKeeper(pipeline, images)
    pipeline(1, keeper, torch.float32)
    with pytest.raises(InvalidRequest, match="how a Ideogram4Pipeline lays out"):
        await keeper.store("scrambled", height=64, width=96)


def test_a_vae_is_known_by_its_file_or_not_stored(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of variants, the one whose values the pipeline has."""
    nothing: Any = None
    family, images = FAMILIES["sd-1.5"], nothing
    folder = tmp_path / "variants"
    shutil.copytree(folders["sd-1.5"], folder)
    torch.manual_seed(8)
    other: Any = getattr(diffusers, family.vae)(**family.config)
    other.half().save_pretrained(folder / "vae", variant="fp16")
    plain = folder / "vae" / "diffusion_pytorch_model.safetensors"
    variant = folder / "vae" / "diffusion_pytorch_model.fp16.safetensors"
    kept = LatentKeeper(TinyPipeline(family, folder), images)
    assert kept._info.weights_sha256 == weights_digest(folders["sd-1.5"] / "vae")
    kept = LatentKeeper(TinyPipeline(family, folder, vae=other), images)
    assert kept._info.weights_sha256 not in ("", weights_digest(folders["sd-1.5"] / "vae"))
    shutil.copy(variant, plain)
    with pytest.raises(ConfigInvalid, match="several"):
        LatentKeeper(TinyPipeline(family, folder, vae=other), images)
    with pytest.raises(ConfigInvalid, match="weights_sha256"):
        LatentKeeper(TinyPipeline(family, tmp_path / "nowhere", vae=other), images)
    given = LatentKeeper(TinyPipeline(family, tmp_path / "nowhere", vae=other), images, weights_sha256="AB" * 32)
    assert given._info.weights_sha256 == "ab" * 32
