"""diffusers: store the images of a pipeline as latents, not as pixels.

    keeper = LatentKeeper(pipeline, images)
    pipeline(prompt, output_type="latent", callback_on_step_end=keeper, callback_on_step_end_tensor_inputs=["latents"])
    await keeper.store("my-image")

The callback remembers the latents of the last step; `store` puts them, with the description of the VAE, and gives the
ids back. Latents that the pipeline packs (FLUX, Qwen-Image) are unpacked: `store` needs the images' size then. FLUX.2
normalises patches by statistics in the VAE's weights: its latents are stored denormalised, as the VAE takes them.

A VAE is named by the digest of its weights file. It is computed where the pipeline was loaded from a folder or from
Hugging Face's cache; else it is to be given.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.client import ImageClient
from quire.model.errors import ConfigInvalid, InvalidRequest
from quire.model.images import ImageEntry
from quire.model.latents import DecodeRule, LatentInfo, Normalisation, Vae, Values

_NAMES = {torch.float16: "float16", torch.float32: "float32", torch.bfloat16: "bfloat16"}


class LatentKeeper:
    """`callback_on_step_end` of a diffusers pipeline. `weights_sha256`: of the VAE's file, if it is known better.

    Raises `ConfigInvalid` where neither it nor the file is known.
    """

    def __init__(self, pipeline: Any, images: ImageClient, *, weights_sha256: str = "") -> None:
        self._images = images
        self._info = vae_of(pipeline, weights_sha256)
        self._vae = pipeline.vae
        scale = getattr(pipeline, "vae_scale_factor", None) or getattr(pipeline, "vae_scale_factor_spatial", None)
        self._scale = int(scale or 8)
        self._pipeline = type(pipeline).__name__
        self._latents: torch.Tensor | None = None

    def __call__(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Remember the latents of a step, as diffusers' callback."""
        self._latents = tensors["latents"]
        return tensors

    async def store(self, name: str, *, height: int = 0, width: int = 0) -> list[ImageEntry]:
        """Store the images under `name`, or, of a batch, name-0, name-1, ….

        `height` and `width`: of the images, in pixels, needed for packed latents alone. Raises `InvalidRequest`, also
        before the pipeline has run.
        """
        if self._latents is None:
            raise InvalidRequest("the pipeline has not run with this callback yet", field="latents")
        latents, size = self._latents.detach().cpu(), (height // self._scale, width // self._scale)
        if not hasattr(self._vae, "bn"):
            batch = _planes(latents, *size)
        elif self._pipeline.startswith("Flux2"):
            batch = _denormalised_patches(latents, *size, self._vae)
        else:  # others have the same VAE, and lay out their patches in other ways
            raise InvalidRequest(f"how a {self._pipeline} lays out its latents is not known here", field="latents")
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
            vae=self._info,
            height=height * self._scale,
            width=width * self._scale,
            normalisation=rule,
            decode=DecodeRule("float32", bool(getattr(config, "force_upcast", False))),
            versions=_versions(),
        )


def _planes(latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Unpack latents to (N, channels, height, width).

    They may be planes, videos of one frame, or patches of 2 × 2 in rows (FLUX.1, Qwen-Image): (N, height/2 · width/2,
    channels · 4), each patch by channel, row, column.

    `height` and `width`: of the latent. Raises `InvalidRequest`.
    """
    _check_dtype(latents)
    if latents.ndim == 5 and latents.shape[2] == 1:
        return latents[:, :, 0]
    if latents.ndim == 4:
        return latents
    return _unpacked(latents, height, width)


def _denormalised_patches(latents: torch.Tensor, height: int, width: int, vae: Any) -> torch.Tensor:
    """Undo FLUX.2's normalisation, and unpack to (N, channels, height, width).

    The VAE's batch norm has a mean and a variance for each value of a patch. Raises `InvalidRequest`.
    """
    _check_dtype(latents)
    deviation = torch.sqrt(vae.bn.running_var.detach().cpu() + vae.config.batch_norm_eps).to(latents.dtype)
    if latents.shape[-1:] != deviation.shape:
        raise InvalidRequest(f"latents of {tuple(latents.shape)} are no patches of FLUX.2", field="latents")
    return _unpacked(latents * deviation + vae.bn.running_mean.detach().cpu().to(latents.dtype), height, width)


def _check_dtype(latents: torch.Tensor) -> None:
    if latents.dtype not in _NAMES:
        raise InvalidRequest(f"latents of {latents.dtype}; {', '.join(_NAMES.values())}", field="latents")


def _unpacked(latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Unpack patches of 2 × 2 in rows, each patch by channel, row, column.

    Raises `InvalidRequest` unless they are those of an image of that size.
    """
    shape = tuple(latents.shape)
    if latents.ndim != 3 or shape[2] % 4:
        raise InvalidRequest(f"latents of {shape} are none of images", field="latents")
    if not height or shape[1] != (height // 2) * (width // 2):
        raise InvalidRequest(f"latents of {shape} are packed: say the images' height and width", field="height, width")
    patches = latents.reshape(shape[0], height // 2, width // 2, shape[2] // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(shape[0], shape[2] // 4, height // 2 * 2, width // 2 * 2)


def vae_of(pipeline: Any, weights_sha256: str = "") -> Vae:
    """Return the description of a pipeline's VAE for a record.

    Raises `ConfigInvalid` if its weights file is unknown.
    """
    vae = pipeline.vae
    config = {name: value for name, value in dict(vae.config).items() if not name.startswith("_") and _plain(value)}
    name = str(getattr(pipeline, "name_or_path", "") or getattr(vae.config, "_name_or_path", "") or "")
    own = str(getattr(vae.config, "_name_or_path", "") or "")
    candidates = [Path(name, "vae"), Path(name)] if name else []
    folders = [folder for folder in (*candidates, *([Path(own)] if own else [])) if (folder / "config.json").is_file()]
    digest = weights_sha256.lower() or _digest(vae, folders)
    return Vae(name, "", digest, type(vae).__name__, config)


def _digest(vae: Any, folders: list[Path]) -> str:
    """Return the digest of the file that the VAE's weights came from, hexadecimal. Raises `ConfigInvalid`."""
    files = next((weights for folder in folders if (weights := sorted(folder.glob("*.safetensors")))), [])
    if len(files) > 1:  # variants: those whose values the VAE has
        files = [file for file in files if _has_values_of(vae, file)]
    if len(files) != 1:
        reason = "fits several variants" if files else "is not known"
        raise ConfigInvalid(f"which file the VAE's weights came from {reason}: give its SHA-256 as weights_sha256")
    with files[0].open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has_values_of(vae: Any, file: Path) -> bool:
    from safetensors.torch import load_file

    weights, expected = load_file(file), dict(vae.state_dict())
    return weights.keys() == expected.keys() and all(
        torch.equal(value.to(expected[name].dtype), expected[name].cpu()) for name, value in weights.items()
    )


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple)


def _values(latent: torch.Tensor) -> Values:
    if latent.dtype == torch.bfloat16:
        return latent.contiguous().view(torch.int16).numpy().view(np.uint16)
    return latent.contiguous().numpy()


def _versions() -> dict[str, str]:
    import diffusers

    return {"torch": torch.__version__, "diffusers": diffusers.__version__}
