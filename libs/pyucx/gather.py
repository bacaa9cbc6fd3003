"""The scatter-gather list of a put: built once for a payload, used by every put that carries a part of it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyucx._library import ffi
from pyucx.context import Memory
from pyucx.errors import TargetOutOfRange

_WORDS: Final = ffi.sizeof("ucp_dt_iov_t") // 8


class GatherTable:
    """`length` bytes at each of `offsets` of `source`, as UCX wants them. Raises `TargetOutOfRange`."""

    def __init__(self, source: Memory, offsets: npt.NDArray[np.int64], length: int) -> None:
        count = len(offsets)
        if count == 0 or offsets.min() < 0 or int(offsets.max()) + length > source.length:
            raise TargetOutOfRange(
                f"{count} slices of {length} bytes do not lie in the {source.length} registered here"
            )
        self.length = length
        self._entries = ffi.new("ucp_dt_iov_t[]", count)
        table = np.frombuffer(ffi.buffer(self._entries), dtype=np.uint64).reshape(count, _WORDS)
        np.add(offsets, source.address, out=table[:, 0], casting="unsafe")
        table[:, 1] = length

    def at(self, start: int) -> Any:
        """Pointer to entry `start`."""
        return self._entries + start
