"""Hints of an application for a request, in `kv_transfer_params.quire`: what its prompt's blocks are wanted for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire.client import QuireClient
from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.urgency import PRIORITY_MAX
from quire.telemetry import logger

HINTS: Final = "quire"
_AGAIN_S: Final = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The last blocks of a request may still be on their way to Quire when it is finished."""
_LEAD_S: Final = 5.0
"""For a prefetch; less where the blocks are wanted sooner."""
Prefixes = Sequence[tuple[Namespace, ChunkKeys]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Hints of one request.

    Attributes:
        retain_s: Seconds for which the prompt is retained once the request is finished; 0 for none.
        priority: Of its loads, -10 to 10; None for that of vLLM.
        prefetch_by_s: Seconds after its end at which the next request of the prompt comes, for example when a tool has
            answered; None for unknown.
        demote: The prompt is not wanted again soon: memory and drives may be given to others.
    """

    retain_s: float = 0.0
    priority: int | None = None
    prefetch_by_s: float | None = None
    demote: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done at the end of the request."""
        return not (self.retain_s or self.demote) and self.prefetch_by_s is None


def hints_of(request: Any) -> Hints:
    """Return the hints of a request. One that is not understood is as if it were not there, and is logged."""
    hints = (getattr(request, "kv_transfer_params", None) or {}).get(HINTS, {})
    if not isinstance(hints, Mapping):
        _complain(request, HINTS, hints)
        return Hints()
    values: dict[str, Any] = {}
    for name, value in hints.items():
        check = _CHECKS.get(name)
        if check is not None and check(value):
            values[name] = value
        else:
            _complain(request, f"{HINTS}.{name}", value)
    return Hints(**values)


def priority_of(request: Any, hints: Hints) -> int:
    """Return the priority of a request's loads: as hinted, or vLLM's with its sign changed.

    vLLM's low numbers come first.
    """
    if hints.priority is not None:
        return hints.priority
    return max(-PRIORITY_MAX, min(PRIORITY_MAX, -getattr(request, "priority", 0)))


async def carry_out(client: QuireClient, prefixes: Prefixes, hints: Hints) -> None:
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
                    if await client.retain(namespace, keys, hints.retain_s) == len(keys):
                        break
        if hints.demote:
            await asyncio.sleep(_LEAD_S)
            for namespace, keys in prefixes:
                await client.demote(namespace, keys)
        if hints.prefetch_by_s is not None:
            await asyncio.sleep(max(0.0, prefetch_s - lead_s - loop.time()))
            for namespace, keys in prefixes:
                await client.prefetch(namespace, keys, within_s=lead_s)
    except QuireError as error:
        logger().warning("hints are not carried out", error=error.code(), message=str(error))


def _complain(request: Any, name: str, value: Any) -> None:
    logger().warning("a hint is not understood", name=name, value=repr(value), request=request.request_id)


def _is_time(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < math.inf


def _is_priority(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int) and abs(value) <= PRIORITY_MAX


_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "retain_s": _is_time,
    "priority": _is_priority,
    "prefetch_by_s": _is_time,
    "demote": lambda value: isinstance(value, bool),
}
