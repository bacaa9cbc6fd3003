"""The storage nodes that may access the client's memory for a request: contacted, and not finished.

The answer to a cancelled request names them, so that its client waits for these nodes only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

_TOUCHING: Final[ContextVar[set[str] | None]] = ContextVar("touching", default=None)


@contextlib.contextmanager
def touching() -> Iterator[set[str]]:
    """Track the nodes of the request that is served inside this context and the tasks started from it."""
    nodes: set[str] = set()
    token = _TOUCHING.set(nodes)
    try:
        yield nodes
    finally:
        _TOUCHING.reset(token)


def contacted(node_id: str) -> None:
    """A node is about to be contacted."""
    if (nodes := _TOUCHING.get()) is not None:
        nodes.add(node_id)


def is_touching(node_id: str) -> bool:
    """Whether a node was contacted and has not finished. False outside of `touching`."""
    nodes = _TOUCHING.get()
    return nodes is not None and node_id in nodes


def finished(node_id: str) -> None:
    """A node has finished, or was not reached."""
    if (nodes := _TOUCHING.get()) is not None:
        nodes.discard(node_id)
