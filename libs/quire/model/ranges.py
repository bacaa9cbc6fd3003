"""Consecutive chunks of a request: in leases, placements, permits and outcomes alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
