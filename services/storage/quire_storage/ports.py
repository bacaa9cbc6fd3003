"""What a storage node needs from outside, beside the data plane (`quire.transport`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.clock import Clock
from quire.metadata.index import ChunkRecord
from quire_storage.core.chunks import Chunk

__all__ = ["Clock", "ClusterIndex", "DurablePool", "Grant", "RateSource"]

Bytes = npt.NDArray[np.uint8]


class ClusterIndex(Protocol):
    """The orchestrator, as the place where replicas are registered."""

    async def commit(self, node_id: str, records: Sequence[ChunkRecord]) -> list[bool]:
        """Register; False for a chunk whose parent is not indexed (yet)."""

    async def withdraw(self, node_id: str, records: Sequence[ChunkRecord]) -> None:
        """Deregister chunks that are lost or corrupt."""

    async def release(self, lease: bytes) -> None:
        """Give the lease of a client back that is gone."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A rate in bytes per second until the epoch ends."""

    delivery: str
    rate_bytes_per_s: int
    epoch_left_s: float


class RateSource(Protocol):
    """The scheduler."""

    async def admit(self, delivery: str, bytes_per_layer: int, compute_window_us: int, layers_left: int) -> Grant: ...
    async def renew(self, layers_left: dict[str, int]) -> list[Grant]: ...
    async def finish(self, delivery: str, bytes_moved: int, duration_s: float) -> None: ...


class DurablePool(Protocol):
    """The tier below memory. Methods block: the runtime calls them from a thread."""

    def recover(self, arena: Bytes) -> list[Chunk]:
        """Read every committed chunk into its place in the arena; those that fail their checksums are left out."""

    def persist(self, chunks: Sequence[Chunk], arena: Bytes) -> None:
        """Write the bytes, then commit: when this returns the chunks survive a kill."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """When this returns the chunks will not come back; their slots may be reused."""

    def close(self) -> None: ...
