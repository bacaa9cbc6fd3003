"""Hints of an application for a request: its priority, and in `kv_transfer_params` how long its prompt is to stay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from quire.client import QuireClient
from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.urgency import PRIORITY_MAX
from quire.telemetry import logger

RETAIN: Final = "quire_retain_s"
_AGAIN_S: Final = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The last blocks of a request may still be on their way to Quire when it is finished."""


def retain_s(request: Any) -> float:
    """Return for how many seconds the request's prompt is to be retained; 0 for none or an invalid time."""
    seconds = (getattr(request, "kv_transfer_params", None) or {}).get(RETAIN, 0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        logger().warning("a hint is not understood", name=RETAIN, value=repr(seconds), request=request.request_id)
        return 0.0
    return float(seconds)


def priority_of(request: Any) -> int:
    """Return the priority of a request's loads: vLLM's own with its sign changed, as vLLM's low numbers come first."""
    return max(-PRIORITY_MAX, min(PRIORITY_MAX, -getattr(request, "priority", 0)))


async def retain(client: QuireClient, prefixes: Sequence[tuple[Namespace, ChunkKeys]], seconds: float) -> None:
    """Retain the prefix of each shard, once all of it is stored, or the part that is stored in the end."""
    try:
        for namespace, keys in prefixes:
            for wait_s in _AGAIN_S:
                await asyncio.sleep(wait_s)
                if await client.retain(namespace, keys, seconds) == len(keys):
                    break
    except QuireError as error:
        logger().warning("a prompt is not retained", error=error.code(), message=str(error))
