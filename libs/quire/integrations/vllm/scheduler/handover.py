"""Hand-over of a prompt from the engine that computes it to the engine that decodes, by vLLM's `kv_transfer_params`.

A proxy sends a request with `do_remote_decode` and one token to a prefill engine, takes `kv_transfer_params` from its
answer, and sends the request with these to a decode engine. The blocks travel through Quire: the prefill engine stores
them as it computes, and the decode engine loads them during the store, or once they are stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire.model.hashing import Namespace
from quire.telemetry import logger

TOKENS: Final = "quire_tokens"
NAMES: Final = "quire_names"
_OTHERWISE: Final = "another tensor parallelism, block size, dtype or model, or other weights"


@dataclass(frozen=True, slots=True)
class Handover:
    """A prompt that another engine has computed.

    Args:
        tokens: Tokens whose blocks that engine stores; None where its answer did not say.
        until_s: Time until which they are waited for.
        names: Digest of the namespaces of that engine's blocks; empty where its answer did not say.
    """

    tokens: int | None
    until_s: float
    names: str = ""


class Counterparts:
    """Compares the names of other engines' blocks with this engine's. `count`: adds to a figure."""

    def __init__(self, count: Callable[[str, float], None]) -> None:
        self._count = count
        self._has_warned = False

    def can_be_found(self, handover: Handover | None, spaces: Sequence[Sequence[Namespace]]) -> bool:
        """Return whether blocks of a hand-over may come; False if there is none.

        Blocks with other names never come, for example those of an engine with another tensor parallelism: the prompt
        is computed at once.
        """
        if handover is None or handover.names in ("", names_of(spaces)):
            return handover is not None
        self._count("handovers", 1)
        self._count("short_handovers", 1)
        if not self._has_warned:
            logger().warning("blocks of a prefill engine have other names, and are computed here", why=_OTHERWISE)
            self._has_warned = True
        return False


def handed_over(request: Any, until_s: float) -> Handover | None:
    """Return what another engine has computed of a request's prompt; None for a request that is this engine's alone."""
    parameters = _parameters(request)
    if not parameters.get("do_remote_prefill"):
        return None
    tokens = parameters.get(TOKENS)
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
        logger().warning("a hint is not understood", name=TOKENS, value=repr(tokens), request=request.request_id)
        tokens = None
    names = parameters.get(NAMES)
    return Handover(tokens, until_s, names if isinstance(names, str) else "")


def is_for_another(request: Any) -> bool:
    """Return whether another engine is to decode a request."""
    return bool(_parameters(request).get("do_remote_decode"))


def names_of(spaces: Sequence[Sequence[Namespace]]) -> str:
    """Return a digest of the namespaces of an engine's blocks, by group and shard."""
    digests = b"".join(space.digest() for shards in spaces for space in shards)
    shapes = repr([len(shards) for shards in spaces]).encode()
    return hashlib.blake2b(shapes + digests, digest_size=8).hexdigest()


def _parameters(request: Any) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = getattr(request, "kv_transfer_params", None) or {}
    return parameters
