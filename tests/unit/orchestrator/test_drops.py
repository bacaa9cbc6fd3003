"""Drops that follow from an eviction."""

from __future__ import annotations

from quire.model.index import OBJECT_TIER, Evicted, Gone
from quire.model.records import ChunkRecord
from quire_orchestrator.core.eviction import drops

_CHUNK = ChunkRecord(b"k" * 32, b"", b"k" * 32, b"")


def test_of_a_node_that_is_listed_and_hides_an_older_copy_the_listed_one_goes() -> None:
    """An orchestrator of the release before lists a node again and leaves the record of its hidden copy."""
    evicted = Evicted(
        (Gone(_CHUNK, 7, ("a", "b", OBJECT_TIER)),), (), (Gone(_CHUNK, 3, ("a",)), Gone(_CHUNK, 5, ("c",)))
    )
    orders = drops(evicted, "b")
    assert {name: [drop.generation for drop in of_node] for name, of_node in orders.items()} == {"a": [7], "c": [5]}
