"""Dividing a request among nodes, and adding up what came of it."""

from __future__ import annotations

import pytest

from quire.model.errors import DescriptorInvalid
from quire.model.nodes import Segment
from quire.model.outcome import ChunkRun, NodeOutcome
from quire_gateway.core.plan import delivered_mask, shares, usable_chunks


def _segment(node: str, first: int, count: int) -> Segment:
    return Segment(node, f"{node}:1", node.encode(), first, count)


def test_shares_gather_runs_by_node() -> None:
    made = shares([_segment("a", 0, 4), _segment("b", 4, 2), _segment("a", 6, 1)], 7)
    assert [(share.index, share.node_id, share.runs) for share in made] == [
        (0, "a", (ChunkRun(0, 4), ChunkRun(6, 1))),
        (1, "b", (ChunkRun(4, 2),)),
    ]


@pytest.mark.parametrize(
    "segments", [[("a", 0, 3)], [("a", 1, 4)], [("a", 0, 3), ("b", 2, 2)], [("a", 0, 0), ("b", 0, 4)], []]
)
def test_gaps_and_overlaps_are_refused(segments: list[tuple[str, int, int]]) -> None:
    with pytest.raises(DescriptorInvalid, match="segments"):
        shares([_segment(*segment) for segment in segments], 4)


def test_usable_ends_at_the_first_gap() -> None:
    """A node that failed leaves a hole; chunks behind it are delivered but of no use to an engine."""
    outcomes = [
        NodeOutcome("a", (ChunkRun(0, 4), ChunkRun(6, 1)), b"\1\1\1\1\1"),
        NodeOutcome("b", (ChunkRun(4, 2),), b"\1\0"),
    ]
    mask = delivered_mask(outcomes, 7)
    assert mask == b"\1\1\1\1\1\0\1"
    assert usable_chunks(mask) == 5
    assert usable_chunks(b"\1" * 3) == 3
