"""Removals from the index: by request, for a node that needs space, and of unreferenced entries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.model.errors import InvalidRequest, QuireError
from quire.model.index import OBJECT_TIER, Drop, Evicted, Listing
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.records import ChunkRecord, ChunkRecords, records
from quire.telemetry import logger
from quire_orchestrator.announcements import Announcements
from quire_orchestrator.cluster import Cluster
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.core.eviction import drops, has_objects
from quire_orchestrator.ports import ChunkHolder, Clock, Index
from quire_server import tasks

_SWEEP_MAX = 256


class Evictions:
    """Nodes drop copies of removed entries; objects are deleted after a time of grace."""

    def __init__(
        self,
        *,
        config: OrchestratorConfig,
        index: Index,
        cluster: Cluster,
        holders: ChunkHolder,
        announcements: Announcements,
        clock: Clock,
    ) -> None:
        self._announcements = announcements
        self._config = config
        self._index = index
        self._cluster = cluster
        self._holders = holders
        self._clock = clock
        self._sweeper: asyncio.Task[None] | None = None
        self._repair_cursor = 0

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._keep_swept())

    async def close(self) -> None:
        await tasks.end([self._sweeper])

    async def evict(self, namespace: bytes, keys: ChunkKeys, keep: int) -> int:
        """Drop chunks from the end of a chain of the namespace with this tag; how many.

        Stops at one that others extend or a lease pins.
        """
        chunks = list(reversed(_behind(keys, keep, namespace)))
        return len((await self._evict(chunks, "")).removed)

    async def demote(self, namespace: bytes, keys: ChunkKeys, keep: int) -> int:
        """Have nodes let go of chunks that the object tier has; returns the number that no node has now.

        All nodes are asked: of the copies that came from there the index lists only those of prefetches.
        """
        chunks = _behind(keys, keep, namespace)
        holders = await self._index.holders(chunks)
        in_objects = [chunk.key for chunk, names in zip(chunks, holders, strict=True) if OBJECT_TIER in names]
        nodes = self._cluster.storage_nodes().values() if in_objects else []
        answers = await asyncio.gather(*(self._give_up(node, in_objects) for node in nodes))
        return sum(all(answer[at] for answer in answers) for at in range(len(in_objects)))

    async def _give_up(self, node: Node, keys: Sequence[bytes]) -> list[bool]:
        """Have a node let go of chunks; for each whether it has no copy. One that does not answer may have all."""
        try:
            return await self._holders.give_up(node, ChunkKeys(b"".join(keys)))
        except QuireError as error:
            logger().warning("a node gives up no copies", node=node.node_id, chunks=len(keys), why=str(error))
            return [False] * len(keys)

    async def evict_chunk(self, key: ChunkKeys) -> bool:
        """Drop the one chunk of a chain of one; whether it is out of the index. Not while a lease pins it."""
        return (await self.evict_chunks("", records(key, 0, 1)))[0]

    async def evict_chunks(self, node_id: str, chunks: Sequence[ChunkRecord]) -> list[bool]:
        """A node needs room and holds the last copy: for each chunk, children first, whether it is out of the index."""
        evicted = await self._evict(chunks, node_id)
        out = {entry.record.key for entry in evicted.removed} | set(evicted.absent)
        return [chunk.key in out for chunk in chunks]

    async def _evict(self, chunks: Sequence[ChunkRecord], asking: str) -> Evicted:
        """Evict chunks from the index, and from every node but the one that asks.

        One that is away receives its drops when it is back.
        """
        now_ms = self._clock.now_ms()
        delete_ms = now_ms + self._config.object_grace_ms
        evicted = await self._index.evict(chunks, now_ms, delete_ms, asking=asking)
        for holder in {node for entry in evicted.removed for node in entry.nodes}:
            self._announcements.removed(holder, [entry.record for entry in evicted.removed if holder in entry.nodes])
        orders = drops(evicted, asking)
        await asyncio.gather(*(self._drop(node_id, order) for node_id, order in orders.items()))
        return evicted

    async def drops(self, node_id: str, cursor: int) -> tuple[list[Drop], int]:
        """Return a page of a node's unconfirmed drops, and the next cursor, 0 at the end."""
        return await self._index.drops(node_id, cursor)

    async def settle_drops(self, node_id: str, carried_out: Sequence[Drop]) -> None:
        """A node has dropped these, or has found that they do not concern its copies."""
        await self._index.settle_drops(node_id, carried_out)

    async def _drop(self, node_id: str, orders: Sequence[Drop]) -> None:
        """Send a node its drops. The index remembers them until it has answered."""
        try:
            await self._holders.drop(self._cluster.live[node_id], {drop.key: drop.generation for drop in orders})
            await self._index.settle_drops(node_id, orders)
        except (QuireError, KeyError) as error:
            logger().warning(
                "a node could not be reached for its drops", node=node_id, chunks=len(orders), why=str(error)
            )

    # ---- what nothing refers to any more

    async def sweep_objects(self) -> int:
        """Have objects deleted whose time of grace is over and that no entry lists; how many."""
        nodes = [node for node in self._cluster.storage_nodes().values() if has_objects(node)]
        if not nodes or await self._index.rebuild():
            return 0
        last_rebuild, now_ms = await self._index.last_rebuild(), self._clock.now_ms()
        until_ms = now_ms + self._config.object_deletion_ms
        claimed = await self._index.claim_objects(now_ms, until_ms, _SWEEP_MAX)
        if not claimed:
            return 0
        await self._cluster.refresh()  # detects an index that went back
        current = await self._is_current()
        rebuilt = await self._index.rebuild() or await self._index.last_rebuild() != last_rebuild
        if rebuilt or not current:
            await self._index.unclaim_objects(claimed, until_ms, now_ms + self._config.object_grace_ms)
            if rebuilt:  # claimed objects could not be listed by that rebuild
                await self._index.damaged(anew=True)
            return 0
        keys = ChunkKeys(b"".join(record.key for record in claimed))
        await self._holders.delete_objects(nodes[now_ms % len(nodes)], keys, until_ms)
        await self._index.objects_deleted(claimed, until_ms)
        return len(claimed)

    async def _is_current(self) -> bool:
        """Whether every live storage node confirms that it reports to this index, which counts its reports.

        An index that went back may miss chunks that were stored again. False also if a node does not answer.
        """
        epoch, listings = await self._index.epoch(), await self._index.listings()
        confirmations = (
            self._holders.is_current(node, epoch, listings.get(name, Listing()).changes)
            for name, node in self._cluster.storage_nodes().items()
        )
        try:
            return all(await asyncio.gather(*confirmations))
        except QuireError as error:
            logger().warning("objects are not deleted while a storage node does not answer", error=str(error))
            return False

    async def forget_lost_nodes(self) -> int:
        """Withdraw the listings of nodes that were silent for long; return how many chunks.

        One that returns registers its chunks again.
        """
        removed = 0
        lost_s = self._config.node_lost_ms / 1000
        for name, listing in (await self._index.listings()).items():
            if name == OBJECT_TIER or not listing.count or self._cluster.away_s(name) < lost_s:
                continue
            cursor, unfinished = 0, True
            while unfinished and name not in self._cluster.live and self._cluster.away_s(name) >= lost_s:
                page, cursor = await self._index.holdings(name, cursor)
                unfinished = cursor != 0
                await self._index.unregister_held(name, page, self._clock.now_ms())
                removed += len(page)
            self._announcements.cleared(name)
            logger().warning("a node is lost: its listings are withdrawn", node=name, chunks=removed)
        return removed

    async def repair_index(self) -> None:
        """Look at a part of the index for links that no child has, which keep parents for ever."""
        removed, self._repair_cursor = await self._index.repair(self._repair_cursor)
        if removed:
            logger().warning("removed links that no indexed chunk has", links=removed)

    async def _keep_swept(self) -> None:
        while True:
            await self._clock.sleep(self._config.sweep_ms / 1000)
            try:
                await self.sweep_objects()
                await self.forget_lost_nodes()
                await self.repair_index()
            except QuireError as error:
                logger().warning("nothing can be swept now", error=str(error))


def _behind(keys: ChunkKeys, keep: int, namespace: bytes) -> ChunkRecords:
    """Return the records of a chain behind its first `keep` chunks. Raises `InvalidRequest`, `KeysInvalid`."""
    keys.distinct()
    if not 0 <= keep <= len(keys):
        raise InvalidRequest(f"{keep} of {len(keys)}", field="keep_chunks")
    return records(keys, keep, len(keys) - keep, namespace=namespace)
