"""Consecutive chunks of a request: in leases, placements, permits and outcomes alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Chunks first … first+count-1 of a request's keys, at the storage node `node_id`."""

    node_id: str
    first: int
    count: int

    @property
    def stop(self) -> int:
        """Position behind the last one."""
        return self.first + self.count


def clip(ranges: Iterable[ChunkRange], first: int, stop: int) -> tuple[ChunkRange, ...]:
    """Return the part of `ranges` within chunks first … stop-1."""
    cut = (
        ChunkRange(run.node_id, low, min(run.stop, stop) - low)
        for run in ranges
        if (low := max(run.first, first)) < run.stop
    )
    return tuple(part for part in cut if part.count > 0)


def ranges_of(node_id: str, chunks: Sequence[int]) -> list[ChunkRange]:
    """Return chunks of one node, in ascending order, as ranges."""
    if not chunks:
        return []
    positions = np.asarray(chunks, dtype=np.int64)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(positions) != 1) + 1])
    counts = np.diff(starts, append=len(positions))
    bounds = zip(positions[starts].tolist(), counts.tolist(), strict=True)
    return [ChunkRange(node_id, first, count) for first, count in bounds]
