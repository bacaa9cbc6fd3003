"""When a roll may go on behind this node: what it holds is listed, and every node has two live copies again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Final

from quire.model.errors import QuireError
from quire.model.nodes import Node
from quire.telemetry import logger
from quire_server.telemetry.metrics import Gate
from quire_storage.ports import Clock, Peers

CHECKED_AMONG: Final = "replicas checked among"
"""The note by which a node says of which nodes it was sure when it had last found a second copy of all replicas."""
NOT_YET: Final = "not yet"
_LOOK_S: Final = 2.0
_TOLD_MAX: Final = 8


def digest(starts: Iterable[tuple[str, str]]) -> str:
    """Of nodes' names and incarnations."""
    names = "\n".join(f"{name} {incarnation}" for name, incarnation in sorted(starts))
    return f"{zlib.crc32(names.encode()):08x}"


async def open_when_redundant(gate: Gate, me: str, peers: Peers, compared: Callable[[], bool], clock: Clock) -> None:
    """Open `gate` once this node is listed in full, and it and all others have checked their replicas since it joined.

    A node that comes back empty leaves the others with single copies until these are copied; a second node that goes
    meanwhile would take some away. `compared`: whether the index has been compared with this node.
    """
    while gate.why:
        await clock.sleep(_LOOK_S)
        if not compared():
            continue
        try:
            waiting = unready(await peers.described(), me)
        except QuireError as error:
            gate.why = f"the orchestrator does not say what others have: {error}"
            continue
        where = ", ".join(waiting[:_TOLD_MAX])
        gate.why = f"replicas are missing, or not checked since a node came or went, at {where}" if waiting else ""
    logger().info("redundant: a roll may go on")


def unready(nodes: Iterable[Node], me: str) -> list[str]:
    """Names of storage nodes that have not checked all their replicas among these nodes; `me` if it is not among them.

    Nodes that keep no replicas do not say anything of them.
    """
    nodes = list(nodes)
    wanted = digest((node.node_id, node.incarnation) for node in nodes)
    missing = [] if any(node.node_id == me for node in nodes) else [me]
    return missing + [node.node_id for node in nodes if node.notes.get(CHECKED_AMONG, wanted) != wanted]
