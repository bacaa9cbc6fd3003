"""Chunks, and the places of their copies. Content never changes; state is `core.residency`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.model.durability import Durability
from quire.model.records import ChunkRecord
from quire_storage.core.pool.slots import Shape, shape_of


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Place in the arena: slice l is at `offset` + l·`layer_stride`."""

    offset: int
    layer_stride: int


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Place in the pool: slice l is at `offset` + l·`layer_stride` of the drive's slabs; its header at `header`."""

    drive: int
    offset: int
    layer_stride: int
    header: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A stored chunk: its place in the index, its shape, and a CRC-32 for each slice.

    `checksums`: (num_layers,) uint32. `stored_ms`: Unix epoch.
    """

    record: ChunkRecord
    num_layers: int
    slice_bytes: int
    checksums: npt.NDArray[np.uint32]
    stored_ms: int = 0

    @property
    def key(self) -> bytes:
        return self.record.key

    @property
    def namespace(self) -> bytes:
        return self.record.namespace

    @property
    def shape(self) -> Shape:
        return shape_of(self.num_layers, self.slice_bytes)

    @property
    def bytes(self) -> int:
        return self.num_layers * self.slice_bytes

    @property
    def slot_bytes(self) -> int:
        """Size of its slot."""
        return self.shape.slot_bytes

    def same_content(self, chunk: Chunk) -> bool:
        """Equal by shape and checksums."""
        return (self.num_layers, self.slice_bytes) == (chunk.num_layers, chunk.slice_bytes) and bool(
            np.array_equal(self.checksums, chunk.checksums)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Chunk:
        return self


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a chunk's bytes: the chunk, the level that it was stored at, whether an object of it was written.

    The object may have been deleted: its index entry may have ended since.

    `generation`: of the index entry under which this node listed the chunk last; 0 where that is unknown.
    """

    chunk: Chunk
    level: Durability = Durability.MEMORY
    in_object: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A chunk on a drive, or about to be: its header and its place."""

    header: Header
    place: DiskPlace


@dataclass(frozen=True, slots=True)
class Copy:
    """State of a chunk when it was pinned. `number` names this copy: a key may have several over time."""

    number: int
    chunk: Chunk
    memory: MemoryPlace | None
    disk: DiskPlace | None
