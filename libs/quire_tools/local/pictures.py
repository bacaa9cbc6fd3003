"""Pictures at hand, and their latents by the small VAE that ships with Quire: for the demo and for benchmarks.

The VAE is trained by tools/train_demo_vae.py; its images are soft, but recognisable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import quire_decoder
from quire.model.latents import DecodeRule, LatentInfo, Vae, Values

VAE_FOLDER = Path(quire_decoder.__file__).parent / "assets" / "demo_vae"
Picture = npt.NDArray[np.uint8]
"""(size, size, 3), RGB."""


def pictures(count: int, size: int = 256) -> list[Picture]:
    """A photograph that matplotlib carries, and landscapes by formula."""
    from matplotlib import cbook
    from PIL import Image

    sample: Any = cbook.get_sample_data("grace_hopper.jpg", asfileobj=True)
    with sample as file:
        photograph = np.asarray(Image.open(file).convert("RGB").crop((60, 0, 460, 400)).resize((size, size)))
    return [photograph, *landscapes(count - 1, size)][:count]


def landscapes(count: int, size: int = 256) -> list[Picture]:
    """Pictures by formula."""
    return [_landscape(seed, size) for seed in range(count)]


def encode(images: Sequence[Picture]) -> list[tuple[Values, LatentInfo]]:
    """Return their latents, float16."""
    import torch
    from diffusers import AutoencoderTiny

    kind: Any = AutoencoderTiny
    vae = kind.from_pretrained(VAE_FOLDER, low_cpu_mem_usage=False).float().eval()
    weights = hashlib.sha256(next(VAE_FOLDER.glob("*.safetensors")).read_bytes()).hexdigest()
    latents: list[tuple[Values, LatentInfo]] = []
    for image in images:
        with torch.inference_mode():
            tensor = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
            latent = vae.encode(tensor).latents[0].half().numpy()
        vae_of = Vae("quire demo", "", weights, "AutoencoderTiny")
        height, width = image.shape[:2]
        latents.append(
            (latent, LatentInfo(latent.shape, "float16", vae_of, height, width, decode=DecodeRule("float32")))
        )
    return latents


def _landscape(seed: int, size: int) -> Picture:
    """A sky, a sun, hills."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size] / size
    top, bottom = rng.random(3) * 0.6, 0.4 + rng.random(3) * 0.6
    image = top + (bottom - top) * y[..., None]
    cx, cy = rng.uniform(0.2, 0.8), rng.uniform(0.15, 0.4)
    image[(x - cx) ** 2 + (y - cy) ** 2 < 0.008] = (1.0, 0.9, 0.6)
    for depth in range(4):
        waves = (
            rng.uniform(0.01, 0.05) * np.sin(x * 2 * np.pi * rng.uniform(0.5, 4) + rng.uniform(0, 6)) for _ in range(3)
        )
        ridge = 0.5 + 0.1 * depth + sum(waves)
        image[y > ridge] = rng.random(3) * (0.7 - 0.12 * depth)
    return np.asarray((np.clip(image, 0, 1) * 255).astype(np.uint8))
