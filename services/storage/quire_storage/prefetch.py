"""Bringing chunks into memory before they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.model.errors import CorruptData
from quire.model.keys import ChunkKeys
from quire.telemetry import logger
from quire_storage.batches import Promotion, Promotions, Reading
from quire_storage.core.chunks import Copy
from quire_storage.ports import Clock


class Prefetches:
    """Shares its reads with deliveries: whichever begins reads, the other joins."""

    def __init__(self, reading: Reading, promotions: Promotions, clock: Clock) -> None:
        self._reading = reading
        self._promotions = promotions
        self._clock = clock

    async def prefetch(self, keys: ChunkKeys, within_s: float) -> list[bool]:
        """For each whether it lies in memory now. What is in the object tier alone is fetched from there.

        `within_s`: drives read first what is due earlier; 0 for at once.
        """
        tiers, wanted = self._reading.tiers, list(keys)
        pinned = await tiers.pin(wanted)
        try:
            there = {copy.chunk.key for copy in pinned.copies if copy.memory is not None}
            due_s = self._clock.monotonic_s() + within_s if within_s else 0.0
            cold = [copy for copy in pinned.copies if copy.memory is None and copy.disk is not None]
            for shape in {copy.chunk.shape for copy in cold}:
                there |= await self._promote([copy for copy in cold if copy.chunk.shape == shape], due_s)
        finally:
            tiers.unpin(pinned)
        return [key in there for key in wanted]

    async def _promote(self, copies: Sequence[Copy], due_s: float) -> set[bytes]:
        """Keys of those that there was room for, once they have been read and verified."""
        ticket, promoted = self._promotions.join(self._reading, copies)
        running: dict[int, Promotion] = {id(each): each for each, _ in promoted.values()}
        try:
            reads = (each.layer(at, due_s) for each in running.values() for at in range(copies[0].chunk.num_layers))
            await asyncio.gather(*reads)
        except CorruptData as error:
            logger().warning("what was to be prefetched is corrupt", error=str(error))
        finally:
            for each in running.values():
                await self._promotions.leave(self._reading.tiers, ticket, each)
        complete = {number for number, (each, _) in promoted.items() if each.complete}
        return {copy.chunk.key for copy in copies if copy.number in complete}
