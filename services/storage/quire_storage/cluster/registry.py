"""The node's entries in the cluster's index: registered, kept in step, withdrawn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import numpy as np

from quire.model.errors import QuireError
from quire.model.index import OBJECT_TIER, Drop, Held, ObjectMark
from quire.model.records import ChunkRecord, ChunkRecords
from quire.telemetry import logger
from quire_storage.cluster.joined_calls import JoinedCalls
from quire_storage.ports import Clock, ClusterIndex, Listing

_RETRY_S: Final = 0.002
_RETRY_S_MAX: Final = 0.05
_WAIT_MS: Final = 200
"""For how long a registration may wait at the orchestrator: a comparison waits for what is under way."""
_BATCH_CHUNKS: Final = 4096


class Registry:
    """Reports the chunks of the node `node_id` to the index.

    Counts the changes under way, so that both can be compared.
    """

    def __init__(self, node_id: str, index: ClusterIndex, clock: Clock, timeout_s: float) -> None:
        self._node_id = node_id
        self._index = index
        self._clock = clock
        self._timeout_s = timeout_s
        self._under_way = 0
        self._changed = asyncio.Condition()
        self._comparing = False
        self._announcements: JoinedCalls[ChunkRecord, bool] = JoinedCalls(self._expect_objects)
        self._listings = JoinedCalls(self._list_objects)
        self.epoch = ""
        """Name of the index that this node was compared with last."""
        self.changes = 0
        """What this node has reported and was answered: the index has no fewer, unless it went back."""
        self.unsure = False
        """Whether a report was not answered: the index may have counted it, and would lose as much unnoticed."""

    async def registering(
        self, records: Sequence[ChunkRecord], *, patient: bool = True, fresh: int = 0
    ) -> AsyncIterator[dict[bytes, int]]:
        """Generations of index entries by key, as they are indexed; `fresh`: of those that are new.

        A chunk whose parent is on its way to another node is waited for, for a time, if `patient`: by the orchestrator,
        or here, if that answers at once. During the wait the index is asked only for chunks that wait for another node,
        and not for those behind them here.
        """
        unregistered, deadline_s = ChunkRecords.of(records), self._clock.monotonic_s() + self._timeout_s
        pause_s, batch = _RETRY_S, unregistered
        while unregistered:
            indexed: dict[bytes, int] = {}
            began_s = self._clock.monotonic_s()
            wait_ms = _WAIT_MS if patient and len(batch) <= _BATCH_CHUNKS else 0
            for first in range(0, len(batch), _BATCH_CHUNKS):
                part = batch[first : first + _BATCH_CHUNKS]
                async with self._operation():
                    generations = await self._index.commit(
                        self._node_id, part, reporter=self._node_id, fresh=fresh, wait_ms=wait_ms
                    )
                    self.changes += 1
                indexed |= {key: mark for key, mark in zip(part.key_list(), generations, strict=True) if mark}
            fresh = 0  # an entry that ended since must not come back under the same generation
            yield indexed
            keys = unregistered.key_list()
            unregistered = unregistered.pick(np.array([key not in indexed for key in keys], dtype=bool))
            if not unregistered or not patient or self._clock.monotonic_s() > deadline_s:
                return
            if indexed:
                batch, pause_s = unregistered, _RETRY_S
            else:
                unregistered_keys = set(unregistered.key_list())
                heads = np.array([parent not in unregistered_keys for parent in unregistered.parent_list()], dtype=bool)
                batch = unregistered.pick(heads | ~unregistered.parent_mask())
                await self._clock.sleep(max(0.0, began_s + pause_s - self._clock.monotonic_s()))
                pause_s = min(2 * pause_s, _RETRY_S_MAX)

    async def joining(
        self, records: Sequence[ChunkRecord], generations: Sequence[int], *, only_in_object: bool
    ) -> dict[bytes, int]:
        """List this node in these very entries; return their generations by key, without those that have ended."""
        entries: dict[bytes, int] = {}
        for first in range(0, len(records), _BATCH_CHUNKS):
            part, within = records[first : first + _BATCH_CHUNKS], generations[first : first + _BATCH_CHUNKS]
            async with self._operation():
                marks = await self._index.join(self._node_id, part, within, only_in_object=only_in_object)
                self.changes += 1
            listed = zip(part, within, marks, strict=True)
            entries |= {record.key: generation for record, generation, is_listed in listed if is_listed}
        return entries

    async def withdraw(self, records: Sequence[ChunkRecord], holder: str = "", *, hidden: bool = False) -> None:
        """Deregister chunks, at this node or at another holder. `hidden`: this node keeps its copies.

        A change that does not reach the index now does when a delivery misses them, or when both are compared.
        """
        if not records:
            return
        try:
            async with self._operation():
                await self._index.withdraw(holder or self._node_id, records, reporter=self._node_id, hidden=hidden)
                self.changes += 1
        except QuireError as error:
            logger().warning("lost chunks could not be withdrawn", chunks=len(records), error=str(error))

    async def may_go(self, chunks: Sequence[ChunkRecord]) -> set[bytes] | None:
        """Take last copies, deepest first, out of the index; the keys that are out. None if it does not answer."""
        try:
            async with self._operation():
                marks = await self._index.evict(self._node_id, chunks)
        except QuireError as error:
            logger().warning("nothing can be evicted while the index does not answer", error=str(error))
            return None
        return {chunk.key for chunk, out in zip(chunks, marks, strict=True) if out}

    async def may_withdraw(self, chunks: Sequence[ChunkRecord], keepers: Sequence[str]) -> set[bytes] | None:
        """Take this node off the entries that list each of `keepers`, or, for none, the object tier too; their keys.

        None if the index does not answer.
        """
        try:
            async with self._operation():
                if keepers:
                    marks = await self._index.withdraw_surplus(self._node_id, chunks, keepers)
                else:
                    marks = await self._index.withdraw_in_object(self._node_id, chunks)
                self.changes += 1
        except QuireError as error:
            logger().warning("nothing can be withdrawn while the index does not answer", error=str(error))
            return None
        return {chunk.key for chunk, out in zip(chunks, marks, strict=True) if out}

    async def drops(self) -> AsyncIterator[list[Drop]]:
        """Yield this node's drops, page by page. Drops that it does not settle come again."""
        cursor, unfinished = 0, True
        while unfinished:
            page, cursor = await self._index.drops(self._node_id, cursor)
            if page:
                yield page
            unfinished = cursor != 0

    async def settle_drops(self, drops: Sequence[Drop]) -> None:
        """These are carried out."""
        await self._index.settle_drops(self._node_id, drops)

    async def generations(self, records: Sequence[ChunkRecord]) -> dict[bytes, int]:
        """Generations of the index entries that list this node, by key; those alone that do."""
        if not records:
            return {}
        generations = await self._index.generations(self._node_id, records)
        return {record.key: generation for record, generation in zip(records, generations, strict=True) if generation}

    # ---- comparing

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """While inside, nothing is under way from this node to the index."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._comparing)
            self._comparing = True
            try:
                await self._changed.wait_for(lambda: not self._under_way)
            except BaseException:
                self._comparing = False
                raise
        try:
            yield
        finally:
            async with self._changed:
                self._comparing = False
                self._changed.notify_all()

    async def listing(self) -> Listing:
        """Return the index's listing of this node."""
        return await self._index.listing(self._node_id)

    async def holdings(self, unknown: Callable[[Sequence[Held]], list[Held]]) -> AsyncIterator[list[Held]]:
        """Everything that the index lists for this node, page by page.

        `unknown` says which of these are not here: they are withdrawn, while nothing else is under way from this node
        to the index.
        """
        cursor, unfinished = 0, True
        while unfinished:
            page, next_cursor = await self._index.holdings(self._node_id, cursor)
            if unknown(page):
                async with self.quiet():
                    page, next_cursor = await self._index.holdings(self._node_id, cursor)
                    if unknown_here := unknown(page):
                        await self._index.withdraw_held(self._node_id, unknown_here)
                        self.changes += 1
            yield page
            cursor, unfinished = next_cursor, next_cursor != 0

    async def unlisted(self, records: Sequence[ChunkRecord]) -> list[bytes]:
        """Keys of those for which this node is not listed."""
        holders = await self._index.locate(records)
        return [record.key for record, names in zip(records, holders, strict=True) if self._node_id not in names]

    async def damaged(self) -> None:
        """Report that the index differs from its acknowledgements: the object tier has to be compared, too."""
        await self._index.damaged(self._node_id)

    async def rebuilt(self, token: str) -> None:
        """Report that the index knows the contents of the object tier."""
        await self._index.rebuilt(token)

    # ---- the object tier

    async def list_object(self, record: ChunkRecord, generation: int) -> bool:
        """List the object tier for a chunk under the index entry of that generation; whether it is listed now.

        Not where that entry has ended. Raises what the index raises. Chunks that wait at the same time share a call.
        """
        return await self._listings((record, generation)) is ObjectMark.LISTED

    async def expect_object(self, record: ChunkRecord) -> bool:
        """Announce an object that is about to be written: it is deleted if no entry lists it when its entry has ended.

        False while objects of that key are being deleted. Raises what the index raises. Chunks that wait at the same
        time share a call.
        """
        return await self._announcements(record)

    async def _expect_objects(self, records: Sequence[ChunkRecord]) -> list[bool]:
        return await self._index.expect_objects(records)

    async def _list_objects(self, listings: Sequence[tuple[ChunkRecord, int]]) -> list[ObjectMark]:
        records, generations = zip(*listings, strict=True)
        async with self._operation():
            marks = await self._index.add_objects(records, generations, reporter=self._node_id)
            self.changes += 1
        return marks

    async def object_generations(self, records: Sequence[ChunkRecord]) -> tuple[dict[bytes, int], bool]:
        """Return the generations of the entries that list the object tier, by key, and whether the index is complete.

        It is not while it is being rebuilt from the object tier. Raises what the index raises.
        """
        generations, complete = await self._index.object_generations(records)
        listed = {record.key: generation for record, generation in zip(records, generations, strict=True) if generation}
        return listed, complete

    async def register_objects(self, records: Sequence[ChunkRecord]) -> int:
        """Register the object tier as the holder of chunks, parents before children; how many are listed now."""
        listed = 0
        for first in range(0, len(records), _BATCH_CHUNKS):
            part = records[first : first + _BATCH_CHUNKS]
            async with self._operation():
                generations = await self._index.commit(OBJECT_TIER, part, reporter=self._node_id)
                self.changes += 1
            listed += sum(1 for generation in generations if generation)
        return listed

    @contextlib.asynccontextmanager
    async def _operation(self) -> AsyncIterator[None]:
        if self._comparing:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._comparing)
        self._under_way += 1
        try:
            yield
        except BaseException:
            self.unsure = True
            raise
        finally:
            self._under_way -= 1
            if self._comparing:
                async with self._changed:
                    self._changed.notify_all()
