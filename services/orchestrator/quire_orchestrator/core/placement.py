"""Where chunks go and where they are read from. Pure functions of keys, placements and live nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from quire.keys import SEGMENT_CHUNKS, ChunkKeys
from quire.metadata.index import Match
from quire.nodes import Node, Segment


def rendezvous(name: bytes, nodes: Iterable[Node]) -> list[Node]:
    """Nodes by their claim on `name`, the strongest first.

    Rendezvous hashing: a node that joins or leaves moves only its own share.
    """

    def claim(node: Node) -> bytes:
        return hashlib.blake2b(name + node.node_id.encode(), digest_size=8).digest()

    return sorted(nodes, key=claim, reverse=True)


def readable_segments(match: Match, live: Mapping[str, Node]) -> list[Segment]:
    """The longest part of `match` of which every chunk has a live replica, as runs by node.

    Of several replicas the one that holds the run before is preferred, so that runs stay long.
    """
    segments: list[Segment] = []
    first = 0
    for run in match.runs:
        holders = [name for name in run.nodes if name in live]
        if not holders:
            break
        before = segments[-1] if segments else None
        if before is not None and before.node_id in holders:
            segments[-1] = _segment(live[before.node_id], before.first_chunk, before.chunk_count + run.count)
        else:
            segments.append(_segment(live[holders[0]], first, run.count))
        first += run.count
    return segments


def placed_segments(keys: ChunkKeys, first: int, nodes: Sequence[Node]) -> list[Segment]:
    """Nodes for chunks from `first` on: each index segment together at the node with the strongest claim."""
    segments: list[Segment] = []
    at = first
    while at < len(keys):
        stop = min(len(keys), at - at % SEGMENT_CHUNKS + SEGMENT_CHUNKS)
        node = rendezvous(keys.segment_of(at), nodes)[0]
        if segments and segments[-1].node_id == node.node_id:
            segments[-1] = _segment(node, segments[-1].first_chunk, stop - segments[-1].first_chunk)
        else:
            segments.append(_segment(node, at, stop - at))
        at = stop
    return segments


def _segment(node: Node, first: int, count: int) -> Segment:
    return Segment(node.node_id, node.grpc_address, node.worker_address, first, count)
