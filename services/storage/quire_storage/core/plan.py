"""The arithmetic of a delivery: which bytes of the arena go where, layer by layer (ObjectCache, §3.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from quire.descriptor import DeliveryOrder, Descriptor
from quire.errors import DescriptorInvalid
from quire.outcome import ChunkRun

from quire_storage.core.chunks import Chunk


def choose_order(asked: DeliveryOrder, payload_bytes: int, theta_bytes: int) -> DeliveryOrder:
    """Chunkwise below Θ, layerwise from Θ on (Eq. 2), unless the client insists."""
    if asked is not DeliveryOrder.AUTO:
        return asked
    return DeliveryOrder.CHUNKWISE if payload_bytes < theta_bytes else DeliveryOrder.LAYERWISE


@dataclass(frozen=True, slots=True)
class Piece:
    """Slices at `offsets` of the arena, to lie back to back from `remote_offset` of the target."""

    offsets: npt.NDArray[np.int64]
    remote_offset: int


class DeliveryPlan:
    """One node's stripe of every layer.

    `chunks` are those of `runs`, in order. Slice l of chunk i lies at offset_i + l·S here and goes to (l·N + i)·S
    there. Raises `DescriptorInvalid` where a stored chunk has another shape than the descriptor says.
    """

    def __init__(self, descriptor: Descriptor, runs: Sequence[ChunkRun], chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if (chunk.num_layers, chunk.slice_bytes) != (descriptor.num_layers, descriptor.slice_bytes):
                raise DescriptorInvalid(
                    f"{descriptor.num_layers} layers of {descriptor.slice_bytes} bytes, but the chunks have "
                    f"{chunk.num_layers} of {chunk.slice_bytes}",
                    field="descriptor",
                )
        self.num_layers = descriptor.num_layers
        self.slice_bytes = descriptor.slice_bytes
        self.bytes_per_layer = len(chunks) * descriptor.slice_bytes
        self._layer_bytes = descriptor.layer_bytes
        self._runs = tuple(runs)
        self._bases = np.array([chunk.offset for chunk in chunks], dtype=np.int64)
        self._checksums = np.stack([chunk.checksums for chunk in chunks], axis=1)

    @property
    def payload_bytes(self) -> int:
        return self.num_layers * self.bytes_per_layer

    def sources(self, layer: int) -> npt.NDArray[np.int64]:
        """Offsets of this layer's slices, in the order of the chunks."""
        return self._bases + layer * self.slice_bytes

    def checksums(self, layer: int) -> npt.NDArray[np.uint64]:
        """What those slices must have."""
        row: npt.NDArray[np.uint64] = self._checksums[layer]
        return row

    def pieces(self, layer: int, bytes_max: int) -> Iterator[Piece]:
        """The layer in pieces of at most `bytes_max` (one slice at the least)."""
        sources, at = self.sources(layer), 0
        step = max(1, bytes_max // self.slice_bytes)
        for run in self._runs:
            for start in range(0, run.count, step):
                count = min(step, run.count - start)
                remote = layer * self._layer_bytes + (run.first + start) * self.slice_bytes
                yield Piece(sources[at + start : at + start + count], remote)
            at += run.count
