"""The namespace of an SGLang: everything that decides what bytes its pages have for the same tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quire.integrations.weights import rope_depends_on_length, weights_digest
from quire.model.errors import ConfigInvalid
from quire.model.hashing import Namespace
from quire.model.layout import KvLayout


def namespace_of(
    model: str,
    weights: str,
    layout: KvLayout,
    facts: Mapping[str, Any],
    *,
    tenant_salt: bytes,
    shard: tuple[int, int],
    flag: str,
) -> Namespace:
    """Return the namespace of pages.

    `weights`: as set, empty for the digest of those in the model's folder; `facts`: everything else that makes pages
    differ; `shard`: rank, of how many.

    Raises `ConfigInvalid` if the weights cannot be named.
    """
    weights = weights or (weights_digest(Path(model)) if Path(model).is_dir() else "")
    if not weights:
        raise ConfigInvalid(f"{model} is no folder with weights to take a digest of; set `weights`", field=flag)
    all_of_it = {"sglang": ".".join(version("sglang").split(".")[:2]), **facts}
    form = hashlib.sha256(json.dumps(all_of_it, sort_keys=True, default=str).encode()).hexdigest()[:32]
    rank, ranks = shard
    return Namespace(Path(model).name, f"{weights}/{form}", layout, tenant_salt, shard_index=rank, shard_count=ranks)


def configuration_of(model: str, server_args: Any) -> dict[str, Any]:
    """Return the model's configuration with the server's overrides: the same weights may have other positions.

    `server_args`: SGLang's, None where they are not known. The longest context counts where positions depend on it.
    """
    file = Path(model) / "config.json"
    config: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    config |= json.loads(getattr(server_args, "json_model_override_args", "") or "{}")
    depends = rope_depends_on_length(config) or not file.is_file()
    length = getattr(server_args, "context_length", None) if depends else None
    return {"config": {name: value for name, value in config.items() if "path" not in name}, "context_length": length}
