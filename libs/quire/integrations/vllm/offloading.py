"""vLLM's own offloading connector, for engines with a `QuireTier`: it names the contents that chunks are of.

vLLM gives a tier the model's name, and nothing of its weights, adapters, scaling of positions or image processor.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from quire.integrations.vllm.engine import check_contents, engine_of, weights_of
from quire.model.errors import ConfigInvalid


class QuireOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """Refuses at the start, with `ConfigInvalid`, engines whose chunks have no name that is theirs alone."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        check_contents(vllm_config)
        if vllm_config.lora_config is not None:
            raise ConfigInvalid(
                "a tier receives adapters' names only, not their weights; QuireConnector serves adapters",
                field="enable_lora",
            )
        if role == KVConnectorRole.SCHEDULER:
            _name_contents(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)


def _name_contents(config: Any) -> None:
    """Put the name into the settings of each `QuireTier`. A tier with `weights` has its model's named by these.

    A tier receives identifiers of images only, which clients may use again. Without `trust_image_ids` names of chunks
    are therefore valid for one start of an engine, if the model sees images.
    """
    form = hashlib.sha256(json.dumps(engine_of(config), sort_keys=True).encode()).hexdigest()[:32]
    for tier in config.kv_transfer_config.kv_connector_extra_config.get("secondary_tiers", ()):
        if tier.get("type") == "QuireTier":
            tier["contents"] = f"{tier.get('weights') or weights_of(config.model_config)}/{form}"
            if _sees_images(config.model_config) and not tier.get("trust_image_ids"):
                tier["contents"] += f"/{uuid.uuid4().hex[:16]}"


def _sees_images(model: Any) -> bool:
    return bool(model.is_multimodal_model and not model.multimodal_config.language_model_only)
