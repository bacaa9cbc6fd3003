"""Which storage nodes may touch the client's memory for a request: those that were asked and have not said their end.

A request that is cancelled is answered with them, so that its client waits for these nodes and for no others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

_TOUCHING: Final[ContextVar[set[str] | None]] = ContextVar("touching", default=None)


@contextlib.contextmanager
def touching() -> Iterator[set[str]]:
    """The nodes of the request that is answered within, and in the tasks that it starts; kept up to date."""
    nodes: set[str] = set()
    token = _TOUCHING.set(nodes)
    try:
        yield nodes
    finally:
        _TOUCHING.reset(token)


def asked(node_id: str) -> None:
    """A node is about to be asked."""
    if (nodes := _TOUCHING.get()) is not None:
        nodes.add(node_id)


def is_touching(node_id: str) -> bool:
    """Whether a node was asked and is not quiet. Not where nobody is told."""
    nodes = _TOUCHING.get()
    return nodes is not None and node_id in nodes


def quiet(node_id: str) -> None:
    """A node has said that it touches nothing any more, or was not reached."""
    if (nodes := _TOUCHING.get()) is not None:
        nodes.discard(node_id)
