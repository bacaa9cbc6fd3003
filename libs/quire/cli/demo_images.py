"""The demo's images: pictures become latents, and come back from a cache or a decode.

The VAE is the small one that ships with Quire (tools/train_demo_vae.py); its pictures are soft.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import torch
from diffusers import AutoencoderTiny
from rich.table import Table

import quire
from quire.client import ImageClient, QuireClient
from quire.images import Rendering
from quire.latents import DecodeRule, LatentInfo, Vae

VAE_FOLDER = Path(quire.__file__).parent / "assets" / "demo_vae"
_SIZE = 256
_PICTURES = 6


def demo_pictures() -> list[np.ndarray[Any, Any]]:
    """A photograph that matplotlib carries, and landscapes by formula. (256, 256, 3) uint8."""
    from matplotlib import cbook
    from PIL import Image

    sample: Any = cbook.get_sample_data("grace_hopper.jpg", asfileobj=True)
    with sample as file:
        photograph = np.asarray(Image.open(file).convert("RGB").crop((60, 0, 460, 400)).resize((_SIZE, _SIZE)))
    return [photograph, *(_landscape(seed) for seed in range(_PICTURES - 1))]


def _landscape(seed: int) -> np.ndarray[Any, Any]:
    """A sky, a sun, hills."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:_SIZE, 0:_SIZE] / _SIZE
    top, bottom = rng.random(3) * 0.6, 0.4 + rng.random(3) * 0.6
    image = top + (bottom - top) * y[..., None]
    cx, cy = rng.uniform(0.2, 0.8), rng.uniform(0.15, 0.4)
    image[(x - cx) ** 2 + (y - cy) ** 2 < 0.008] = (1.0, 0.9, 0.6)
    for depth in range(4):
        ridge = (
            0.5
            + 0.1 * depth
            + sum(
                rng.uniform(0.01, 0.05) * np.sin(x * 2 * np.pi * rng.uniform(0.5, 4) + rng.uniform(0, 6))
                for _ in range(3)
            )
        )
        image[y > ridge] = rng.random(3) * (0.7 - 0.12 * depth)
    return np.asarray((np.clip(image, 0, 1) * 255).astype(np.uint8))


def show_images(gateway: str, folder: Path) -> tuple[list[Any], Path]:
    """What to print, and the picture that was drawn."""
    return asyncio.run(_show(gateway, folder))


async def _show(gateway: str, folder: Path) -> tuple[list[Any], Path]:
    kind: Any = AutoencoderTiny
    vae = kind.from_pretrained(VAE_FOLDER, low_cpu_mem_usage=False).float().eval()
    weights = hashlib.sha256(next(VAE_FOLDER.glob("*.safetensors")).read_bytes()).hexdigest()
    pictures = demo_pictures()
    prefix = f"demo-{time.time_ns()}"
    table = Table(
        "image", "PNG, bytes", "latent, bytes", "", "miss", "latent hit", "image hit", title="ms to the image"
    )
    back, lines = [], []
    async with QuireClient(gateway) as client:
        images = ImageClient(client)
        for index, picture in enumerate(pictures):
            with torch.inference_mode():
                tensor = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
                latent = vae.encode(tensor).latents[0].half().numpy()
            info = LatentInfo(
                latent.shape,
                "float16",
                Vae("quire demo", "", weights, "AutoencoderTiny"),
                _SIZE,
                _SIZE,
                decode=DecodeRule("float32"),
            )
            entry = await images.put(f"{prefix}-{index}", latent, info)
            times: dict[str, float] = {}
            for _ in range(6):
                started = time.perf_counter()
                image = await images.get(entry.image_id)
                times[image.source] = (time.perf_counter() - started) * 1e3
            back.append(imagecodecs.png_decode(image.data))
            png = len(image.data)
            share = f"{entry.record_bytes / png:.0%}"
            shown = [f"{times[name]:.1f}" if name in times else "–" for name in ("miss", "latent", "image")]
            table.add_row(f"{index}", f"{png}", f"{entry.record_bytes}", share, *shown)
        small = await images.get(entry.image_id, Rendering("avif", 70, 128))
        lines = [table, f"the last one as AVIF, 128 pixels wide, quality 70: {len(small.data)} bytes"]
        lines.append(await _shift(client, images, [f"{prefix}-{index}" for index in range(len(pictures))]))
    return lines, _draw(pictures, back, folder / "images.png")


async def _shift(client: QuireClient, images: ImageClient, names: list[str]) -> str:
    """A workload that turns from one favourite to all alike: the split between images and latents follows."""
    alphas = []
    for favourites in (names[:1], names):
        for turn in range(60):
            await images.get(favourites[turn % len(favourites)])
        await asyncio.sleep(1.2)  # figures come with heartbeats
        nodes = [node for node in await client.status() if node.role.value == "decoder"]
        alphas.append(", ".join(f"{node.figures['cache.alpha']:.2f}" for node in nodes))
    return f"α, the images' part of the cache: {alphas[0]} with one favourite, {alphas[1]} with six"


def _draw(pictures: list[np.ndarray[Any, Any]], back: list[np.ndarray[Any, Any]], path: Path) -> Path:
    """Above as they were, below as they came back."""
    rows = [np.concatenate(row, axis=1) for row in (pictures, back)]
    path.write_bytes(imagecodecs.png_encode(np.concatenate(rows, axis=0)))
    return path
