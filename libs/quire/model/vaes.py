"""Whether a latent is one that a cluster's decoders decode."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.model.latents import LatentInfo, RecordInvalid, Values, denormalised
from quire.model.nodes import KnownVae


def check_decodable(values: Values, info: LatentInfo, vaes: Mapping[str, KnownVae]) -> None:
    """See that one of `vaes`, by the digest of its weights, decodes a latent. Raises `RecordInvalid`: why not."""
    weights = info.vae.weights_sha256.lower()
    vae = vaes.get(weights)
    if vae is None:
        names = ", ".join(f"{vae.name} ({vae.weights_sha256[:12]}…)" for vae in vaes.values()) or "none"
        named = f"no decoder has a VAE with weights {weights[:12]}…" if weights else "it names no VAE"
        raise RecordInvalid(f"{named}; those of the cluster: {names}", field="weights_sha256")
    if info.layout != "chw" or info.normalisation.batch_norm:
        subject = f"layout {info.layout!r}" if info.layout != "chw" else "a batch norm in the VAE's weights"
        raise RecordInvalid(
            f"{subject} is not decoded here: store it unpacked, normalised by mean and std", field="layout"
        )
    channels, height, width = info.shape
    if channels != vae.channels:
        raise RecordInvalid(f"{channels} channels, {vae.name} has {vae.channels}", field="shape")
    if (height * vae.scale, width * vae.scale) != (info.height, info.width):
        raise RecordInvalid(
            f"{vae.name} makes {height * vae.scale} × {width * vae.scale} of {info.shape}, "
            f"not {info.height} × {info.width}",
            field="height, width",
        )
    if not np.isfinite(denormalised(values, info)).all():
        raise RecordInvalid("values that are not finite (NaN, Inf, or too large once scaled)", field="values")
