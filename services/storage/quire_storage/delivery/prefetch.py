"""Bringing chunks into memory before they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator, Sequence
from typing import Final

from quire.model.errors import CorruptData, TooManyRequests
from quire.model.records import ChunkRecord
from quire.model.transfers import PrefetchOrder
from quire.telemetry import logger
from quire_storage.core.chunks import Copy
from quire_storage.core.pool.slots import Shape
from quire_storage.delivery.promotions import Promotion, Promotions
from quire_storage.delivery.reading import Reading
from quire_storage.ports import Clock

_GROUP_BYTES: Final = 32 << 20
_LAYERS_AT_ONCE: Final = 4
_WAITING_MAX: Final = 64
_AT_ONCE_S: Final = 1.0
"""When it is due if it is wanted at once: deliveries, which wait for their reads, are due earlier."""
_SHARE_MAX: Final = 0.5
"""Of memory, for one prefetch: more would push out what it has brought itself."""


class Prefetches:
    """Shares its reads with deliveries: whichever begins reads, the other joins.

    A prefetch is read in groups of 32 MiB, of all prefetches one group at a time, so that it delays deliveries by a few
    reads at most. The prefetch that is due first has the next group.
    """

    def __init__(self, reading: Reading, promotions: Promotions, clock: Clock) -> None:
        self._reading = reading
        self._promotions = promotions
        self._clock = clock
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = 0
        self._busy = False

    async def prefetch(self, order: PrefetchOrder) -> list[bool]:
        """Return for each chunk whether it is in memory now. Those of the object tier alone are read from there.

        At most half of the node's memory is filled, from the first chunk on. Raises `TooManyRequests`.
        """
        if len(self._waiting) >= _WAITING_MAX:
            raise TooManyRequests(f"{len(self._waiting)} prefetches wait; retry later")
        due_s = self._clock.monotonic_s() + (order.within_s or _AT_ONCE_S)
        records, room = order.records(), int(_SHARE_MAX * self._reading.tiers.arena.slots.capacity_bytes)
        shape = Shape(order.layout.num_layers, order.layout.slice_bytes) if order.layout is not None else None
        promoted: set[bytes] = set()
        at, count = 0, _group_of(room, shape.slot_bytes) if shape is not None else 1
        while at < len(records) and room > 0:
            async with self._turn(due_s):
                in_memory, size = await self._group(records[at : at + count], shape, due_s)
            promoted |= in_memory
            at += count
            room -= size * count
            count = _group_of(room, size) if size else 1
        return [record.key in promoted for record in records]

    @contextlib.asynccontextmanager
    async def _turn(self, due_s: float) -> AsyncIterator[None]:
        if self._busy:
            turn = asyncio.get_running_loop().create_future()
            self._number += 1
            heapq.heappush(self._waiting, (due_s, self._number, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()
                raise
        self._busy = True
        try:
            yield
        finally:  # soon, so that one that has more groups is among those that wait
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

    async def _group(self, records: Sequence[ChunkRecord], shape: Shape | None, due_s: float) -> tuple[set[bytes], int]:
        """Return which of these are in memory now, and the bytes of the largest chunk, 0 if that is unknown."""
        tiers = self._reading.tiers
        pinned = tiers.pin([record.key for record in records])
        try:
            in_memory = {copy.chunk.key for copy in pinned.copies if copy.memory is not None}
            cold = [copy for copy in pinned.copies if copy.memory is None and copy.disk is not None]
            for shape_ in {copy.chunk.shape for copy in cold}:
                in_memory |= await self._promote([copy for copy in cold if copy.chunk.shape == shape_], due_s)
            if shape is not None and pinned.missing:
                absent = frozenset(pinned.missing)
                in_memory |= await self._load([record for record in records if record.key in absent], shape, due_s)
            await self._list([record for record in records if record.key in in_memory])
        finally:
            tiers.unpin(pinned)
        sizes = (copy.chunk.shape.slot_bytes for copy in pinned.copies)
        return in_memory, max(sizes, default=shape.slot_bytes if shape is not None else 0)

    async def _load(self, records: Sequence[ChunkRecord], shape: Shape, due_s: float) -> set[bytes]:
        """Return the keys of those that came from the object tier."""
        loads = self._reading.loads
        chunks = await loads.find(records, shape) if loads is not None else {}
        if loads is None or not chunks:
            return set()
        return await loads.bring(list(chunks.values()), due_s)

    async def _list(self, records: Sequence[ChunkRecord]) -> None:
        """Have the index list copies that a delivery has brought from the object tier."""
        tiers, loads = self._reading.tiers, self._reading.loads
        unlisted = [record for record in records if tiers.residency.generation(record.key) == 0]
        if loads is not None and unlisted:
            listed = await tiers.object_generations(unlisted)
            await loads.list_copies({key: generation for key, generation in listed.items() if generation})

    async def _promote(self, copies: Sequence[Copy], due_s: float) -> set[bytes]:
        """Keys of those that there was room for, once they have been read and verified."""
        ticket, promoted = self._promotions.join(self._reading, copies, prefetch=True)
        running: list[Promotion] = list({id(promotion): promotion for promotion, _ in promoted.values()}.values())
        layers = range(copies[0].chunk.num_layers)
        try:
            for first in range(0, len(layers), _LAYERS_AT_ONCE):
                part = layers[first : first + _LAYERS_AT_ONCE]
                await asyncio.gather(*(promotion.layer(layer, due_s) for promotion in running for layer in part))
        except CorruptData as error:
            logger().warning("a chunk to be prefetched is corrupt", error=str(error))
        finally:
            for promotion in running:
                await self._promotions.leave(self._reading.tiers, ticket, promotion)
        complete = {number for number, (promotion, _) in promoted.items() if promotion.complete}
        return {copy.chunk.key for copy in copies if copy.number in complete}


def _group_of(room: int, size: int) -> int:
    return max(1, min(_GROUP_BYTES, room) // size)
