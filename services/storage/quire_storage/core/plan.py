"""The arithmetic of a delivery: which bytes of the arena go where, layer by layer (ObjectCache, §3.3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from quire.model.descriptor import DeliveryOrder, Descriptor
from quire.model.errors import DescriptorInvalid
from quire.model.ranges import ChunkRange
from quire_storage.core.checksums import Checksums, combined, mismatches
from quire_storage.core.chunks import Copy
from quire_storage.core.pool.extents import extents

_SCATTERED_BYTES = 256 << 10
_VERIFY_BYTES = 1 << 20
_CARRY_BYTES = 512 << 10
"""Verified, and then copied out of the cache."""


def choose_order(order: DeliveryOrder, payload_bytes: int, theta_bytes: int) -> DeliveryOrder:
    """Chunkwise below Θ, layerwise from Θ on (Eq. 2), unless the client insists."""
    if order is not DeliveryOrder.AUTO:
        return order
    return DeliveryOrder.CHUNKWISE if payload_bytes < theta_bytes else DeliveryOrder.LAYERWISE


def check_shapes(descriptor: Descriptor, copies: Sequence[Copy]) -> None:
    """Check the shapes. Raises `DescriptorInvalid` if a stored chunk has another shape than the descriptor."""
    for chunk in (copy.chunk for copy in copies):
        if (chunk.num_layers, chunk.slice_bytes) != (descriptor.num_layers, descriptor.slice_bytes):
            raise DescriptorInvalid(
                f"{descriptor.num_layers} layers of {descriptor.slice_bytes} bytes, but the chunks have "
                f"{chunk.num_layers} of {chunk.slice_bytes}",
                field="descriptor",
            )


def places(descriptor: Descriptor, ranges: Sequence[ChunkRange]) -> npt.NDArray[np.int64]:
    """(chunks of all `ranges`,): where in a layer of the target each of them goes."""
    offsets, first = descriptor.offsets(), descriptor.first_chunk
    return np.concatenate([offsets[run.first - first : run.stop - first] for run in ranges])


@dataclass(frozen=True, slots=True)
class Piece:
    """Ranges of `length` bytes at `offsets` of the arena, to lie back to back from `remote_offset` of the target.

    `stop`: behind the last of its chunks, counted in the batch.
    """

    offsets: npt.NDArray[np.int64]
    length: int
    remote_offset: int
    stop: int

    @property
    def bytes(self) -> int:
        return len(self.offsets) * self.length


@dataclass(frozen=True, slots=True)
class Carried:
    """A copy: `bytes` of neighbouring chunks, from `offset` of the arena to `remote_offset` of the target.

    The chunks are `count` from `first` of the batch on. `checksums`: of them as one range, (layers,).
    """

    offset: int
    bytes: int
    remote_offset: int
    first: int
    count: int
    checksums: Checksums


Bytes = npt.NDArray[np.uint8]
Heal = Callable[[list[int]], None]
"""Told the indices of chunks of the batch whose slices do not match."""


class SliceChecks:
    """Verifies layers of chunks, in parts: neighbours in the arena as one range.

    `checksums`: (layers, chunks). Slice l of chunk i, `size` bytes, is at bases_i + shift, the layer's.
    """

    def __init__(self, checksums: Checksums, bases: npt.NDArray[np.int64], size: int) -> None:
        self.parts = extents(bases, size, _VERIFY_BYTES)
        self._checksums = checksums
        self._bases = bases
        self._size = size
        self._expected: dict[int, list[int]] = {}

    def is_sound(self, arena: Bytes, layer: int, shift: int, part: int) -> bool:
        """Return whether the slices of a part of a layer match."""
        if layer not in self._expected:
            self._expect(layer)
        extent = self.parts[part]
        start = extent.offset + shift
        return crc32(memoryview(arena.data)[start : start + extent.count * self._size]) == self._expected[layer][part]

    def corrupt(self, arena: Bytes, layer: int, shift: int) -> list[int]:
        """Return the indices of the chunks whose slice of a layer does not match. For a thread."""
        if all(self.is_sound(arena, layer, shift, part) for part in range(len(self.parts))):
            return []
        return mismatches(arena, self._bases + shift, self._size, self._checksums[layer])

    def _expect(self, layer: int) -> None:
        """Combine the checksums of a layer's parts: of the first layer, which is waited for, alone; else of all."""
        layers = range(1) if layer == 0 else range(len(self._checksums))
        sums = combined(self._checksums[: len(layers)], self.parts, self._size).tolist()
        self._expected |= dict(zip(layers, sums, strict=True))


