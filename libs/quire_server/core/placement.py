"""Where chunks go and where they are read from. Pure functions of keys, placements and live nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from quire.model.index import OBJECT_TIER, Match
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys
from quire.model.nodes import Location, Node, NodeAddress, SchedulerInfo, StorageInfo
from quire.model.ranges import ChunkRange

_NOWHERE = Location()


def rendezvous(name: bytes, nodes: Iterable[Node]) -> list[Node]:
    """Nodes by their claim on `name`, the strongest first.

    Rendezvous hashing: a node that joins or leaves moves only its own share.
    """

    def claim(node: Node) -> bytes:
        return hashlib.blake2b(name + node.node_id.encode(), digest_size=8).digest()

    return sorted(nodes, key=claim, reverse=True)


def readable_ranges(
    match: Match, live: Mapping[str, Node], keys: ChunkKeys, client: Location = _NOWHERE
) -> list[ChunkRange]:
    """The longest part of `match` of which every chunk can be read, and where.

    Of several replicas the nearest to the client is taken, and among those equally near the one that has what is
    before, so that ranges stay long. What only the object tier has goes to the node with the strongest claim on it.
    """
    ranges: list[ChunkRange] = []
    first = 0
    for run in match.runs:
        holders = [live[name] for name in run.nodes if name in live]
        if holders:
            best = _nearest(holders, client, ranges[-1].node_id if ranges else "")
            _extend(ranges, ChunkRange(best, first, run.count))
        elif OBJECT_TIER in run.nodes and live:
            for each in placed_ranges(keys.run(0, first + run.count), first, list(live.values())):
                _extend(ranges, each)
        else:
            break
        first += run.count
    return ranges


def readable_each(
    holders: Sequence[Sequence[str]], live: Mapping[str, Node], keys: ChunkKeys, client: Location = _NOWHERE
) -> tuple[list[int], list[ChunkRange]]:
    """Which of chunks that are no prefix can be read, by what the index says of each; and where, counting those.

    What only the object tier has goes to the node with the strongest claim on it, whatever it is asked for with.
    """
    there: list[int] = []
    ranges: list[ChunkRange] = []
    nearest: dict[tuple[tuple[str, ...], str], str] = {}
    for at, names in enumerate(holders):
        before = ranges[-1].node_id if ranges else ""
        case = (tuple(names), before)
        if case not in nearest:
            nearest[case] = _nearest([live[name] for name in names if name in live], client, before)
        node_id = nearest[case]
        if not node_id and OBJECT_TIER in names and live:
            node_id = rendezvous(keys.at(at), live.values())[0].node_id
        if node_id:
            _extend(ranges, ChunkRange(node_id, len(there), 1))
            there.append(at)
    return there, ranges


def _nearest(holders: Sequence[Node], client: Location, before: str) -> str:
    """Of several the nearest to the client, and among those equally near `before`; "" of none."""
    if not holders:
        return ""
    return min(holders, key=lambda node: (client.distance(node.location), node.node_id != before)).node_id


def placed_ranges(keys: ChunkKeys, first: int, nodes: Sequence[Node]) -> list[ChunkRange]:
    """Nodes for chunks from `first` on: each index bucket together at the node with the strongest claim."""
    ranges: list[ChunkRange] = []
    at = first
    while at < len(keys):
        stop = min(len(keys), at - at % BUCKET_CHUNKS + BUCKET_CHUNKS)
        _extend(ranges, ChunkRange(rendezvous(keys.bucket_of(at), nodes)[0].node_id, at, stop - at))
        at = stop
    return ranges


def addresses_of(ranges: Iterable[ChunkRange], live: Mapping[str, Node]) -> list[NodeAddress]:
    """How the nodes that `ranges` name are reached, in order of appearance."""
    nodes = [live[name] for name in dict.fromkeys(each.node_id for each in ranges)]
    return [NodeAddress(node.node_id, node.grpc_address, node.worker_address) for node in nodes]


def newcomer_rate(members: Iterable[Node], storage_node: str) -> int:
    """What the scheduler that leads would grant one more delivery on that node's link, bytes per second; 0: unknown."""
    about = {node.node_id: node.about for node in members}
    storage = about.get(storage_node)
    if not isinstance(storage, StorageInfo):
        return 0
    rates = [each.link_rates.get(storage.link, 0) for each in about.values() if isinstance(each, SchedulerInfo)]
    return max(rates, default=0)


def _extend(ranges: list[ChunkRange], more: ChunkRange) -> None:
    """Append, as one with the last range if that is of the same node."""
    if ranges and ranges[-1].node_id == more.node_id:
        last = ranges.pop()
        more = ChunkRange(last.node_id, last.first, last.count + more.count)
    ranges.append(more)
