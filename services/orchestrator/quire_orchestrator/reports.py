"""Reports of storage nodes to the index, and their questions about themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from opentelemetry.trace import SpanKind

from quire.model.index import OBJECT_TIER, Held, Listing, ObjectMark
from quire.model.records import ChunkRecord, ChunkRecords
from quire.telemetry import logger, names, tracer
from quire_orchestrator.announcements import Announcements
from quire_orchestrator.awaited import AwaitedChunks
from quire_orchestrator.cluster import Cluster
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.ports import Clock, Index

_REDIS = {"db.system.name": "redis"}
_LOOK_S: Final = 0.05
"""How often a registration that waits looks for what came by another orchestrator."""
_WAIT_MS_MAX: Final = 1000


class Reports:
    """Every method is one request."""

    def __init__(
        self,
        *,
        config: OrchestratorConfig,
        index: Index,
        cluster: Cluster,
        announcements: Announcements,
        clock: Clock,
    ) -> None:
        self._announcements = announcements
        self._config = config
        self._index = index
        self._cluster = cluster
        self._clock = clock
        self._awaited = AwaitedChunks()

    async def commit(self, node_id: str, chunks: ChunkRecords, fresh: int, wait_ms: int = 0) -> list[int]:
        """Index replicas; the generations of their entries, 0 where the parent is not indexed.

        Args:
            node_id: The node that holds them.
            chunks: Parents before children.
            fresh: The generation that the node proposes for entries that are new; 0 for none.
            wait_ms: For how long parents are waited for where none of the chunks can be indexed; less if many wait.
        """
        heads = _heads(chunks) if wait_ms and self._awaited.has_room else chunks[:0]
        if not heads:
            return await self._commit(node_id, chunks, fresh)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + min(wait_ms, _WAIT_MS_MAX) / 1000
        with self._awaited.awaited(set(heads.parent_list())) as arrived:
            generations = await self._commit(node_id, chunks, fresh)
            while not any(generations) and (left_s := end_s - loop.time()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _LOOK_S)):
                        await arrived.wait()
                if arrived.is_set():
                    arrived.clear()
                    generations = await self._commit(node_id, chunks, fresh)
                else:
                    generations = await self._look(node_id, heads, chunks, fresh)
        return generations

    async def _look(self, node_id: str, heads: ChunkRecords, chunks: ChunkRecords, fresh: int) -> list[int]:
        """Index the chunks whose parents came by another orchestrator, and the chunks behind them.

        No chunk is committed twice: if its entry ended in between, it would come back under the same generation.
        """
        by_key = dict(zip(heads.key_list(), await self._commit(node_id, heads, fresh), strict=True))
        if not any(by_key.values()):
            return [0] * len(chunks)
        rest = chunks.pick(np.array([key not in by_key for key in chunks.key_list()], dtype=bool))
        if rest:
            by_key |= dict(zip(rest.key_list(), await self._commit(node_id, rest, fresh), strict=True))
        return [by_key[key] for key in chunks.key_list()]

    async def _commit(self, node_id: str, chunks: ChunkRecords, fresh: int) -> list[int]:
        with tracer().start_as_current_span(names.INDEX_REGISTER, kind=SpanKind.CLIENT, attributes=_REDIS):
            generations = await self._index.register(node_id, chunks, self._clock.now_ms(), fresh=fresh)
        indexed = chunks if all(generations) else chunks.pick(np.array(generations, dtype=np.uint64) != 0)
        self._awaited.registered(indexed)
        self._announcements.stored(node_id, indexed)
        return generations

    async def join(
        self, node_id: str, chunks: Sequence[ChunkRecord], generations: Sequence[int], *, only_in_object: bool
    ) -> list[bool]:
        """List a node in these very entries; False for one that has ended. See `PrefixIndex.join`."""
        with tracer().start_as_current_span(names.INDEX_REGISTER, kind=SpanKind.CLIENT, attributes=_REDIS):
            marks = await self._index.join(node_id, chunks, generations, only_in_object=only_in_object)
        self._announcements.stored(
            node_id, [chunk for chunk, is_listed in zip(chunks, marks, strict=True) if is_listed]
        )
        return marks

    async def commit_objects(self, chunks: Sequence[ChunkRecord], generations: Sequence[int]) -> list[ObjectMark]:
        """List the object tier in these very entries."""
        marks = await self._index.add_objects(chunks, generations)
        listed = [chunk for chunk, mark in zip(chunks, marks, strict=True) if mark is ObjectMark.LISTED]
        self._announcements.stored(OBJECT_TIER, listed)
        return marks

    async def expect_objects(self, chunks: Sequence[ChunkRecord]) -> tuple[list[bool], int]:
        """Announce objects that are about to be written.

        Returns:
            For each, False while objects of its key are being deleted; and the grace period in ms, after which an
            object is deleted if its key has no entry.
        """
        grace_ms = self._config.object_grace_ms
        return await self._index.expect_objects(chunks, self._clock.now_ms() + grace_ms), grace_ms

    async def withdraw(
        self,
        node_id: str,
        chunks: Sequence[ChunkRecord],
        *,
        only_in_object: bool = False,
        keepers: Sequence[str] = (),
        hidden: bool = False,
    ) -> list[bool]:
        """Withdraw chunks that a node lost, found corrupt, or cannot read: look-ups must stop promising them.

        Returns for each whether that was done. `only_in_object`: only where the object tier is listed too; `keepers`:
        only where each of these nodes lives, is not to be removed, and is listed too, or the object tier is. `hidden`:
        the node keeps the copies, and drops those of chunks that are evicted.
        """
        nodes = [self._cluster.live.get(name) for name in keepers if name != OBJECT_TIER]
        if not all(node is not None and node.stays for node in nodes):
            return [False] * len(chunks)
        out = await self._index.unregister(
            node_id, chunks, self._clock.now_ms(), only_in_object=only_in_object, keepers=keepers, hidden=hidden
        )
        self._announcements.removed(
            node_id, [chunk for chunk, was_removed in zip(chunks, out, strict=True) if was_removed]
        )
        return out

    async def count_change(self, node_id: str) -> None:
        """Count a report as done, just before its answer."""
        if node_id:
            await self._index.count_change(node_id)

    async def locate(self, chunks: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        """The live nodes that hold each chunk, and the object tier where it does."""
        live = self._cluster.storage_nodes()
        placements = await self._index.holders(chunks)
        return [tuple(name for name in names if name in live or name == OBJECT_TIER) for names in placements]

    async def generations(self, node_id: str, chunks: Sequence[ChunkRecord]) -> list[int]:
        """Generation of each entry that lists a node, alive or not; 0 where none does."""
        entries = await self._index.entries(chunks)
        return [generation if node_id in names else 0 for generation, names in entries]

    async def is_rebuilding(self) -> bool:
        """Whether the index is being rebuilt from the object tier."""
        return bool(await self._index.rebuild())

    async def listing(self, node_id: str) -> Listing:
        """Return the index's listing of a node, in two numbers."""
        return await self._index.listing(node_id)

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[Held], int]:
        """A page of what the index lists for a node, and the next cursor, 0 at the end."""
        return await self._index.holdings(node_id, cursor)

    async def withdraw_held(self, node_id: str, holdings: Sequence[Held]) -> None:
        """Withdraw entries of `holdings` that the node does not have."""
        await self._index.unregister_held(node_id, holdings, self._clock.now_ms())

    async def damaged(self, node_id: str) -> None:
        """A node found that the index has lost entries."""
        logger().error("the index has lost entries", node=node_id)
        await self._index.damaged()

    async def rebuilt(self, token: str) -> None:
        """Note that the contents of the object tier were reported to the index."""
        await self._index.rebuilt(token)


def _heads(chunks: ChunkRecords) -> ChunkRecords:
    """Return the chunks whose parents are not among them."""
    keys = set(chunks.key_list())
    outside = np.array([parent not in keys for parent in chunks.parent_list()], dtype=bool)
    return chunks.pick(chunks.parent_mask() & outside)
