"""Placement of a store: the chunks that have the requested level already, and the nodes for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from quire.model.durability import Durability, OnExisting
from quire.model.errors import InvalidRequest, QuireError
from quire.model.index import Match, PlacedRun
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node, NodeAddress, staying
from quire.model.ranges import ChunkRange, clip, ranges_of
from quire.model.records import check_unchained
from quire.telemetry import logger
from quire_orchestrator.cluster import Cluster
from quire_orchestrator.core.eviction import in_object
from quire_orchestrator.core.placement import Placement, Tail
from quire_orchestrator.errors import NoDurableNode
from quire_orchestrator.ports import ChunkHolder, Clock, Index
from quire_server.core.placement import (
    Reader,
    addresses_of,
    range_chunks,
    readable_each,
    readable_ranges,
)


class Allocation:
    """Every public method is one request."""

    def __init__(
        self, *, index: Index, cluster: Cluster, holders: ChunkHolder, placement: Placement, clock: Clock
    ) -> None:
        self._index = index
        self._cluster = cluster
        self._holders = holders
        self._placement = placement
        self._clock = clock

    async def allocate(
        self,
        keys: ChunkKeys,
        first: int,
        durability: Durability,
        on_existing: OnExisting,
        *,
        chunk_bytes: int,
        unchained: bool = False,
    ) -> tuple[list[ChunkRange], list[NodeAddress], int]:
        """Nodes for the chunks that are not stored, how they are reached, and how many are stored, from the start on.

        `unchained`: the keys are no prefix; those that are stored may lie anywhere among them.
        """
        keys.distinct()
        live = self._cluster.storage_nodes()  # the same ones to the end, though one may leave meanwhile
        nodes = staying(live.values())
        if not nodes:
            raise NoDurableNode("no storage node is alive")
        if durability is Durability.REPLICATED and len(nodes) < 2:
            raise NoDurableNode("two storage nodes are needed, one is alive and stays")
        keys.count_from(first)
        reader = Reader(chunk_bytes)
        if unchained:
            return await self._allocate_each(keys, first, durability, on_existing, live, reader)
        match = await self._index.match(keys)
        readable = readable_ranges(match, live, keys, reader)
        if durability is not Durability.MEMORY:
            readable = await self._raised(match, readable, keys, durability)
        readable_count = readable[-1].stop if readable else 0
        if readable_count < first:
            raise InvalidRequest(
                f"chunk {readable_count} is not stored, so chunks from {first} on would have no parent",
                field="first_chunk",
            )
        tail = _tail(readable, chunk_bytes) if readable_count == match.count and not match.extended else None
        placed = self._placement.place(keys, readable_count, nodes, chunk_bytes, self._clock.monotonic_s(), tail)
        if on_existing is OnExisting.VERIFY:
            placed = [*clip(readable, first, readable_count), *placed]
        return placed, addresses_of(placed, live), readable_count

    async def _allocate_each(
        self,
        keys: ChunkKeys,
        first: int,
        durability: Durability,
        on_existing: OnExisting,
        live: Mapping[str, Node],
        reader: Reader,
    ) -> tuple[list[ChunkRange], list[NodeAddress], int]:
        """The new ones in ranges, as if they were a prefix."""
        if first or on_existing is OnExisting.VERIFY:
            raise InvalidRequest("unchained chunks are stored whole, and not compared", field="first_chunk")
        check_unchained(keys)
        holders = await self._index.root_holders(keys)
        present, readable = readable_each(holders, live, keys, reader)
        present_set = set(present)
        if durability is not Durability.MEMORY:
            present_keys = keys.pick(present)
            match = Match(tuple(PlacedRun(1, tuple(holders[at])) for at in present))
            marks = [await self._marks(run, in_object(match), present_keys, durability) for run in readable]
            present_set = {at for at, mark in zip(present, chain.from_iterable(marks), strict=True) if mark}
        new = [at for at in range(len(keys)) if at not in present_set]
        if not new:
            return [], [], len(present_set)
        nodes, now_s = staying(live.values()), self._clock.monotonic_s()
        together = self._placement.place(keys.pick(new), 0, nodes, reader.chunk_bytes, now_s)
        placed: list[ChunkRange] = []
        for piece in together:
            placed += ranges_of(piece.node_id, new[piece.first : piece.stop])
        return placed, addresses_of(placed, live), len(present_set)

    async def _raised(
        self, match: Match, readable: Sequence[ChunkRange], keys: ChunkKeys, durability: Durability
    ) -> list[ChunkRange]:
        """Raise the stored chunks to the requested level; return them up to the first that did not reach it.

        The object tier is the highest level.
        """
        safe = in_object(match)
        marks = await asyncio.gather(*(self._marks(run, safe, keys, durability) for run in readable))
        raised: list[ChunkRange] = []
        for run, run_marks in zip(readable, marks, strict=True):
            count = run_marks.index(False) if False in run_marks else run.count
            if count:
                raised.append(replace(run, count=count))
            if count < run.count:
                break
        return raised

    async def _marks(
        self, run: ChunkRange, safe: Sequence[bool], keys: ChunkKeys, durability: Durability
    ) -> list[bool]:
        """Return which chunks of a range have the requested level now; `safe`: those that the object tier has."""
        run_safe = list(safe[run.first : run.stop])
        if all(run_safe):
            return run_safe
        try:
            node = self._cluster.storage_nodes()[run.node_id]
            raised = await self._holders.raise_level(node, keys.run(run.first, run.count), durability)
            return [is_raised or was_safe for is_raised, was_safe in zip(raised, run_safe, strict=True)]
        except (QuireError, KeyError) as error:
            logger().warning("chunks could not be made durable", node=run.node_id, error=str(error))
            return run_safe


def _tail(readable: Sequence[ChunkRange], chunk_bytes: int) -> Tail | None:
    """The range that a chain ends in, if it has room."""
    room = -readable[-1].count % range_chunks(chunk_bytes) if readable else 0
    return Tail(readable[-1].node_id, room) if room else None
