"""Placement: runs together, movement bounded, readable means live."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from quire.model.index import OBJECT_TIER, Match, PlacedRun
from quire.model.keys import ChunkKeys
from quire.model.nodes import Location, Node, StorageInfo
from quire.model.ranges import ChunkRange
from quire_server.core.claims import Claims
from quire_server.core.placement import Reader, cut, range_chunks, readable_ranges, rendezvous


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


@pytest.mark.parametrize(("chunk_bytes", "expected"), [(4096, 64), (512 << 10, 64), (2 << 20, 16), (100 << 20, 1)])
def test_ranges_are_sized_by_bytes(chunk_bytes: int, expected: int) -> None:
    assert range_chunks(chunk_bytes) == expected
    bounds = cut(10, 1000, chunk_bytes, 3)
    assert bounds[0] == (10, 13) and bounds[-1][1] == 1000
    assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
    assert {stop - start for start, stop in bounds[1:-1]} == {expected}


def test_claims_go_by_weight_and_move_little() -> None:
    """A node of twice the weight has twice the names; what another weight moves, moves to or from that node."""
    names = [index.to_bytes(4, "big") for index in range(6000)]
    before = Claims([("a", 1.0), ("b", 1.0), ("c", 2.0)]).strongest(names)
    assert Counter(before)["c"] == pytest.approx(3000, rel=0.1)
    after = Claims([("b", 1.0), ("c", 1.0), ("a", 1.0)]).strongest(names)
    moved = {(one, other) for one, other in zip(before, after, strict=True) if one != other}
    assert moved == {("c", "a"), ("c", "b")}


CHUNK = 1 << 20
KEYS = ChunkKeys(b"".join(index.to_bytes(32, "big") for index in range(600)))


def test_the_nearest_replica_serves() -> None:
    """Same host before same zone before any; what only the object tier has is spread, the same way each time."""
    places = {"n0": Location("h0", "z0"), "n1": Location("h1", "z1"), "n2": Location("h2", "z1")}
    live = {name: replace(LIVE[name], location=where) for name, where in places.items()}
    match = Match((PlacedRun(7, ("n0", "n1", "n2")),))

    def serves(client: Location) -> list[str]:
        return [each.node_id for each in readable_ranges(match, live, KEYS, Reader(CHUNK, client))]

    assert serves(Location("h2", "z0")) == ["n2"]
    assert serves(Location("other", "z1"))[0] in ("n1", "n2")
    far = readable_ranges(Match((PlacedRun(600, (OBJECT_TIER,)),)), live, KEYS, Reader(CHUNK))
    assert sum(each.count for each in far) == 600 and {each.node_id for each in far} == set(live)
    assert far == readable_ranges(Match((PlacedRun(600, (OBJECT_TIER,)),)), live, KEYS, Reader(CHUNK, turn=9))


def test_equal_replicas_take_turns_by_what_their_links_have_left() -> None:
    live = {name: replace(LIVE[name], about=StorageInfo(link=name)) for name in ("n0", "n1", "n2")}
    match = Match((PlacedRun(7, ("n0", "n1", "n2", "gone")),))

    def served(rates: dict[str, int]) -> Counter[str]:
        readers = [Reader(CHUNK, link_rates=rates, turn=turn) for turn in range(700)]
        return Counter(each.node_id for reader in readers for each in readable_ranges(match, live, KEYS, reader))

    assert all(count == pytest.approx(233, abs=3) for count in served({}).values())
    by_rate = served({"n0": 10**9, "n1": 10**9, "n2": 5 * 10**9})
    assert by_rate["n2"] == pytest.approx(500, abs=5) and by_rate["n0"] == pytest.approx(100, abs=5)


def test_a_long_prefix_that_two_nodes_have_is_read_from_both() -> None:
    """Range by range, not chunk by chunk."""
    runs = tuple(PlacedRun(range_chunks(CHUNK), ("n0", "n1")) for _ in range(10))
    for turn in range(20):
        ranges = readable_ranges(Match(runs), LIVE, KEYS, Reader(CHUNK, turn=turn))
        assert {each.node_id for each in ranges} == {"n0", "n1"}
        assert all(each.count % range_chunks(CHUNK) == 0 for each in ranges)


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
    assert readable_ranges(match, LIVE, KEYS, Reader(CHUNK)) == [ChunkRange("n0", 0, 15), ChunkRange("n2", 15, 3)]
    assert readable_ranges(Match((PlacedRun(4, ()),)), LIVE, KEYS, Reader(CHUNK)) == []
