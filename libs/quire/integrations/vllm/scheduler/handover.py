"""Hand-over of a prompt from the engine that computes it to the engine that decodes, by vLLM's `kv_transfer_params`.

A proxy sends a request with `do_remote_decode` and one token to a prefill engine, takes `kv_transfer_params` from its
answer, and sends the request with these to a decode engine. The blocks travel through Quire: the prefill engine stores
them as it computes, and the decode engine waits for those that are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.telemetry import logger

_TOKENS: Final = "quire_tokens"


@dataclass(frozen=True, slots=True)
class Handover:
    """A prompt that another engine has computed.

    Args:
        tokens: Tokens whose blocks that engine stores; None where its answer did not say.
        until_s: Time until which they are waited for.
    """

    tokens: int | None
    until_s: float


def handed_over(request: Any, until_s: float) -> Handover | None:
    """Return what another engine has computed of a request's prompt; None for a request that is this engine's alone."""
    parameters = _parameters(request)
    if not parameters.get("do_remote_prefill"):
        return None
    tokens = parameters.get(_TOKENS)
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
        logger().warning("a hint is not understood", name=_TOKENS, value=repr(tokens), request=request.request_id)
        tokens = None
    return Handover(tokens, until_s)


def is_for_another(request: Any) -> bool:
    """Return whether another engine is to decode a request."""
    return bool(_parameters(request).get("do_remote_decode"))


def parameters_for(tokens: int) -> dict[str, Any]:
    """Return the `kv_transfer_params` for the decode engine.

    Args:
        tokens: Tokens of the prompt whose blocks are stored, or on their way.
    """
    # Proxies and routers expect the names that vLLM's own connectors give; these blocks have no address.
    addresses = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {"do_remote_prefill": True, "do_remote_decode": False, _TOKENS: tokens, **addresses}


def _parameters(request: Any) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = getattr(request, "kv_transfer_params", None) or {}
    return parameters
