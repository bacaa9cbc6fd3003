"""The part of a prefix that only the object tier has, and what reading it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.ranges import ChunkRange, clip

_DIGITS: Final = 1


@dataclass(frozen=True, slots=True)
class ObjectSpeed:
    """Speed of the object tier, as one storage node has measured it.

    Attributes:
        latency_us: Microseconds from a small request to its answer.
        request_us: Microseconds that each request adds to the time of all.
        bytes_per_s: Of all requests together.
    """

    latency_us: int
    request_us: int
    bytes_per_s: int

    def rounded(self) -> ObjectSpeed:
        """Return it with one digit each, so that members do not change with every measurement."""
        return ObjectSpeed(*(_rounded(value) for value in (self.latency_us, self.request_us, self.bytes_per_s)))

    def seconds(self, requests: npt.ArrayLike, size: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the time until the last answer of that many requests for `size` bytes; 0 for none."""
        count, size = np.asarray(requests, dtype=np.float64), np.asarray(size, dtype=np.float64)
        duration_s = (self.latency_us + count * self.request_us) / 1e6 + size / self.bytes_per_s
        return np.where(count > 0, duration_s, 0.0)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """Chunks of a prefix that no node is listed for; a delivery may have left some in a node's memory.

    Attributes:
        ranges: Of these chunks, with the nodes that read them.
        speeds: Of the tier, by node.
    """

    ranges: tuple[ChunkRange, ...] = ()
    speeds: Mapping[str, ObjectSpeed] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def chunks(self, first: int, stop: int) -> int:
        """Return how many chunks of first … stop-1 are of this part."""
        return sum(run.count for run in clip(self.ranges, first, stop))

    def seconds(self, stops: npt.ArrayLike, slice_bytes: int, first: int = 0) -> npt.NDArray[np.float64]:
        """Return the time to read a part of each of its chunks first … stop-1; nodes read side by side.

        Args:
            stops: Ends of the part that is wanted, any shape.
            slice_bytes: Bytes of each chunk that are read, by one request.
            first: Begin of the part that is wanted.
        """
        ends, slowest = np.asarray(stops), np.zeros(np.shape(stops))
        for node, speed in self.speeds.items():
            count = sum(
                np.clip(ends, run.first, run.stop) - np.clip(first, run.first, run.stop)
                for run in self.ranges
                if run.node_id == node
            )
            slowest = np.maximum(slowest, speed.seconds(count, count * slice_bytes))
        return slowest


def _rounded(value: int) -> int:
    unit = 10 ** max(0, len(str(value)) - _DIGITS)
    return int(round(value / unit) * unit)
