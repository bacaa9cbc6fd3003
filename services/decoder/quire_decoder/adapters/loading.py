"""VAEs of diffusers on a device: the number format that they decode in, tiles, encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from quire.telemetry import logger
from quire_decoder.adapters.engines import Decode, DecodeEngine
from quire_decoder.adapters.weights import Weights
from quire_decoder.core.precision import PictureError, candidates, error_of, is_small
from quire_decoder.core.vae_kinds import VaeKind

_TILE: Final = 64
"""Side of a tile, in values of a latent."""
_MEASURED_SIDE: Final = 16
"""Side of the latent, of random values, that the error of a number format is measured with."""


@dataclass(frozen=True, slots=True)
class LoadedVae:
    """A VAE on the device.

    Attributes:
        decode: Decodes a batch at once.
        tiled: Decodes one latent in tiles that overlap and are blended.
        encode: Encodes samples.
        kind: Of its latents.
        dtype: Torch's, of its weights.
        size: Bytes of its weights.
        pixel_bytes: About what decoding takes for each pixel.
    """

    decode: Decode
    tiled: Decode
    encode: Decode
    kind: VaeKind
    dtype: Any
    size: int
    pixel_bytes: int


def load_vae(weights: Weights, choice: str, record_dtype: str, device: Any, engine: DecodeEngine) -> LoadedVae:
    """Load a VAE in the number format that `core.precision` prefers. Where there is a choice, the error is logged.

    Args:
        weights: Its files.
        choice: Of the number format; one of `core.precision.CHOICES`.
        record_dtype: What the record says.
        device: Torch's.
        engine: Runs it.
    """
    vae, error = _chosen(weights, choice, record_dtype, device)
    dtype = str(vae.dtype).removeprefix("torch.")
    size = sum(parameter.numel() * parameter.element_size() for parameter in vae.parameters())
    logger().info(
        "vae loaded",
        folder=str(weights.folder),
        bytes=size,
        device=str(device),
        engine=engine.name,
        dtype=dtype,
        psnr_db=None if error is None else round(error.psnr_db, 1),
        error_max=None if error is None else error.error_max,
    )
    tiled, encode = _tiled(vae, weights.kind.scale), _encoding(vae)
    return LoadedVae(
        decode=engine.prepare(vae, weights, dtype),
        tiled=tiled,
        encode=encode,
        kind=weights.kind,
        dtype=vae.dtype,
        size=size,
        pixel_bytes=int(weights.kind.pixel_values * vae.dtype.itemsize),
    )


def read_vae(weights: Weights, dtype: str) -> Any:
    """Read a VAE into the host's memory."""
    import diffusers
    import torch

    kind = getattr(diffusers, weights.kind.class_name)
    options: dict[str, Any] = {"use_safetensors": True, "low_cpu_mem_usage": False, "variant": weights.variant or None}
    return kind.from_pretrained(weights.folder, torch_dtype=getattr(torch, dtype), **options).eval()


def to_pixels(samples: Any) -> Any:
    """Samples (N, 3, H, W) as pixels (N, H, W, 3), uint8, on the device."""
    import torch

    pixels = (samples.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous()


def _chosen(weights: Weights, choice: str, record_dtype: str, device: Any) -> tuple[Any, PictureError | None]:
    """Return the VAE, and its measured error; None where there was no choice."""
    force_upcast = weights.kind.force_upcast
    formats = candidates(choice, record=record_dtype, force_upcast=force_upcast, device_type=device.type)
    if len(formats) == 1:
        return read_vae(weights, formats[0]).to(device), None
    exact, _ = _measured(read_vae(weights, "float32").to(device), weights.kind, device)
    for name in formats:
        vae = read_vae(weights, name).to(device)
        pixels, is_finite = _measured(vae, weights.kind, device)
        error = error_of(pixels, exact)
        if name == formats[-1] or (is_finite and is_small(error)):
            return vae, error
    raise AssertionError("the last format is taken")


def _measured(vae: Any, kind: VaeKind, device: Any) -> tuple[Any, bool]:
    """Decode a latent of random values: the pixels, and whether all samples are finite."""
    import torch

    values = np.random.default_rng(1).standard_normal((1, kind.channels, _MEASURED_SIDE, _MEASURED_SIDE))
    latents = torch.from_numpy(values.astype(np.float32)).to(device).to(vae.dtype)
    with torch.inference_mode():
        samples = vae.decode(latents[:, :, None] if kind.frames else latents, return_dict=False)[0]
        samples = samples[:, :, 0] if kind.frames else samples
        return to_pixels(samples).cpu().numpy(), bool(torch.isfinite(samples).all())


def _encoding(vae: Any) -> Decode:
    """A batch of samples to latents: the most likely ones, where the VAE says a distribution."""

    def encode(samples: Any) -> Any:
        encoded = vae.encode(samples, return_dict=False)[0]
        return encoded.mode() if hasattr(encoded, "mode") and not hasattr(encoded, "shape") else encoded

    return encode


def _tiled(vae: Any, scale: int) -> Decode:
    vae.tile_latent_min_size, vae.tile_sample_min_size = _TILE, _TILE * scale
    vae.spatial_scale_factor = scale  # AutoencoderTiny's own counts colours instead of blocks

    def decode(latents: Any) -> Any:
        vae.enable_tiling()
        try:
            return vae.decode(latents, return_dict=False)[0]
        finally:
            vae.disable_tiling()

    return decode
