"""vLLM: a KV connector that keeps prefixes in Quire and has them delivered into vLLM's own blocks.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "QuireConnector",
        "kv_connector_module_path": "quire.integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"gateway": "HOST:PORT"}}'

One block of vLLM is one chunk. See docs/guides/vllm.md.
"""

from __future__ import annotations

from typing import Any

__all__ = ["QuireConnector", "QuireOffloadingConnector"]


def __getattr__(name: str) -> Any:
    """The connectors need vLLM; their parts do not."""
    if name not in __all__:
        raise AttributeError(name)
    from quire.integrations.vllm import connector, offloading

    return getattr(connector if name == "QuireConnector" else offloading, name)
