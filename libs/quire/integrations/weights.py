"""Names of models that change with their contents: with the weights, and with the files that make a model's inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import blake3

from quire.model.errors import ConfigInvalid

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_ADAPTERS: Final = ("adapter_config.json", *_WEIGHTS)
_PROCESSORS: Final = ("*processor_config.json", "*.py")
_LENGTH_FREE_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn", "mrope"})


def weights_digest(folder: Path) -> str:
    """Return the digest of all weight files: a fine-tuned copy has the same names and sizes.

    Raises `ConfigInvalid` where there are none.
    """
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not files:
        raise ConfigInvalid(f"{folder} has no weights to take a digest of; set `weights`", field="weights")
    return _digest(files)


def weights_name(model: str, commit: str | None) -> str:
    """Return a name of a model's weights that is another one for other weights.

    A folder or a file, as of GGUF, is digested. A model of a hub is named by its commit: a branch moves.

    Raises:
        ConfigInvalid: There are no weight files, or the commit is not known.
    """
    path = Path(model)
    if path.is_dir():
        return weights_digest(path)
    if path.is_file():
        return _digest([path])
    if not commit:
        raise ConfigInvalid(f"the commit of {model} is not known; name the weights", field="weights")
    return f"{model}@{commit}"


def adapter_files(folder: Path) -> list[Path]:
    """List an adapter's files as PEFT writes them: its configuration and its weights."""
    return sorted({path for pattern in _ADAPTERS for path in folder.glob(pattern)})


def adapter_digest(folder: Path) -> str:
    """Digest an adapter's files, whole: one that was trained again has the same names and sizes."""
    return _digest(adapter_files(folder))


def processor_digest(model: str) -> str:
    """Digest of what makes inputs of images, audio and video in a local folder, its code included; empty for others.

    The same image is another input after a change of its processor, under the same hash of its content.
    """
    folder = Path(model)
    files = {path for pattern in _PROCESSORS for path in folder.glob(pattern)} if folder.is_dir() else set()
    return _digest(sorted(files)) if files else ""


def rope_depends_on_length(config: Mapping[str, Any]) -> bool:
    """Return whether positions are scaled by the longest sequence that an engine is configured for.

    `config`: as of a model's config.json. A kind of scaling that is not known counts as one that depends on it.
    """
    kinds = {config.get("rope_type", config.get("type"))} if "factor" in config or "rope_type" in config else set()
    if kinds - _LENGTH_FREE_ROPE - {None}:
        return True
    return any(rope_depends_on_length(value) for value in config.values() if isinstance(value, Mapping))


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
        digest.update(path.name.encode() + hasher.update_mmap(path).digest())
    return digest.hexdigest()[:32]
