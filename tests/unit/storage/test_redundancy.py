"""When a roll may go on, by what the storage nodes say."""

from __future__ import annotations

from quire.model.nodes import Node, StorageInfo
from quire_storage.redundancy import CHECKED_AMONG, NOT_YET, digest, unready


def _node(name: str, checked: str | None, incarnation: str = "1") -> Node:
    notes = {} if checked is None else {CHECKED_AMONG: checked}
    return Node(node_id=name, about=StorageInfo(), incarnation=incarnation, notes=notes)


def test_all_nodes_must_have_checked_their_replicas_among_those_that_are_there_now() -> None:
    now, before = digest([("a", "1"), ("b", "1")]), digest([("a", "1"), ("b", "0")])
    assert unready([_node("a", now), _node("b", now)], "a") == []
    assert unready([_node("a", now), _node("b", before)], "a") == ["b"], "it has not heard of the other's restart"
    assert unready([_node("a", NOT_YET), _node("b", now)], "a") == ["a"]
    assert unready([_node("b", digest([("b", "1")]))], "a") == ["a"], "the cluster does not know it"


def test_a_node_without_replicas_holds_nobody_up() -> None:
    now = digest([("a", "1"), ("memory", "1")])
    assert unready([_node("a", now), _node("memory", None)], "a") == []
