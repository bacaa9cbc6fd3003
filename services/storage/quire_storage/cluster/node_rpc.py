"""Requests for this node's chunks, other than deliveries.

A request that has begun is carried out, even if its caller disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

from quire.model.durability import Durability
from quire.model.errors import InvalidRequest, NodeUnavailable, QuireError, TooManyRequests
from quire.model.index import OBJECT_TIER
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node, StorageState
from quire.model.outcome import NodeOutcome
from quire.model.transfers import IngestOrder
from quire_server.core.shares import SharedBound
from quire_storage.cluster.draining import Activity
from quire_storage.cluster.hot_copies import HotCopies
from quire_storage.cluster.registry import Registry
from quire_storage.cluster.replication import LACKED, Replicator
from quire_storage.config import StorageConfig
from quire_storage.core.pool.format import pack_header
from quire_storage.delivery.transfers import RETRY_S, Transfers
from quire_storage.ingest.stores import Stores
from quire_storage.ports import Spawn
from quire_storage.tiers.tiers import Tiers


class NodeRequests:
    """Every method is one request."""

    def __init__(
        self,
        *,
        config: StorageConfig,
        tiers: Tiers,
        stores: Stores,
        replicator: Replicator,
        hot_copies: HotCopies,
        spawn: Spawn,
        transfers: Transfers,
        registry: Registry,
        state: Callable[[], StorageState],
        is_quarantined: Callable[[bytes], bool],
    ) -> None:
        """`state`: returns what operators ask of this node. `is_quarantined`: whether a chunk cannot be read here."""
        self._is_quarantined = is_quarantined
        self._state = state
        self._registry = registry
        self._transfers = transfers
        self._config = config
        self._tiers = tiers
        self._stores = stores
        self._replicator = replicator
        self._hot_copies = hot_copies
        self._spawn = spawn
        self._ingests = SharedBound(config.ingests_max)
        self._running = self._started = 0

    @property
    def activity(self) -> Activity:
        """Requests that bring chunks here, or raise their level."""
        return Activity(self._running, self._started)

    def _count(self, task: asyncio.Task[Any]) -> None:
        self._running, self._started = self._running + 1, self._started + 1
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._running -= 1

    @property
    def ingests(self) -> int:
        """Stores that are running."""
        return self._ingests.taken

    async def ingest(self, call: IngestOrder) -> NodeOutcome:
        """Store chunks. Acknowledged means readable, and durable as asked."""
        if self._is_out():
            raise NodeUnavailable(f"{self._config.node_id} is decommissioned; store again, at another node")
        self._stores.check_level(call.durability)
        if not self._ingests.take(call.tenant):
            raise TooManyRequests(f"{self.ingests} stores are running; retry later", retry_after_s=RETRY_S)
        name = (call.store_id, call.node_index)
        try:
            self._transfers.begin(name, "store")
        except QuireError:
            self._ingests.give_back(call.tenant)
            raise
        self._transfers.stop_by(name, lambda: self._stores.abandon(call.store_id))
        task = self._spawn(self._stores.ingest(call), traced=True)
        self._count(task)
        task.add_done_callback(lambda ended: self._ingested(ended, call.tenant))
        task.add_done_callback(lambda _: self._transfers.end(name))
        try:
            # A task of its own: a caller that disconnects must not leave slots half-written and half-committed.
            return cast(NodeOutcome, await asyncio.shield(task))
        except asyncio.CancelledError:
            if not task.done():
                self._stores.abandon(call.store_id)
            raise

    def _keeps_copies(self) -> bool:
        """Whether others may count on copies that are here: this node is not to be removed."""
        return self._state() is StorageState.ACTIVE

    def _is_out(self) -> bool:
        """Whether this node is decommissioned: a chunk that it took now would not be copied."""
        return self._state() is StorageState.DECOMMISSIONED

    def _ingested(self, task: asyncio.Task[Any], tenant: str) -> None:
        self._ingests.give_back(tenant)
        if not task.cancelled():
            task.exception()  # seen: the caller may be gone

    def is_current(self, epoch: str, changes: int) -> bool:
        """Whether this node reports to the index of this name, whose `changes` include all of its reports."""
        return epoch == self._registry.epoch and changes >= self._registry.changes

    async def stop(self, transfer_id: bytes, node_index: int, refuse_s: float) -> None:
        """End a delivery or store. For `refuse_s` seconds, one of the same name that arrives later is refused."""
        await self._transfers.stop((transfer_id, node_index), refuse_s)

    async def drop(self, generations: Mapping[bytes, int]) -> int:
        """Forget copies that were listed under index entries of these generations, which have ended; how many went."""
        return await self._tiers.drop(generations)

    async def delete_objects(self, keys: ChunkKeys, until_ms: int) -> None:
        """Remove objects that no index entry lists. Raises `DeadlineExceeded` after `until_ms` (Unix epoch)."""
        if self._tiers.objects is None:
            raise InvalidRequest("this node has no object tier (QUIRE_STORAGE_OBJECT_URL)", field="chunk_keys")
        await self._tiers.objects.delete(list(keys), until_ms)

    async def raise_level(self, keys: ChunkKeys, durability: Durability) -> list[bool]:
        """Make chunks that are here durable at a level; for each whether it is now."""
        if self._is_out():
            raise NodeUnavailable(f"{self._config.node_id} is decommissioned: it makes nothing durable")
        self._stores.check_level(durability)
        task = self._spawn(self._stores.raise_level(list(keys), durability), traced=True)
        self._count(task)
        safe = await asyncio.shield(task)
        return [key in safe for key in keys]

    async def give_up(self, keys: ChunkKeys) -> list[bool]:
        """Let chunks go that the object tier has, unless a lease pins them; for each whether no copy is here now."""
        chunk_keys = list(keys)
        await self._tiers.evict(chunk_keys, keepers=[OBJECT_TIER], level=Durability.OBJECT)
        return [key not in self._tiers.residency for key in chunk_keys]

    async def replicate(
        self, source: Node, generations: Mapping[bytes, int], level: Durability, *, hot: bool = False
    ) -> list[int]:
        """Pull chunks from another node; for each the mark of `Replicator.pull`.

        `hot`: while they are read much, and in memory will do. Raises `NodeUnavailable` if this node is to be removed.
        """
        if not self._keeps_copies():
            raise NodeUnavailable(f"{self._config.node_id} is {self._state().value}: it takes no copies")
        if hot:
            task = self._spawn(self._hot_copies.pull(source, generations), traced=True)
            self._count(task)
            return cast(list[int], await asyncio.shield(task))
        self._stores.check_level(Durability.LOCAL if level is Durability.REPLICATED else level)
        readable = {key: name for key, name in generations.items() if not self._is_quarantined(key)}
        task = self._spawn(self._replicator.pull(source, readable, level), traced=True)
        self._count(task)
        marks = dict(zip(readable, cast(list[int], await asyncio.shield(task)), strict=True))
        return [marks.get(key, LACKED) for key in generations]

    def describe(self, keys: ChunkKeys) -> list[bytes]:
        """Headers of the chunks that are here."""
        return [pack_header(header) for key in keys if (header := self._tiers.find(key)) is not None]
