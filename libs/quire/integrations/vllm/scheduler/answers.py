"""`kv_transfer_params` of a request's answer: for the engine that decodes it, or for a router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from quire.integrations.vllm.groups import Kind
from quire.integrations.vllm.scheduler.handover import NAMES, TOKENS, is_for_another, names_of
from quire.integrations.vllm.scheduler.requests import BlockNames, State

DESCRIPTION: Final = "quire_blocks"
_ADDRESSES: Final = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


def answer_of(state: State, blocks: BlockNames, *, stores: bool) -> dict[str, Any] | None:
    """Return the parameters for the receiver of a finished request's answer; None for none.

    Args:
        state: Of the request.
        blocks: Names of the engine's blocks.
        stores: Whether this engine stores blocks.
    """
    if state.hints.describe:
        return _description_of(blocks)
    return _handover_of(state, blocks) if stores and is_for_another(state.request) else None


def _handover_of(state: State, blocks: BlockNames) -> dict[str, Any]:
    """Say how many of the prompt's tokens are stored, or on their way.

    Proxies and routers expect the names that vLLM's own connectors give; these blocks have no address.
    """
    ends = [
        (max(part.states, default=-1) + 1 if group.kind is Kind.STATE else part.stored) * group.block_tokens
        for part, group in zip(state.parts, blocks.groups, strict=True)
    ]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        TOKENS: min(*ends, state.request.num_prompt_tokens),
        NAMES: names_of(blocks.namespaces),
        **dict.fromkeys(_ADDRESSES),
    }


def _description_of(blocks: BlockNames) -> dict[str, Any] | None:
    """Describe the names of the engine's blocks: all that a router needs to name a prompt's, but the tenant's salt.

    Of groups that keep the whole prefix, the first; of its shards, too: all have the same chunks.
    """
    from vllm.v1.core import kv_cache_utils

    group = next((group for group in blocks.groups if group.kind is Kind.FULL), None)
    if group is None or not blocks.namespaces:
        return None
    namespace = replace(blocks.namespaces[group.number][0], tenant_salt=b"")
    return {
        NAMES: names_of(blocks.namespaces),
        DESCRIPTION: {
            "namespace": namespace.to_record(),
            "hash_tokens": blocks.hash_tokens,
            "block_tokens": group.block_tokens,
            "parent": bytes(kv_cache_utils.NONE_HASH).hex(),
        },
    }
