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
        """Behind the last one."""
        return self.first + self.count


def clip(ranges: Iterable[ChunkRange], first: int, stop: int) -> tuple[ChunkRange, ...]:
    """What of `ranges` lies within chunks first … stop-1."""
    cut = (
        ChunkRange(each.node_id, low, min(each.stop, stop) - low)
        for each in ranges
        if (low := max(each.first, first)) < each.stop
    )
    return tuple(each for each in cut if each.count > 0)
