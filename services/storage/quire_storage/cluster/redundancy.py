"""Decides when a rolling update may continue after this node.

Its chunks are listed then, and every chunk has two live copies again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final, Protocol

from quire.model.errors import QuireError
from quire.model.nodes import Node
from quire.telemetry import logger
from quire_server.telemetry.metrics import Gate
from quire_storage.ports import Clock, Peers

CHECKED_AMONG: Final = "replicas checked among"
"""The note by which a node says of which nodes it was sure when it had last found a second copy of all replicas."""
NOT_YET: Final = "not yet"
_LOOK_S: Final = 2.0
_LOOK_MORE_S: Final = 0.05
"""For each node: what all of a large cluster ask as it starts stays within what orchestrators can answer."""
_SAYS: Final = 4
"""The protocol from which on nodes say what they have checked."""
_TOLD_MAX: Final = 8


class ReplicaProgress(Protocol):
    """A storage node's facts about itself."""

    @property
    def compared(self) -> bool:
        """Whether the index lists its chunks."""

    @property
    def replicas(self) -> str:
        """Digest of the nodes among which all replicas were last found; empty without replicas."""


def start_of(node: Node) -> tuple[str, str]:
    """Return its name, its incarnation and its capacity: these change with a restart or a lost drive."""
    return node.node_id, f"{node.incarnation}/{node.capacity_bytes}"


def counted(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes whose copies count: those that are not to be removed."""
    return [node for node in nodes if node.stays]


def digest(starts: Iterable[tuple[str, str]]) -> str:
    """Return a digest of nodes' names and starts."""
    names = "\n".join(f"{name} {incarnation}" for name, incarnation in sorted(starts))
    return f"{zlib.crc32(names.encode()):08x}"


async def open_when_redundant(gate: Gate, me: str, peers: Peers, progress: ReplicaProgress, clock: Clock) -> None:
    """Open `gate` once this node is listed in full, and it and all others have checked their replicas since it joined.

    A node that comes back empty leaves the others with single copies until these are copied; a second node that stops
    before would take some away. `progress`: this node's.
    """
    nodes: list[Node] = []
    while gate.why:
        await clock.sleep(_LOOK_S + len(nodes) * _LOOK_MORE_S)
        if not progress.compared:
            continue
        if progress.replicas == NOT_YET:
            gate.why = f"replicas of this node's chunks are missing, or not checked since a node came or went ({me})"
            continue
        try:
            nodes = await peers.described()
        except QuireError as error:
            gate.why = f"the orchestrator does not say what others have: {error}"
            continue
        names = unready(nodes, me)
        where = ", ".join(names[:_TOLD_MAX])
        gate.why = f"replicas are missing, or not checked since a node came or went, at {where}" if names else ""
    logger().info("redundant: a roll may go on")


def unready(nodes: Iterable[Node], me: str) -> list[str]:
    """Names of storage nodes that have not checked all their replicas among these nodes; `me` if it is not among them.

    Nodes that keep no replicas do not say anything of them; nor do those of a release before, which are waited for.
    Those that are to be removed are not asked.
    """
    nodes = list(nodes)
    absent = [] if any(node.node_id == me for node in nodes) else [me]
    nodes = counted(nodes)
    expected = digest(map(start_of, nodes))
    return absent + [node.node_id for node in nodes if _checked(node, expected) != expected]


def _checked(node: Node, expected: str) -> str:
    """Return a node's report of its replicas. One without a report keeps none, or is of an earlier release."""
    return node.notes.get(CHECKED_AMONG, expected if node.protocol_version >= _SAYS else NOT_YET)
