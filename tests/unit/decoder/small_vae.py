"""A VAE of random weights that decodes in milliseconds, and latents for it."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from quire.model.latents import LatentInfo, Vae
from quire_decoder.adapters.weights import find_weights

CHANNELS: Final = 4
SCALE: Final = 2


def write_small_vae(folder: Path) -> None:
    """Write it as diffusers does."""
    import diffusers

    kind: Any = diffusers.AutoencoderTiny
    torch.manual_seed(5)
    kind(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        latent_channels=CHANNELS,
    ).save_pretrained(folder)


@functools.cache
def small_vae() -> Any:
    """Return it as `find_weights` does; its folder stays as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="small-vae-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_small_vae(folder)
    return find_weights([folder])


@functools.cache
def random_latents(count: int, side: int) -> tuple[list[Any], LatentInfo]:
    """Return latents of square images. `side`: of an image, pixels."""
    shape = (CHANNELS, side // SCALE, side // SCALE)
    (digest,) = small_vae()
    info = LatentInfo(shape, "float32", Vae("small", "", digest), side, side)
    return list(np.random.default_rng(side).standard_normal((count, *shape)).astype(np.float32)), info
