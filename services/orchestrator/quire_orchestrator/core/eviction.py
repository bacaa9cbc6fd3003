"""Consequences of index entries that ended, and the choice of the node that rebuilds a lost index. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from quire.model.fingerprints import fingerprint
from quire.model.index import OBJECT_TIER, Drop, Evicted, Match
from quire.model.nodes import Node, StorageInfo
from quire_server.core.placement import rendezvous


def drops(evicted: Evicted, asking: str) -> dict[str, list[Drop]]:
    """Return each node's drops. `asking`: a node that needs none.

    An object is not dropped by that: it is deleted later, when no entry lists it then.
    """
    orders: dict[str, dict[bytes, Drop]] = {}
    for entry in (*evicted.hidden, *evicted.removed):  # of a node in both the listed entry counts
        for name in entry.nodes:
            if name not in (asking, OBJECT_TIER):
                drop = Drop(entry.record.key, fingerprint(entry.record.bucket), entry.generation)
                orders.setdefault(name, {})[drop.key] = drop
    return {name: list(by_key.values()) for name, by_key in orders.items()}


def in_object(match: Match) -> list[bool]:
    """Return for each chunk whether the object tier is listed."""
    return [OBJECT_TIER in run.nodes for run in match.runs for _ in range(run.count)]


def has_objects(node: Node) -> bool:
    """Whether a storage node reaches the object tier."""
    return isinstance(node.about, StorageInfo) and node.about.has_object_tier


def rebuilder(token: str, live: Mapping[str, Node]) -> str:
    """Return the name of the node that is to register the contents of the object tier; "" for none."""
    able = [node for node in live.values() if has_objects(node)]
    return rendezvous(token.encode(), able)[0].node_id if able else ""
