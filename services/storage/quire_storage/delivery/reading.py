"""Parts with which all deliveries of a node read, and the checksums of their chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.model.errors import CorruptData
from quire.transport.fair_threads import FairThreads
from quire_storage.core.checksums import Checksums
from quire_storage.core.chunks import Copy
from quire_storage.core.prepared import PreparedRuns
from quire_storage.delivery.object_loads import ObjectChunk, ObjectLoads
from quire_storage.ingest.arrivals import ArrivingChunk
from quire_storage.tiers.ring import Ring
from quire_storage.tiers.tiers import Tiers

Bytes = npt.NDArray[np.uint8]
Source = Copy | ObjectChunk | ArrivingChunk
"""What a delivery reads a chunk from: a copy that is here, the object tier, or a store that is running."""
Healer = Callable[[Copy], Awaitable[Bytes | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Shared parts with which every delivery of a node reads."""

    tiers: Tiers
    ring: Ring | None
    threads: FairThreads
    heal: Healer
    loads: ObjectLoads | None = None
    prepared: PreparedRuns = field(default_factory=PreparedRuns)

    async def heal_slices(
        self, copies: Sequence[Copy], starts: npt.NDArray[np.int64], layer: int, bad: Sequence[int]
    ) -> None:
        """Put slices right that do not match, from another copy. Raises `CorruptData` where there is none.

        `starts`: where in the arena the slices of `layer` lie.
        """
        unsound = 0
        for index in bad:
            payload = await self.heal(copies[index])
            if payload is None:
                unsound += 1
                continue
            at = int(starts[index])
            self.tiers.arena.view[at : at + copies[index].chunk.slice_bytes] = payload[layer]
        if unsound:
            raise CorruptData(f"{unsound} chunks have no sound bytes in layer {layer}, here or elsewhere")


def checksums_of(chunks: Sequence[Source], layers: int) -> Checksums:
    """(layers, chunks); zeros for chunks that loads or stores verify."""
    unknown = np.zeros(layers, dtype=np.uint32)
    sums = [chunk.chunk.checksums if isinstance(chunk, Copy) else unknown for chunk in chunks]
    return np.stack(sums, axis=1)
