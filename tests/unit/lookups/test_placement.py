"""Placement: runs together, movement bounded, readable means live."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from quire.model.index import OBJECT_TIER, Match, PlacedRun
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys
from quire.model.nodes import Location, Node, StorageInfo
from quire.model.ranges import ChunkRange
from quire_server.core.placement import placed_ranges, readable_ranges, rendezvous


def _node(name: str) -> Node:
    return Node(node_id=name, about=StorageInfo(worker_address=name.encode()), grpc_address=f"{name}:1")


NODES = [_node(f"n{index}") for index in range(5)]
LIVE = {node.node_id: node for node in NODES}


def test_a_leaving_node_moves_only_its_own_share() -> None:
    """Names that another node owned before keep their owner; those of the leaver spread over the rest."""
    names = [index.to_bytes(4, "big") for index in range(2000)]
    before = {name: rendezvous(name, NODES)[0].node_id for name in names}
    after = {name: rendezvous(name, NODES[:-1])[0].node_id for name in names}
    moved = [name for name in names if before[name] != after[name]]
    assert all(before[name] == "n4" for name in moved)
    shares = Counter(before.values())
    assert min(shares.values()) > 300 and max(shares.values()) < 500


def test_a_run_of_chunks_sits_together() -> None:
    """Ranges start at boundaries of index buckets, cover everything from `first` on, and are each at one node."""
    keys = ChunkKeys(b"".join(index.to_bytes(32, "big") for index in range(1000)))
    ranges = placed_ranges(keys, 100, NODES)
    at = 100
    for each in ranges:
        assert each.first == at
        assert at == 100 or at % BUCKET_CHUNKS == 0
        at = each.stop
    assert at == 1000
    shared = placed_ranges(keys.run(0, 300), 0, NODES)
    assert shared[0].node_id == ranges[0].node_id, "the same prefix goes to the same node"


KEYS = ChunkKeys(b"".join(index.to_bytes(32, "big") for index in range(600)))


def test_the_nearest_replica_serves() -> None:
    """Same host before same zone before any; and what only the object tier has goes by bucket, to a live node."""
    places = {"n0": Location("h0", "z0"), "n1": Location("h1", "z1"), "n2": Location("h2", "z1")}
    live = {name: replace(LIVE[name], location=where) for name, where in places.items()}
    match = Match((PlacedRun(7, ("n0", "n1", "n2")),))

    def serves(client: Location) -> list[str]:
        return [each.node_id for each in readable_ranges(match, live, KEYS, client)]

    assert serves(Location("h2", "z0")) == ["n2"]
    assert serves(Location("other", "z1")) == ["n1"]
    assert serves(Location()) == ["n0"]
    far = readable_ranges(Match((PlacedRun(600, (OBJECT_TIER,)),)), live, KEYS)
    assert sum(each.count for each in far) == 600
    assert far == placed_ranges(KEYS, 0, list(live.values()))


def test_readable_ends_where_no_replica_lives() -> None:
    match = Match(
        (
            PlacedRun(10, ("n0",)),
            PlacedRun(5, ("n1", "n0")),
            PlacedRun(3, ("gone", "n2")),
            PlacedRun(4, ("gone",)),
            PlacedRun(9, ("n0",)),
        )
    )
    assert readable_ranges(match, LIVE, KEYS) == [ChunkRange("n0", 0, 15), ChunkRange("n2", 15, 3)]
    assert readable_ranges(Match((PlacedRun(4, ()),)), LIVE, KEYS) == []
