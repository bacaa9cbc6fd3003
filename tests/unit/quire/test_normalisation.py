"""How latents that clients send without a record are normalised."""

from __future__ import annotations

import pytest

from quire.model.errors import InvalidRequest
from quire.model.latents import Normalisation
from quire.model.nodes import KnownVae
from quire.model.vaes import normalisation_of

_VAE = KnownVae(weights_sha256="ab" * 32, name="sdxl", channels=4, scale=8, scaling_factor=0.13025)
_QWEN = KnownVae(weights_sha256="cd" * 32, name="qwen", channels=2, scale=8, latents_mean=(1, 2), latents_std=(3, 4))


def test_the_vaes_configuration_is_the_default() -> None:
    assert normalisation_of(_VAE, None, None) == Normalisation(0.13025)
    assert normalisation_of(_QWEN, None, None) == Normalisation(1.0, 0.0, (1, 2), (3, 4))
    assert normalisation_of(None, None, None) == Normalisation()
    assert normalisation_of(_VAE, None, None, undone=True) == Normalisation(0.13025, undone=True)


def test_factors_are_the_vaes_own_or_refused() -> None:
    assert normalisation_of(_VAE, 0.13025, 0.0) == Normalisation(0.13025)
    with pytest.raises(InvalidRequest, match=r"0\.18215; that of sdxl is 0\.13025") as failed:
        normalisation_of(_VAE, 0.18215, None)
    assert failed.value.field == "scaling_factor"
    with pytest.raises(InvalidRequest, match=r"0\.1; that of qwen is 0"):
        normalisation_of(_QWEN, None, 0.1)


def test_without_the_vae_the_factors_count() -> None:
    """Archives keep latents of VAEs that no decoder has."""
    assert normalisation_of(None, 0.5, 0.25) == Normalisation(0.5, 0.25)
