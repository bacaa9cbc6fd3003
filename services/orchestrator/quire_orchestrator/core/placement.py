"""Where chunks go and where they are read from. Pure functions of keys, placements and live nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from quire.model.index import OBJECT_TIER, Match
from quire.model.keys import SEGMENT_CHUNKS, ChunkKeys
from quire.model.nodes import Location, Node, Role, Segment

_NOWHERE = Location()


def rendezvous(name: bytes, nodes: Iterable[Node]) -> list[Node]:
    """Nodes by their claim on `name`, the strongest first.

    Rendezvous hashing: a node that joins or leaves moves only its own share.
    """

    def claim(node: Node) -> bytes:
        return hashlib.blake2b(name + node.node_id.encode(), digest_size=8).digest()

    return sorted(nodes, key=claim, reverse=True)


def readable_segments(
    match: Match, live: Mapping[str, Node], keys: ChunkKeys, client: Location = _NOWHERE
) -> list[Segment]:
    """The longest part of `match` of which every chunk can be read, as runs by node.

    Of several replicas the nearest to the client is taken, and among those equally near the one that holds the run
    before, so that runs stay long. What only the object tier has goes to the node with the strongest claim on it.
    """
    segments: list[Segment] = []
    first = 0
    for run in match.runs:
        holders = [live[name] for name in run.nodes if name in live]
        if holders:
            before = segments[-1].node_id if segments else ""
            best = min(holders, key=lambda node: (client.distance(node.location), node.node_id != before))
            _extend(segments, best, first, run.count)
        elif OBJECT_TIER in run.nodes and live:
            for segment in placed_segments(keys.run(0, first + run.count), first, list(live.values())):
                _extend(segments, live[segment.node_id], segment.first_chunk, segment.chunk_count)
        else:
            break
        first += run.count
    return segments


def _extend(segments: list[Segment], node: Node, first: int, count: int) -> None:
    if segments and segments[-1].node_id == node.node_id:
        first, count = segments[-1].first_chunk, segments.pop().chunk_count + count
    segments.append(_segment(node, first, count))


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


def first_chunks(segments: Sequence[Segment], count: int) -> list[Segment]:
    """What of `segments` is among the first `count` chunks."""
    kept = [segment for segment in segments if segment.first_chunk < count]
    return [replace(each, chunk_count=min(each.chunk_count, count - each.first_chunk)) for each in kept]


def newcomer_rate(members: Iterable[Node], storage_node: str) -> int:
    """What the scheduler that leads would grant one more delivery on that node's link, bytes per second; 0: unknown."""
    by_name = {node.node_id: node for node in members}
    link = by_name[storage_node].details.get("link", "") if storage_node in by_name else ""
    rates = [node.figures.get(f"link.{link}.newcomer", 0) for node in by_name.values() if node.role is Role.SCHEDULER]
    return int(max(rates, default=0))


def _segment(node: Node, first: int, count: int) -> Segment:
    return Segment(node.node_id, node.grpc_address, node.worker_address, first, count)
