"""What tells a model from a fine-tuned copy of the same name and shapes: its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import blake3

from quire.model.errors import ConfigInvalid

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def weights_digest(folder: Path) -> str:
    """Of all weight files, whole: a fine-tuned copy has the same names and sizes.

    Raises `ConfigInvalid` where there are none.
    """
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not files:
        raise ConfigInvalid(f"{folder} has no weights that can be told apart; name them", field="weights")
    digest = hashlib.sha256()
    for path in files:
        hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
        digest.update(path.name.encode() + hasher.update_mmap(path).digest())
    return digest.hexdigest()[:32]
