"""diffusers: keep what a pipeline makes as latents, not as pixels.

    keeper = LatentKeeper(pipeline, images)
    pipeline(prompt, output_type="latent", callback_on_step_end=keeper, callback_on_step_end_tensor_inputs=["latents"])
    await keeper.store("my-image")

The callback remembers the latents of the last step; `store` puts them, with all that is known of the VAE, and gives the
ids back. Weights are named by the digest of the VAE's file where the pipeline was loaded from a folder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.client import ImageClient
from quire.model.errors import InvalidRequest
from quire.model.images import ImageEntry
from quire.model.latents import DecodeRule, LatentInfo, Normalisation, Vae, Values

_NAMES = {torch.float16: "float16", torch.float32: "float32", torch.bfloat16: "bfloat16"}


class LatentKeeper:
    """`callback_on_step_end` of a diffusers pipeline. `weights_sha256`: of the VAE's file, if it is known better."""

    def __init__(self, pipeline: Any, images: ImageClient, *, weights_sha256: str = "") -> None:
        self._images = images
        self._info = vae_of(pipeline, weights_sha256)
        self._vae = pipeline.vae
        self._scale = int(getattr(pipeline, "vae_scale_factor", 8))
        self._latents: torch.Tensor | None = None

    def __call__(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        self._latents = tensors["latents"]
        return tensors

    async def store(self, name: str) -> list[ImageEntry]:
        """Under `name`, or, of a batch, name-0, name-1, …. Raises `InvalidRequest` before the pipeline has run."""
        if self._latents is None:
            raise InvalidRequest("the pipeline has not run with this callback yet", field="latents")
        batch = self._latents.detach().cpu()
        if batch.ndim != 4 or batch.dtype not in _NAMES:
            raise InvalidRequest(f"latents of {batch.dtype} {tuple(batch.shape)}; unpack them first", field="latents")
        entries = []
        for index, latent in enumerate(batch):
            image_id = name if len(batch) == 1 else f"{name}-{index}"
            entries.append(await self._images.put(image_id, _values(latent), self._describe(latent)))
        return entries

    def _describe(self, latent: torch.Tensor) -> LatentInfo:
        config = self._vae.config
        channels, height, width = latent.shape
        rule = Normalisation(
            float(getattr(config, "scaling_factor", None) or 1.0),
            float(getattr(config, "shift_factor", None) or 0.0),
            tuple(map(float, getattr(config, "latents_mean", None) or ())),
            tuple(map(float, getattr(config, "latents_std", None) or ())),
        )
        return LatentInfo(
            (channels, height, width),
            _NAMES[latent.dtype],
            self._info,
            height * self._scale,
            width * self._scale,
            rule,
            DecodeRule("float32", bool(getattr(config, "force_upcast", False))),
            versions=_versions(),
        )


def vae_of(pipeline: Any, weights_sha256: str = "") -> Vae:
    """What a record says of a pipeline's VAE."""
    vae = pipeline.vae
    config = {name: value for name, value in dict(vae.config).items() if not name.startswith("_") and _plain(value)}
    name = str(getattr(pipeline, "name_or_path", "") or getattr(vae.config, "_name_or_path", "") or "")
    for candidate in (Path(name, "vae"), Path(name)) if name else ():
        files = sorted(candidate.glob("*.safetensors")) if candidate.is_dir() else []
        if not weights_sha256 and len(files) == 1:
            weights_sha256 = hashlib.sha256(files[0].read_bytes()).hexdigest()
    return Vae(name, "", weights_sha256, type(vae).__name__, config)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple)


def _values(latent: torch.Tensor) -> Values:
    if latent.dtype == torch.bfloat16:
        return latent.contiguous().view(torch.int16).numpy().view(np.uint16)
    return latent.contiguous().numpy()


def _versions() -> dict[str, str]:
    import diffusers

    return {"torch": torch.__version__, "diffusers": diffusers.__version__}
