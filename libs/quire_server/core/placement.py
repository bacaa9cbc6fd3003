"""Chunk ranges, and where chunks are read from. Pure functions of keys, placements and live nodes."""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Final

from quire.model.index import OBJECT_TIER, Match
from quire.model.keys import ChunkKeys, KeySample
from quire.model.nodes import Location, Node, NodeAddress, SchedulerInfo, StorageInfo, staying
from quire.model.object_part import ObjectPart
from quire.model.ranges import ChunkRange, clip
from quire_server.core.claims import claims_by_capacity

_NOWHERE: Final = Location()
_RANGE_BYTES: Final = 32 << 20
_RANGE_CHUNKS_MAX: Final = 64
_GOLDEN: Final = 0.6180339887498949
"""Its multiples modulo 1 fill the unit interval evenly."""


def rendezvous(name: bytes, nodes: Iterable[Node]) -> list[Node]:
    """Nodes by their claim on `name`, the strongest first.

    Rendezvous hashing: a node that joins or leaves moves only its own share.
    """

    def claim(node: Node) -> bytes:
        return hashlib.blake2b(name + node.node_id.encode(), digest_size=8).digest()

    return sorted(nodes, key=claim, reverse=True)


def range_chunks(chunk_bytes: int) -> int:
    """Return how many consecutive chunks are kept together.

    They are enough bytes for large reads, and few enough chunks that a prefix of a few thousand tokens uses the links
    of several nodes.
    """
    return max(1, min(_RANGE_CHUNKS_MAX, _RANGE_BYTES // chunk_bytes))


def cut(first: int, stop: int, chunk_bytes: int, room: int = 0) -> list[tuple[int, int]]:
    """(first, stop) of the ranges of chunks first … stop-1; the first of them takes `room` chunks, if that is not 0."""
    step, bounds, at = range_chunks(chunk_bytes), list[tuple[int, int]](), first
    while at < stop:
        stop_at = min(stop, at + (room if room and at == first else step))
        bounds.append((at, stop_at))
        at = stop_at
    return bounds


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader.

    `client`: its location; `chunk_bytes`: of its chunks; `link_rates`: the rate of one more delivery on each link, if
    known, in bytes per second. `turn`: the number of the look-up.
    """

    chunk_bytes: int
    client: Location = _NOWHERE
    link_rates: Mapping[str, int] = field(default_factory=dict)
    turn: int = 0


def readable_ranges(
    match: Match, live: Mapping[str, Node], keys: ChunkKeys | KeySample, reader: Reader
) -> list[ChunkRange]:
    """The longest part of `match` of which every chunk can be read, and where.

    Of several replicas the nearest to the client is taken. Those equally near take turns, range by range, by what
    their links have left. What only the object tier has goes to the nodes with the strongest claim on it. A sample of
    the keys is enough unless a part `is_in_objects_alone`.
    """
    ranges: list[ChunkRange] = []
    choice = _Choice(live, reader)
    first = 0
    for run in match.runs:
        if choice.holders(run.nodes):
            extend(ranges, ChunkRange(choice.of(run.nodes, ranges), first, run.count))
        elif OBJECT_TIER in run.nodes and live:
            bounds = cut(first, first + run.count, reader.chunk_bytes)
            names = claims_by_capacity(staying(live.values())).strongest([keys.at(at) for at, _ in bounds])
            for (at, stop), name in zip(bounds, names, strict=True):
                extend(ranges, ChunkRange(name, at, stop - at))
        else:
            break
        first += run.count
    return ranges


def is_in_objects_alone(match: Match, live: Mapping[str, Node]) -> bool:
    """Return whether a part of a match can be read from the object tier only: its keys say which nodes do."""
    return any(OBJECT_TIER in run.nodes and not any(name in live for name in run.nodes) for run in match.runs)


def object_part(match: Match, live: Mapping[str, Node], ranges: Sequence[ChunkRange]) -> ObjectPart:
    """Return the part of `ranges`, which are those of `match`, that only the object tier has."""
    first, runs = 0, list[ChunkRange]()
    for run in match.runs:
        if not any(name in live for name in run.nodes):
            runs += clip(ranges, first, first + run.count)
        first += run.count
    speeds = {}
    for name in dict.fromkeys(run.node_id for run in runs):
        about = live[name].about
        if isinstance(about, StorageInfo) and about.object_speed is not None:
            speeds[name] = about.object_speed
    return ObjectPart(tuple(runs), speeds)


def readable_each(
    holders: Sequence[Sequence[str]], live: Mapping[str, Node], keys: ChunkKeys, reader: Reader
) -> tuple[list[int], list[ChunkRange]]:
    """Return which unchained chunks can be read, by their index entries; and where, counting those.

    A chunk of the object tier alone is read by the node with the strongest claim on it, whatever else is requested.
    """
    present: list[int] = []
    ranges: list[ChunkRange] = []
    choice = _Choice(live, reader)
    first = 0
    for names, group in groupby(map(tuple, holders)):
        run = range(first, first := first + sum(1 for _ in group))
        nodes = choice.holders(names)
        if len(nodes) == 1:
            extend(ranges, ChunkRange(nodes[0].node_id, len(present), len(run)))
        elif nodes:
            for at in range(len(present), len(present) + len(run)):
                extend(ranges, ChunkRange(choice.of(names, ranges), at, 1))
        elif OBJECT_TIER in names and live:
            claimed = claims_by_capacity(staying(live.values())).strongest([keys.at(at) for at in run])
            for at, node_id in enumerate(claimed, start=len(present)):
                extend(ranges, ChunkRange(node_id, at, 1))
        else:
            continue
        present += run
    return present, ranges


class _Choice:
    """Choice of the serving replica, for one request."""

    def __init__(self, live: Mapping[str, Node], reader: Reader) -> None:
        self._live = live
        self._reader = reader
        self._step = range_chunks(reader.chunk_bytes)
        self._nearest: dict[tuple[str, ...], list[Node]] = {}
        self._turn = reader.turn

    def holders(self, names: tuple[str, ...]) -> list[Node]:
        """Return the live holders nearest to the client, all equally near; of those that stay, if any does."""
        if names not in self._nearest:
            nodes = staying(self._live[name] for name in names if name in self._live)
            distances = [self._reader.client.distance(node.location) for node in nodes]
            nearest = min(distances, default=0)
            self._nearest[names] = [
                node for node, distance in zip(nodes, distances, strict=True) if distance == nearest
            ]
        return self._nearest[names]

    def of(self, names: tuple[str, ...], ranges: Sequence[ChunkRange]) -> str:
        """Choose one of them: the holder of the chunks before, while these are less than a range."""
        nodes = self.holders(names)
        if len(nodes) == 1:
            return nodes[0].node_id
        last = ranges[-1] if ranges else None
        if last is not None and last.count < self._step and any(node.node_id == last.node_id for node in nodes):
            return last.node_id
        self._turn += 1
        rates = list(accumulate(self._rate(node) for node in nodes))
        return nodes[bisect(rates, self._turn * _GOLDEN % 1 * rates[-1], hi=len(nodes) - 1)].node_id

    def _rate(self, node: Node) -> int:
        return self._reader.link_rates.get(node.about.link, 1) if isinstance(node.about, StorageInfo) else 1


def addresses_of(ranges: Iterable[ChunkRange], live: Mapping[str, Node]) -> list[NodeAddress]:
    """How the nodes that `ranges` name are reached, in order of appearance."""
    nodes = [live[name] for name in dict.fromkeys(run.node_id for run in ranges)]
    return [NodeAddress(node.node_id, node.grpc_address, node.worker_address, node.protocol_version) for node in nodes]


def link_rates_of(members: Iterable[Node]) -> dict[str, int]:
    """Return the rate that the leading scheduler would grant one more delivery on each link, bytes per second."""
    rates: dict[str, int] = {}
    for node in members:
        if isinstance(node.about, SchedulerInfo):
            for link, rate in node.about.link_rates.items():
                rates[link] = max(rate, rates.get(link, 0))
    return rates


def extend(ranges: list[ChunkRange], run: ChunkRange) -> None:
    """Append, as one with the last range if that is of the same node."""
    if ranges and ranges[-1].node_id == run.node_id:
        last = ranges.pop()
        run = ChunkRange(last.node_id, last.first, last.count + run.count)
    ranges.append(run)
