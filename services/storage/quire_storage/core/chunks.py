"""What a storage node holds: chunks by key, pinned while a delivery reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.durability import Durability
from quire.errors import ChunkMissing
from quire.keys import ChunkKeys
from quire.metadata.index import ChunkRecord


@dataclass(slots=True)
class Chunk:
    """A stored chunk: slice l, of `slice_bytes`, lies at `offset` + l·`layer_stride` of the arena; a checksum each."""

    record: ChunkRecord
    num_layers: int
    slice_bytes: int
    offset: int
    layer_stride: int
    checksums: npt.NDArray[np.uint32]
    durability: Durability = Durability.MEMORY
    pins: int = field(default=0, compare=False)
    dropped: bool = field(default=False, compare=False)

    @property
    def bytes(self) -> int:
        return self.num_layers * self.slice_bytes

    def slices(self) -> npt.NDArray[np.int64]:
        """Offsets of its slices, layer 0 first."""
        return self.offset + np.arange(self.num_layers, dtype=np.int64) * self.layer_stride

    def same_content(self, other: Chunk) -> bool:
        """Equal by shape and checksums."""
        return (self.num_layers, self.slice_bytes) == (other.num_layers, other.slice_bytes) and bool(
            np.array_equal(self.checksums, other.checksums)
        )


class ChunkTable:
    """Chunks by key. A dropped chunk that is pinned keeps its slot until the last pin is gone."""

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

    def pin(self, keys: ChunkKeys) -> list[Chunk]:
        """The chunks, held in place until `unpin`. Raises `ChunkMissing` with the first that is not here."""
        chunks = []
        for index, key in enumerate(keys):
            chunk = self._chunks.get(key)
            if chunk is None:
                raise ChunkMissing(f"chunk {index} of the run, key {key.hex()}", field="chunk_keys")
            chunks.append(chunk)
        for chunk in chunks:
            chunk.pins += 1
        return chunks

    def unpin(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Let go; returns those whose slots are free now because they were dropped meanwhile."""
        for chunk in chunks:
            chunk.pins -= 1
            assert chunk.pins >= 0, "a pin is given back once"
        return [chunk for chunk in chunks if chunk.dropped and chunk.pins == 0]

    def drop(self, key: bytes) -> tuple[Chunk, bool] | None:
        """Make a chunk unreadable; with whether its slot is free at once. None if it is not here."""
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return None
        chunk.dropped = True
        return chunk, chunk.pins == 0
