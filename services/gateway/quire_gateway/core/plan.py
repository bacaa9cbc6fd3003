"""How one request is divided among storage nodes, and how their outcomes add up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.model.errors import DescriptorInvalid
from quire.model.nodes import Segment
from quire.model.outcome import ChunkRun, NodeOutcome


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Everything that one node does for a request. `index` numbers the nodes in order of appearance."""

    index: int
    node_id: str
    grpc_address: str
    runs: tuple[ChunkRun, ...]


def shares(segments: Sequence[Segment], chunks: int) -> list[NodeShare]:
    """Segments gathered by node. Raises `DescriptorInvalid` unless they cover chunks 0 … chunks-1 exactly."""
    at = 0
    for segment in segments:
        if segment.first_chunk != at or segment.chunk_count < 1:
            raise DescriptorInvalid(f"a run starts at {segment.first_chunk}, {at} was expected", field="segments")
        at += segment.chunk_count
    if at != chunks:
        raise DescriptorInvalid(f"they cover {at} chunks of {chunks}", field="segments")
    return node_shares(segments)


def node_shares(segments: Sequence[Segment]) -> list[NodeShare]:
    """Segments gathered by node, in order of appearance."""
    by_node: dict[str, list[Segment]] = {}
    for segment in segments:
        by_node.setdefault(segment.node_id, []).append(segment)
    return [
        NodeShare(
            index, node_id, parts[0].grpc_address, tuple(ChunkRun(part.first_chunk, part.chunk_count) for part in parts)
        )
        for index, (node_id, parts) in enumerate(by_node.items())
    ]


def delivered_mask(outcomes: Iterable[NodeOutcome], chunks: int) -> bytes:
    """One byte per chunk of the request: 1 if a node delivered it."""
    mask = bytearray(chunks)
    for outcome in outcomes:
        at = 0
        for run in outcome.runs:
            mask[run.first : run.first + run.count] = outcome.delivered[at : at + run.count]
            at += run.count
    return bytes(mask)


def usable_chunks(mask: bytes) -> int:
    """Chunks from the first on without a gap."""
    gap = mask.find(0)
    return len(mask) if gap < 0 else gap
