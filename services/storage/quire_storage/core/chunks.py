"""What a storage node holds: chunks by key, with the places that have a copy, pinned while somebody reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.durability import Durability
from quire.metadata.index import ChunkRecord
from quire_storage.core.slots import Shape

NO_NAMESPACE = bytes(16)


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """In the arena: slice l lies at `offset` + l·`layer_stride`."""

    offset: int
    layer_stride: int


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """In the pool: slice l lies at `offset` + l·`layer_stride` of the drive's slabs; its header at `header`."""

    drive: int
    offset: int
    layer_stride: int
    header: int


@dataclass(slots=True)
class Chunk:
    """A stored chunk: a checksum per slice, and where its bytes are: a place counts once the bytes are there.

    `namespace`: first 16 bytes of the namespace's digest. `stored_ms`: Unix epoch. `indexed`: False while the store
    that brought it is not sure yet that the index took it.
    """

    record: ChunkRecord
    num_layers: int
    slice_bytes: int
    checksums: npt.NDArray[np.uint32]
    durability: Durability = Durability.MEMORY
    namespace: bytes = NO_NAMESPACE
    stored_ms: int = 0
    memory: MemoryPlace | None = None
    disk: DiskPlace | None = None
    in_object: bool = False
    indexed: bool = field(default=True, compare=False)
    pins: int = field(default=0, compare=False)
    dropped: bool = field(default=False, compare=False)

    @property
    def shape(self) -> Shape:
        return Shape(self.num_layers, self.slice_bytes)

    @property
    def bytes(self) -> int:
        return self.num_layers * self.slice_bytes

    def same_content(self, other: Chunk) -> bool:
        """Equal by shape and checksums."""
        return (self.num_layers, self.slice_bytes) == (other.num_layers, other.slice_bytes) and bool(
            np.array_equal(self.checksums, other.checksums)
        )


class ChunkTable:
    """Chunks in hand, by key. A dropped chunk that is pinned keeps its places until the last pin is gone."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, Chunk] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def get(self, key: bytes) -> Chunk | None:
        return self._chunks.get(key)

    def add(self, chunk: Chunk) -> None:
        """Make a chunk readable."""
        assert chunk.record.key not in self._chunks, "a key is added once"
        self._chunks[chunk.record.key] = chunk

    def unpin(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Let go; returns those that nobody holds now."""
        for chunk in chunks:
            chunk.pins -= 1
            assert chunk.pins >= 0, "a pin is given back once"
        return [chunk for chunk in chunks if chunk.pins == 0]

    def remove(self, key: bytes) -> Chunk | None:
        """Take a chunk out of the table; it is not `dropped` by that."""
        return self._chunks.pop(key, None)
