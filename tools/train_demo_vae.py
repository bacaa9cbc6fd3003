"""Trains the VAE that ships with the decoder: a few hundred KB, good enough that demo latents decode to pictures.

    python tools/train_demo_vae.py --steps 1500

Procedural images (gradients, shapes, stripes, noise textures) and photographs that installed packages carry
(matplotlib's sample data). Writes services/decoder/quire_decoder/assets/demo_vae/. Two CPU cores take some minutes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderTiny

TARGET = Path(__file__).parents[1] / "services/decoder/quire_decoder/assets/demo_vae"
SIZE = 64


def procedural(rng: np.random.Generator, size: int = SIZE) -> np.ndarray[Any, Any]:
    """(size, size, 3) in 0..1: a gradient, with discs, boxes and stripes on it."""
    y, x = np.mgrid[0:size, 0:size] / size
    angle = rng.uniform(0, 2 * np.pi)
    ramp = np.clip(x * np.cos(angle) + y * np.sin(angle), -1, 1) * 0.5 + 0.5
    low, high = rng.random(3), rng.random(3)
    image = low + (high - low) * ramp[..., None]
    for _ in range(rng.integers(1, 6)):
        colour, kind = rng.random(3), rng.integers(0, 3)
        cx, cy, radius = rng.random(), rng.random(), rng.uniform(0.05, 0.3)
        if kind == 0:
            mask = (x - cx) ** 2 + (y - cy) ** 2 < radius**2
        elif kind == 1:
            mask = (abs(x - cx) < radius) & (abs(y - cy) < radius * rng.uniform(0.3, 1))
        else:
            wave = np.sin((x * np.cos(cx * 6) + y * np.sin(cx * 6)) * rng.uniform(10, 60))
            mask = (wave > 0.3) & ((x - cx) ** 2 + (y - cy) ** 2 < 4 * radius**2)
        image[mask] = colour
    return np.asarray(np.clip(image, 0, 1), dtype=np.float32)


def photographs() -> list[np.ndarray[Any, Any]]:
    """Those that matplotlib brings along."""
    from matplotlib import cbook

    found = []
    for name in ("grace_hopper.jpg", "ada.png"):
        try:
            from PIL import Image

            with cbook.get_sample_data(name, asfileobj=True) as file:
                found.append(np.asarray(Image.open(file).convert("RGB"), dtype=np.float32) / 255)
        except (OSError, ValueError):
            continue
    return found


def batch(rng: np.random.Generator, photos: list[np.ndarray[Any, Any]], count: int) -> torch.Tensor:
    """Half procedural, half crops of photographs, -1..1."""
    images = []
    for at in range(count):
        if photos and at % 2:
            photo = photos[int(rng.integers(len(photos)))]
            step = int(rng.integers(1, 4))
            top = int(rng.integers(0, photo.shape[0] - SIZE * step + 1))
            left = int(rng.integers(0, photo.shape[1] - SIZE * step + 1))
            images.append(photo[top : top + SIZE * step : step, left : left + SIZE * step : step])
        else:
            images.append(procedural(rng))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) * 2 - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    rng, photos = np.random.default_rng(1), photographs()
    vae: Any = AutoencoderTiny(  # type: ignore[no-untyped-call]
        encoder_block_out_channels=(24, 24, 24),
        decoder_block_out_channels=(24, 24, 24),
        num_encoder_blocks=(1, 2, 2),
        num_decoder_blocks=(2, 2, 1),
        latent_channels=4,
    )
    optimiser = torch.optim.AdamW(vae.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=arguments.steps)
    for step in range(arguments.steps):
        images = batch(rng, photos, arguments.batch)
        latent = vae.encode(images).latents
        decoded = vae.decode(latent).sample
        loss = torch.nn.functional.l1_loss(decoded, images) + 0.5 * torch.nn.functional.mse_loss(decoded, images)
        loss = loss + 0.001 * (latent**2).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 0 or step == arguments.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {len(photos)} photographs", flush=True)
    vae.half().save_pretrained(TARGET)
    config = json.loads((TARGET / "config.json").read_text())
    config.pop("block_out_channels", None)  # diffusers writes it and then warns of it
    (TARGET / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    size = sum(path.stat().st_size for path in TARGET.iterdir())
    print(f"{TARGET}: {size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
