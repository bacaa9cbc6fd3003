"""Hints of an application for a request of vLLM's: the priority of its loads, and work at the end of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from quire.client import AsyncClient
from quire.integrations.hints import Hints, read_hints
from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.urgency import PRIORITY_MAX
from quire.telemetry import logger

_AGAIN_S: Final = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The last blocks of a request may still be on their way to Quire when it is finished."""
_LEAD_S: Final = 5.0
"""For a prefetch; less where the blocks are wanted sooner."""
Prefixes = Sequence[tuple[Namespace, ChunkKeys]]


def hints_of(request: Any) -> Hints:
    """Return the hints of a request. One that is not understood is as if it were not there, and is logged."""
    hints, invalid = read_hints(getattr(request, "kv_transfer_params", None))
    for name, value in invalid.items():
        logger().warning("a hint is not understood", name=name, value=repr(value), request=request.request_id)
    return hints


def priority_of(request: Any, hints: Hints) -> int:
    """Return the priority of a request's loads: as hinted, or vLLM's with its sign changed.

    vLLM's low numbers come first.
    """
    if hints.priority is not None:
        return hints.priority
    return max(-PRIORITY_MAX, min(PRIORITY_MAX, -getattr(request, "priority", 0)))


async def carry_out(client: AsyncClient, prefixes: Prefixes, hints: Hints) -> None:
    """Carry out hints at the end of a request, for each shard of its prompt.

    Of a prompt that is never stored whole the stored part is retained.
    """
    loop, last_s = asyncio.get_running_loop(), hints.prefetch_by_s or 0.0
    prefetch_s, lead_s = loop.time() + last_s, min(_LEAD_S, last_s / 2)
    try:
        if hints.retain_s:
            for namespace, keys in prefixes:
                for wait_s in _AGAIN_S:
                    await asyncio.sleep(wait_s)
                    if await client.retain(namespace, keys, hints.retain_s, holder=hints.session) == len(keys):
                        break
        if hints.demote:
            await asyncio.sleep(_LEAD_S)
            for namespace, keys in prefixes:
                if hints.session:
                    await client.end_retention(namespace, keys, holder=hints.session)
                await client.demote(namespace, keys)
        if hints.prefetch_by_s is not None:
            await asyncio.sleep(max(0.0, prefetch_s - lead_s - loop.time()))
            for namespace, keys in prefixes:
                await client.prefetch(namespace, keys, within_s=lead_s)
    except QuireError as error:
        logger().warning("hints are not carried out", error=error.code(), message=str(error))
