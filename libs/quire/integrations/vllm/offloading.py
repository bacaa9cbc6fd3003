"""vLLM's own offloading connector, for engines with a `QuireTier`: it names the contents that chunks are of.

vLLM gives a tier the model's name, and nothing of its weights, adapters, scaling of positions or image processor.
An adapter is named by the digest of its files, in a transfer parameter of each request.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from quire.integrations.vllm.contents import RequestAdapter, Unnamed
from quire.integrations.vllm.engine import check_contents, content_names, engine_of, weights_of
from quire.model.errors import ConfigInvalid
from quire.telemetry import logger


class QuireOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """Refuses at the start, with `ConfigInvalid`, engines whose chunks have no name that is theirs alone."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        check_contents(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            _name_contents(vllm_config)
            self._names = content_names(vllm_config, kv_cache_config)
            self._digesting = ThreadPoolExecutor(1, "quire-adapters")
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """Begin to digest the request's adapter, and hand the request to vLLM's tiers."""
        params = {**(request.kv_transfer_params or {})}
        params.pop(RequestAdapter.PARAMETER, None)  # a client's own
        if request.lora_request is not None:
            naming = self._digesting.submit(self._names.adapter, request.lora_request)
            params[RequestAdapter.PARAMETER] = RequestAdapter(self._names, request.lora_request, naming)
        request.kv_transfer_params = params or None
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load; none, also from vLLM's memory tier, for an adapter that changed under its path."""
        adapter = (request.kv_transfer_params or {}).get(RequestAdapter.PARAMETER)
        try:
            if adapter is not None and adapter.current_name() is None:
                return None, False  # vLLM asks again
        except Unnamed as unnamed:
            if not request.skip_reading_prefix_cache:
                logger().warning("a request is not cached", request=request.request_id, reason=str(unnamed))
            request.skip_reading_prefix_cache = True
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def shutdown(self) -> None:
        """Stop vLLM's tiers, and the thread that digests adapters."""
        super().shutdown()
        if hasattr(self, "_digesting"):
            self._digesting.shutdown(wait=False, cancel_futures=True)


def _name_contents(config: Any) -> None:
    """Put the name into the settings of each `QuireTier`. A tier with `weights` has its model's named by these.

    Raises `ConfigInvalid` for configurations that a tier cannot name.

    A tier receives identifiers of images only, which clients may use again. Without `trust_image_ids` names of chunks
    are therefore valid for one start of an engine, if the model sees images.
    """
    # vLLM does not report to a tier how ranks divide a block.
    if config.parallel_config.decode_context_parallel_size > 1:
        raise ConfigInvalid(
            "more than 1 is not supported by a QuireTier; QuireConnector supports it",
            field="decode_context_parallel_size",
        )
    form = hashlib.sha256(json.dumps(engine_of(config), sort_keys=True).encode()).hexdigest()[:32]
    for tier in config.kv_transfer_config.kv_connector_extra_config.get("secondary_tiers", ()):
        if tier.get("type") == "QuireTier":
            tier["contents"] = f"{tier.get('weights') or weights_of(config.model_config)}/{form}"
            if _sees_images(config.model_config) and not tier.get("trust_image_ids"):
                tier["contents"] += f"/{uuid.uuid4().hex[:16]}"


def _sees_images(model: Any) -> bool:
    return bool(model.is_multimodal_model and not model.multimodal_config.language_model_only)
