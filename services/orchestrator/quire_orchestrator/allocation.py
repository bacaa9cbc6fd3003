"""Where a store goes: which chunks are stored already, as durable as is asked now, and which node takes the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from quire.model.durability import Durability, OnExisting
from quire.model.errors import InvalidRequest, QuireError
from quire.model.index import Match
from quire.model.keys import ChunkKeys
from quire.model.nodes import NodeAddress
from quire.model.ranges import ChunkRange, clip
from quire.telemetry import logger
from quire_orchestrator.cluster import Cluster
from quire_orchestrator.core.eviction import in_object
from quire_orchestrator.errors import NoDurableNode
from quire_orchestrator.ports import ChunkHolder, Index
from quire_server.core.placement import addresses_of, placed_ranges, readable_ranges


class Allocation:
    """Every public method is one request."""

    def __init__(self, *, index: Index, cluster: Cluster, holders: ChunkHolder) -> None:
        self._index = index
        self._cluster = cluster
        self._holders = holders

    async def allocate(
        self, keys: ChunkKeys, first: int, durability: Durability, on_existing: OnExisting
    ) -> tuple[list[ChunkRange], list[NodeAddress], int]:
        """Nodes for the chunks that are not stored, how they are reached, and how many from the start are stored."""
        keys.distinct()
        live = self._cluster.storage_nodes()  # the same ones to the end, though one may leave meanwhile
        nodes = list(live.values())
        if not nodes:
            raise NoDurableNode("no storage node is alive")
        if durability is Durability.REPLICATED and len(nodes) < 2:
            raise NoDurableNode("two storage nodes are needed, one is alive")
        if first > len(keys):
            raise InvalidRequest(f"{first}, but there are {len(keys)} keys", field="first_chunk")
        match = await self._index.match(keys)
        readable = readable_ranges(match, live, keys)
        if durability is not Durability.MEMORY:
            readable = await self._raised(match, readable, keys, durability)
        known = readable[-1].stop if readable else 0
        if known < first:
            raise InvalidRequest(
                f"chunk {known} is not stored, so chunks from {first} on would have no parent", field="first_chunk"
            )
        placed = placed_ranges(keys, max(known, first), nodes)
        if on_existing is OnExisting.VERIFY:
            placed = [*clip(readable, first, known), *placed]
        return placed, addresses_of(placed, live), known

    async def _raised(
        self, match: Match, readable: Sequence[ChunkRange], keys: ChunkKeys, durability: Durability
    ) -> list[ChunkRange]:
        """What is stored already, raised to the level that is asked for now; up to the first chunk that is not.

        What the object tier has is as durable as anything can be asked to be.
        """
        live = self._cluster.storage_nodes()
        safe = in_object(match)

        async def marks(each: ChunkRange) -> list[bool]:
            mine = safe[each.first : each.stop]
            if all(mine):
                return mine
            try:
                part = keys.run(each.first, each.count)
                raised = await self._holders.raise_level(live[each.node_id], part, durability)
                return [now or before for now, before in zip(raised, mine, strict=True)]
            except (QuireError, KeyError) as error:
                logger().warning("chunks could not be made durable", node=each.node_id, error=str(error))
                return mine

        raised: list[ChunkRange] = []
        for each, mine in zip(readable, await asyncio.gather(*map(marks, readable)), strict=True):
            count = mine.index(False) if False in mine else each.count
            if count:
                raised.append(replace(each, count=count))
            if count < each.count:
                break
        return raised
