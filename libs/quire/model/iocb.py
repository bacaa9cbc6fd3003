"""I/O control blocks, in the shape of Tutti's gio_uring: one submission carries up to 2,048 contexts.

A context says {file, offset, length, address}; a batch keeps them as columns, so that a layer of thousands of slices
is prepared by a handful of vector operations and submitted by one call.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

CONTEXTS_MAX: Final = 2048
Ints = npt.NDArray[np.int64]


class Op(IntEnum):
    """Operation of an IOCB on each of its contexts."""

    READ = 1
    WRITE = 2
    SYNC = 3


@dataclass(frozen=True, slots=True)
class Contexts:
    """Columns of equal length: index of the file, offset in it, bytes, and the address in this process's memory."""

    files: Ints
    offsets: Ints
    lengths: Ints
    addresses: Ints

    def __len__(self) -> int:
        return len(self.files)

    @property
    def bytes(self) -> int:
        """Sum of the contexts' lengths."""
        return int(self.lengths.sum())

    def part(self, start: int, stop: int) -> Contexts:
        """Return contexts start … stop-1."""
        return Contexts(
            self.files[start:stop], self.offsets[start:stop], self.lengths[start:stop], self.addresses[start:stop]
        )

    def moved(self, distance: int) -> Contexts:
        """The same, `distance` further in memory."""
        return Contexts(self.files, self.offsets, self.lengths, self.addresses + distance)

    def split(self, bytes_max: int) -> Contexts:
        """The same bytes in contexts of at most `bytes_max`."""
        pieces = -(-self.lengths // bytes_max)
        if not len(self) or int(pieces.max()) <= 1:
            return self
        which = np.repeat(np.arange(len(self)), pieces)
        within = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * bytes_max
        lengths = np.minimum(bytes_max, self.lengths[which] - within)
        return Contexts(self.files[which], self.offsets[which] + within, lengths, self.addresses[which] + within)

    @staticmethod
    def join(parts: list[Contexts]) -> Contexts:
        """Concatenate contexts."""
        return Contexts(
            np.concatenate([part.files for part in parts]),
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.addresses for part in parts]),
        )

    @staticmethod
    def of_files(files: list[int]) -> Contexts:
        """Return one context per file, without bytes, for SYNC."""
        zeros = np.zeros(len(files), dtype=np.int64)
        return Contexts(np.array(files, dtype=np.int64), zeros, zeros, zeros)


class Iocb:
    """A submission. `results` has, once it is complete, bytes moved or a negative errno for each context."""

    __slots__ = ("contexts", "op", "results")

    op: Op
    contexts: Contexts
    results: Ints

    def fill(self, op: Op, contexts: Contexts) -> None:
        """Prepare for another submission of at most `CONTEXTS_MAX` contexts."""
        assert 0 < len(contexts) <= CONTEXTS_MAX, "the caller cuts batches"
        self.op, self.contexts = op, contexts
        self.results = np.full(len(contexts), -errno.EINPROGRESS, dtype=np.int64)

    def failed(self) -> Ints:
        """Indices of the contexts that did not move all their bytes."""
        return np.flatnonzero(self.results != self.contexts.lengths)

    def why(self, index: int) -> str:
        """The failure of one context, in words."""
        result = int(self.results[index])
        if result < 0:
            return errno.errorcode.get(-result, str(-result))
        return f"{result} of {int(self.contexts.lengths[index])} bytes"
