"""How one request is divided among storage nodes, and how their outcomes add up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quire.model.outcome import NodeOutcome
from quire.model.ranges import ChunkRange


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Everything that one node does for a request. `index` numbers the nodes in order of appearance."""

    index: int
    node_id: str
    grpc_address: str
    ranges: tuple[ChunkRange, ...]


def shares(ranges: Sequence[ChunkRange], addresses: Mapping[str, str]) -> list[NodeShare]:
    """Ranges by node, in order of appearance. `addresses`: of the nodes' gRPC servers."""
    by_node: dict[str, list[ChunkRange]] = {}
    for run in ranges:
        by_node.setdefault(run.node_id, []).append(run)
    return [
        NodeShare(index, node_id, addresses[node_id], tuple(runs))
        for index, (node_id, runs) in enumerate(by_node.items())
    ]


def delivered_mask(outcomes: Iterable[NodeOutcome], first: int, chunks: int) -> bytes:
    """Return one byte for each of `chunks` chunks from `first` on: 1 if a node delivered it."""
    mask = bytearray(chunks)
    for outcome in outcomes:
        at = 0
        for run in outcome.ranges:
            mask[run.first - first : run.stop - first] = outcome.delivered[at : at + run.count]
            at += run.count
    return bytes(mask)


def usable_chunks(mask: bytes) -> int:
    """Chunks from the first on without a gap."""
    gap = mask.find(0)
    return len(mask) if gap < 0 else gap
