"""Folders of VAEs: variants are VAEs of their own, and what cannot be used is passed over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire.model.errors import ConfigInvalid
from quire_decoder.adapters.vae import DEMO_FOLDER
from quire_decoder.adapters.weights import find_weights, in_folder, weights_digest

PLAIN = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "vae"))


def test_variants_are_told_apart(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"other weights")
    plain, variant = in_folder(folder)
    assert [(plain.variant, plain.about.name), (variant.variant, variant.about.name)] == [
        ("", "vae"),
        ("fp16", "vae.fp16"),
    ]
    assert plain.sha256 == weights_digest(folder) == weights_digest(DEMO_FOLDER) != variant.sha256
    (folder / PLAIN).unlink()
    assert weights_digest(folder) == variant.sha256


def test_what_cannot_be_used_is_passed_over(folder: Path, tmp_path: Path) -> None:
    """The others are known all the same."""
    bad = []
    for number, config in enumerate(
        (
            {"_class_name": "UNet2DModel"},
            {"_class_name": "AutoencoderKL"},
            [],
            {"_class_name": "AutoencoderKL"} | {"block_out_channels": "ab"},
        )
    ):
        made = Path(shutil.copytree(folder, tmp_path / f"bad-{number}"))
        (made / "config.json").write_text(json.dumps(config))
        bad.append(made)
    bare = tmp_path / "bare"
    bare.mkdir()
    sharded = Path(shutil.copytree(folder, tmp_path / "sharded"))
    (sharded / PLAIN).rename(sharded / "diffusion_pytorch_model-00001-of-00002.safetensors")
    for each in (*bad, bare, sharded):
        with pytest.raises(ConfigInvalid, match=each.name):
            in_folder(each)
    assert [weights.folder for weights in find_weights([*bad, folder, bare, sharded]).values()] == [folder]
    with pytest.raises(ConfigInvalid, match="nowhere"):
        find_weights([tmp_path / "nowhere"])
