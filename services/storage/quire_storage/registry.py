"""The node's entries in the cluster's index: registered, kept in step, withdrawn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from quire.errors import QuireError
from quire.metadata.index import ChunkRecord
from quire.telemetry import logger
from quire_storage.core.chunks import Chunk
from quire_storage.ports import Clock, ClusterIndex

_RETRY_S = 0.02
_PAUSE_S, _PAUSE_S_MAX = 0.2, 30.0
_BATCH_CHUNKS = 4096


class Registry:
    """Says to the index what the node `node_id` holds."""

    def __init__(self, node_id: str, index: ClusterIndex, clock: Clock, timeout_s: float) -> None:
        self._node_id = node_id
        self._index = index
        self._clock = clock
        self._timeout_s = timeout_s

    async def register(self, wanted: Sequence[ChunkRecord]) -> set[bytes]:
        """Register; the keys that are indexed. Raises what the index raises."""
        indexed: set[bytes] = set()
        async for part in self.registering(wanted):
            indexed |= part
        return indexed

    async def add_object_tier(self, stored: Sequence[ChunkRecord]) -> set[bytes]:
        """Register the object tier as a holder of chunks that are indexed; the keys of those."""
        marks = await self._index.add_object_tier(stored)
        return {record.key for record, mark in zip(stored, marks, strict=True) if mark}

    async def registering(self, wanted: Sequence[ChunkRecord]) -> AsyncIterator[set[bytes]]:
        """Keys as they are indexed. A chunk whose parent is on its way to another node is waited for, for a time."""
        waiting, deadline_s = list(wanted), self._clock.monotonic_s() + self._timeout_s
        while waiting:
            marks = await self._index.commit(self._node_id, waiting)
            indexed = {record.key for record, mark in zip(waiting, marks, strict=True) if mark}
            yield indexed
            waiting = [record for record in waiting if record.key not in indexed]
            if waiting and self._clock.monotonic_s() > deadline_s:
                return
            if waiting:
                await self._clock.sleep(_RETRY_S)

    async def register_all(self, held: AsyncIterator[list[Chunk]]) -> None:
        """Tell the index everything. Parents may be on nodes that are still coming up: try again, ever less often."""
        waiting: list[ChunkRecord] = []
        async for part in held:
            waiting += await self._refused([chunk.record for chunk in part])
        pause_s = _PAUSE_S
        while waiting:
            await self._clock.sleep(pause_s)
            before, refused = len(waiting), []
            for first in range(0, len(waiting), _BATCH_CHUNKS):
                refused += await self._refused(waiting[first : first + _BATCH_CHUNKS])
            waiting = refused
            pause_s = _PAUSE_S if len(waiting) < before else min(2 * pause_s, _PAUSE_S_MAX)

    async def _refused(self, records: list[ChunkRecord]) -> list[ChunkRecord]:
        """Register; what the index did not take."""
        try:
            marks = await self._index.commit(self._node_id, records) if records else []
        except QuireError as error:
            logger().warning("the index does not take this node's chunks yet", error=str(error))
            return records
        return [record for record, indexed in zip(records, marks, strict=True) if not indexed]

    async def withdraw(self, lost: Sequence[ChunkRecord], holder: str = "") -> None:
        """Deregister chunks, at this node or at another holder.

        What the index does not hear now it hears when somebody asks in vain.
        """
        if not lost:
            return
        try:
            await self._index.withdraw(holder or self._node_id, lost)
        except QuireError as error:
            logger().warning("lost chunks could not be withdrawn", chunks=len(lost), error=str(error))

    async def may_go(self, chunks: Sequence[ChunkRecord]) -> set[bytes]:
        """Take last copies, deepest first, out of the index; the keys that are out. None while it does not answer."""
        try:
            marks = await self._index.evict(self._node_id, chunks)
        except QuireError as error:
            logger().warning("nothing can be evicted while the index does not answer", error=str(error))
            return set()
        return {chunk.key for chunk, out in zip(chunks, marks, strict=True) if out}

    async def not_registered(self, chunks: Sequence[ChunkRecord]) -> list[bytes]:
        """Keys of those for which this node is not listed; none while the index does not answer."""
        try:
            holders = await self._index.locate(chunks)
        except QuireError as error:
            logger().warning("nobody says what is registered", error=str(error))
            return []
        return [chunk.key for chunk, names in zip(chunks, holders, strict=True) if self._node_id not in names]

    async def drops(self) -> list[bytes]:
        """What was evicted while this node was away."""
        try:
            return await self._index.take_drops(self._node_id)
        except QuireError as error:
            logger().warning("what was evicted meanwhile is not known", error=str(error))
            return []
