"""The slices of many chunks, on the drives and in memory: found once, then a layer's contexts are two additions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.model.iocb import Contexts
from quire_storage.core.chunks import DiskPlace

Ints = npt.NDArray[np.int64]


class Striped:
    """`room`: bytes that a slice takes up, on the drives and in memory. `data_offsets`: where each drive's slabs start.

    Slices that are neighbours on a drive and in memory become one context.
    """

    def __init__(
        self,
        places: Sequence[DiskPlace],
        data_offsets: Sequence[int],
        room: int,
        addresses: Ints,
        memory_strides: Ints,
    ) -> None:
        files = np.array([place.drive for place in places], dtype=np.int64)
        offsets = np.array([place.offset for place in places], dtype=np.int64) + np.array(data_offsets)[files]
        strides = np.array([place.layer_stride for place in places], dtype=np.int64)
        is_contiguous = (np.diff(files) == 0) & (np.diff(offsets) == room) & (np.diff(addresses) == room)
        is_contiguous &= (np.diff(strides) == 0) & (np.diff(memory_strides) == 0)
        starts = np.flatnonzero(np.append(True, ~is_contiguous))
        self._files, self._offsets, self._strides = files[starts], offsets[starts], strides[starts]
        self._addresses, self._memory_strides = addresses[starts], memory_strides[starts]
        self._lengths = np.diff(np.append(starts, len(files))) * room

    def layer(self, layer: int) -> Contexts:
        return Contexts(
            self._files,
            self._offsets + layer * self._strides,
            self._lengths,
            self._addresses + layer * self._memory_strides,
        )

    def layers(self, first: int, stop: int) -> Contexts:
        """Layer after layer."""
        return Contexts.join([self.layer(layer) for layer in range(first, stop)])