class BatchPlan:
    """A batch: the part of each layer that consecutive chunks of a delivery make up.

    Slice l of chunk i is at bases_i + shift of the arena, where the caller knows the shift of the layer, and goes to
    l·stride + targets_i of the client's memory.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        checksums: Checksums,
        bases: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
    ) -> None:
        self.slice_bytes = descriptor.slice_bytes
        self.bytes = len(bases) * descriptor.slice_bytes
        self.bases = bases
        self._stride = descriptor.stride
        breaks = np.flatnonzero(np.diff(targets) != descriptor.slice_bytes) + 1
        cuts = [0, *breaks.tolist(), len(bases)]
        self._spans = [(low, high, int(targets[low])) for low, high in itertools.pairwise(cuts)]
        self._pieces: dict[int, list[Piece]] = {}
        self.checks = SliceChecks(checksums, bases, descriptor.slice_bytes)
        self._checksums = checksums
        self._targets = targets
        self._carried: list[Carried] = []

    def carried(self) -> list[Carried]:
        """The batch's part of a layer, for a copy to memory of this host: all layers' expected checksums, once."""
        if not self._carried:
            for low, high, target in self._spans:
                parts = extents(self.bases[low:high], self.slice_bytes, _CARRY_BYTES)
                sums = combined(self._checksums[:, low:high], parts, self.slice_bytes)
                self._carried += [
                    Carried(
                        part.offset,
                        part.count * self.slice_bytes,
                        target + part.first * self.slice_bytes,
                        low + part.first,
                        part.count,
                        sums[:, index],
                    )
                    for index, part in enumerate(parts)
                ]
        return self._carried

    def carry(
        self, arena: Bytes, memory: Bytes, layer: int, shift: int, parts: Sequence[Carried], heal: Heal | None
    ) -> None:
        """Verify and copy in one pass.

        For a thread. `heal` corrects slices that do not match, or raises; None for verified ones.
        """
        view, remote = memoryview(arena.data), layer * self._stride
        for part in parts:
            start, to = part.offset + shift, remote + part.remote_offset
            if heal is not None and crc32(view[start : start + part.bytes]) != part.checksums[layer]:
                chunks = slice(part.first, part.first + part.count)
                offsets, sums = self.bases[chunks] + shift, self._checksums[layer, chunks]
                heal([part.first + index for index in mismatches(arena, offsets, self.slice_bytes, sums)])
            memory[to : to + part.bytes] = arena[start : start + part.bytes]

    def pieces(self, layer: int, shift: int, bytes_max: int) -> Iterator[Piece]:
        """The batch's part of a layer in pieces of at most `bytes_max` (one slice at the least).

        Chunks that are neighbours at both ends go as one range, those scattered in the arena as a list of slices.
        """
        if bytes_max not in self._pieces:  # the same in every layer, but for where they begin
            self._pieces[bytes_max] = [
                replace(piece, remote_offset=target + piece.remote_offset, stop=low + piece.stop)
                for low, high, target in self._spans
                for piece in self._span_pieces(self.bases[low:high], bytes_max)
            ]
        remote = layer * self._stride
        for piece in self._pieces[bytes_max]:
            yield Piece(piece.offsets + shift, piece.length, remote + piece.remote_offset, piece.stop)

    def _span_pieces(self, bases: npt.NDArray[np.int64], bytes_max: int) -> Iterator[Piece]:
        size, scattered = self.slice_bytes, 0
        step = max(1, bytes_max // size)
        parts = extents(bases, size, bytes_max)
        for index, part in enumerate(parts):
            alone = part.count * size >= _SCATTERED_BYTES or len(parts) == 1
            if alone:
                scattered = part.first + part.count
                yield Piece(np.array([part.offset], dtype=np.int64), part.count * size, part.first * size, scattered)
            elif index + 1 == len(parts) or parts[index + 1].count * size >= _SCATTERED_BYTES:
                stop = part.first + part.count
                for start in range(scattered, stop, step):
                    end = min(stop, start + step)
                    yield Piece(bases[start:end], size, start * size, end)
                scattered = stop
