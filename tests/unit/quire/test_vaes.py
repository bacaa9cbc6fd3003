"""Which latents a cluster's VAEs decode, and why not the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.model.latents import LatentInfo, Normalisation, RecordInvalid, Vae
from quire.model.nodes import KnownVae
from quire.model.vaes import check_decodable

SMALL = KnownVae(weights_sha256="ab" * 32, name="small", channels=4, scale=8)
INFO = LatentInfo((4, 8, 8), "float16", Vae("v", "", "AB" * 32), 64, 64)
VALUES = np.ones((4, 8, 8), dtype=np.float16)


def test_a_latent_of_a_known_vae() -> None:
    """Digests are the same in capitals."""
    check_decodable(VALUES, INFO, {"ab" * 32: SMALL})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"vae": Vae("v", "", "cd" * 32)}, "weights_sha256"),
        ({"vae": Vae("v")}, "weights_sha256"),
        ({"layout": "packed"}, "layout"),
        ({"normalisation": Normalisation(batch_norm=True)}, "layout"),
        ({"height": 128, "width": 128}, "height, width"),
        ({"normalisation": Normalisation(1e-37)}, "values"),
    ],
)
def test_a_latent_of_none(change: dict[str, object], field: str) -> None:
    values = VALUES if field != "values" else VALUES * np.float16(60000)
    with pytest.raises(RecordInvalid) as caught:
        check_decodable(values, replace(INFO, **change), {"ab" * 32: SMALL})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_none(value: float) -> None:
    values = VALUES.copy()
    values[1, 2, 3] = value
    with pytest.raises(RecordInvalid, match="finite"):
        check_decodable(values, INFO, {"ab" * 32: SMALL})
    with pytest.raises(RecordInvalid, match="3 channels, small has 4"):
        check_decodable(VALUES[:3], replace(INFO, shape=(3, 8, 8)), {"ab" * 32: SMALL})
