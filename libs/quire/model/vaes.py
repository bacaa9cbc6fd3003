"""Latents and the VAEs of a cluster's decoders: how they are normalised, and whether one is decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from quire.model.errors import InvalidRequest
from quire.model.latents import LatentInfo, Normalisation, RecordInvalid, Values, denormalised
from quire.model.nodes import KnownVae


def normalisation_of(
    vae: KnownVae | None, scaling_factor: float | None, shift_factor: float | None, *, undone: bool = False
) -> Normalisation:
    """Return how a pipeline normalises latents of a VAE.

    Args:
        vae: Its configuration decides; None for an unknown VAE, of which only the factors count.
        scaling_factor: From the client, or None.
        shift_factor: From the client, or None.
        undone: The latents are denormalised already.

    Raises:
        InvalidRequest: A factor is not that of the VAE's configuration.
    """
    scaling, shift = (1.0, 0.0) if vae is None else (vae.scaling_factor, vae.shift_factor)
    for name, factor, own in (("scaling_factor", scaling_factor, scaling), ("shift_factor", shift_factor, shift)):
        if vae is not None and factor is not None and not math.isclose(factor, own, rel_tol=1e-6):
            raise InvalidRequest(
                f"{factor:g}; that of {vae.name or vae.class_name} is {own:g}. Leave it out, or say do_scaling=false "
                "for denormalised latents",
                field=name,
            )
    mean, std = (vae.latents_mean, vae.latents_std) if vae is not None else ((), ())
    return Normalisation(
        scaling if scaling_factor is None else scaling_factor,
        shift if shift_factor is None else shift_factor,
        mean,
        std,
        undone=undone,
    )


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
