"""Weights of VAEs in folders, as diffusers saves them. Each file is a VAE of its own, by the digest of its bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.model.errors import ConfigInvalid
from quire.model.nodes import KnownVae
from quire.telemetry import logger
from quire_decoder.core.vae_kinds import VaeKind

_FILE: Final = re.compile(r"diffusion_pytorch_model(?:\.([A-Za-z0-9_]+))?\.safetensors")


@dataclass(frozen=True, slots=True)
class Weights:
    """`variant`: such as "fp16", of diffusion_pytorch_model.fp16.safetensors; "" for the file without."""

    folder: Path
    variant: str
    sha256: str
    kind: VaeKind

    @property
    def about(self) -> KnownVae:
        return KnownVae(
            weights_sha256=self.sha256,
            name=f"{self.folder.name}.{self.variant}" if self.variant else self.folder.name,
            class_name=self.kind.class_name,
            channels=self.kind.channels,
            scale=self.kind.scale,
            scaling_factor=self.kind.scaling_factor,
            shift_factor=self.kind.shift_factor,
            latents_mean=self.kind.latents_mean,
            latents_std=self.kind.latents_std,
        )


def find_weights(folders: Sequence[Path]) -> dict[str, Weights]:
    """Find the weights of folders, by digest.

    Unusable files are passed over, and logged. Raises `ConfigInvalid` for no folder.
    """
    weights_by_digest = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigInvalid(f"there is no folder {folder} (QUIRE_DECODER_MODELS)")
        try:
            for weights in in_folder(folder):
                weights_by_digest[weights.sha256] = weights
        except ConfigInvalid as error:
            logger().error("a VAE cannot be used", folder=str(folder), error=error.message)
    return weights_by_digest


def in_folder(folder: Path) -> list[Weights]:
    """Find the variants of a folder, the plain one first.

    Raises `ConfigInvalid` for a folder without a VAE that is decoded here.
    """
    files = sorted(folder.glob("*.safetensors"))
    named = {path: match for path in files if (match := _FILE.fullmatch(path.name))}
    if not named:
        names = ", ".join(path.name for path in files) or "no .safetensors file"
        raise ConfigInvalid(
            f"{folder} has {names}; a VAE is diffusion_pytorch_model[.variant].safetensors, in one piece"
        )
    try:
        config: Any = json.loads((folder / "config.json").read_text())
        kind = VaeKind.of(config)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigInvalid(f"{folder}/config.json: {error}") from None
    variants = sorted((match[1] or "", path) for path, match in named.items())
    return [Weights(folder, variant, _digest(path), kind) for variant, path in variants]


def weights_digest(folder: Path) -> str:
    """SHA-256 of the folder's weights, hexadecimal; of several, of those without a variant's name, else the first.

    Raises `ConfigInvalid`.
    """
    return in_folder(folder)[0].sha256


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
