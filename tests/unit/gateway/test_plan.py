"""Dividing a request among nodes, and adding up what came of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.model.outcome import NodeOutcome
from quire.model.ranges import ChunkRange, clip
from quire_gateway.core.plan import delivered_mask, shares, usable_chunks

ADDRESSES = {"a": "a:1", "b": "b:1"}


def test_shares_gather_ranges_by_node() -> None:
    ranges = [ChunkRange("a", 0, 4), ChunkRange("b", 4, 2), ChunkRange("a", 6, 1)]
    made = shares(ranges, ADDRESSES)
    assert [(share.index, share.node_id, share.grpc_address, share.ranges) for share in made] == [
        (0, "a", "a:1", (ranges[0], ranges[2])),
        (1, "b", "b:1", (ranges[1],)),
    ]


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 40), st.integers(0, 40))
def test_clipped_ranges_have_the_chunks_that_lie_within(counts: list[int], first: int, stop: int) -> None:
    at, ranges = 0, list[ChunkRange]()
    for count in counts:
        ranges.append(ChunkRange("ab"[len(ranges) % 2], at, count))
        at += count
    there = {(each.node_id, chunk) for each in ranges for chunk in range(each.first, each.stop)}
    cut = clip(ranges, first, stop)
    assert {(each.node_id, chunk) for each in cut for chunk in range(each.first, each.stop)} == {
        (node, chunk) for node, chunk in there if first <= chunk < stop
    }
    assert all(each.count > 0 for each in cut)


def test_usable_ends_at_the_first_gap() -> None:
    """A node that failed leaves a hole; chunks behind it are delivered but of no use to an engine."""
    outcomes = [
        NodeOutcome("a", (ChunkRange("a", 3, 4), ChunkRange("a", 9, 1)), b"\1\1\1\1\1"),
        NodeOutcome("b", (ChunkRange("b", 7, 2),), b"\1\0"),
    ]
    mask = delivered_mask(outcomes, 3, 7)
    assert mask == b"\1\1\1\1\1\0\1"
    assert usable_chunks(mask) == 5
    assert usable_chunks(b"\1" * 3) == 3
