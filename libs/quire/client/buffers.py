"""Memory that storage nodes write to and read from."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import RdmaTarget
from quire.model.errors import InvalidRequest, TargetInvalid
from quire.transport import Region, Transport


class Buffer:
    """Registered memory of this process. `view`: its bytes (None for device memory).

    One transfer at a time. After a fetch the memory is the caller's again only once every storage node has quiesced;
    until then another transfer with it, and `close()`, are refused.
    """

    def __init__(self, transport: Transport, memory: Any, view: npt.NDArray[np.uint8] | None) -> None:
        self._transport = transport
        self._memory = memory
        self._region: Region = transport.register(memory)
        self._busy = ""
        self.view = view

    @classmethod
    def allocate(cls, transport: Transport, length: int) -> Buffer:
        """`length` bytes of zeroed host memory, on huge pages where there are some."""
        if length <= 0:
            raise InvalidRequest(f"{length} bytes", field="length")
        memory = mmap.mmap(-1, length)
        memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, dtype=np.uint8)
        return cls(transport, array, array)

    @property
    def region(self) -> Region:
        """The registered memory, for transfers of one's own."""
        return self._region

    @property
    def length(self) -> int:
        return self._region.length

    @property
    def is_busy(self) -> bool:
        return bool(self._busy)

    def target(self) -> RdmaTarget:
        """What a storage node needs to know of it."""
        region = self._region
        return RdmaTarget(self._transport.address, region.address, region.length, region.remote_key)

    def lend(self, to: str, needed: int) -> None:
        """Reserve for a transfer. Raises `TargetInvalid` when too small or lent already."""
        if self.length < needed:
            raise TargetInvalid(f"{self.length} bytes, but {needed} are needed", field="buffer")
        if self._busy:
            raise TargetInvalid(f"still in use by {self._busy}", field="buffer")
        self._busy = to

    def take_back(self) -> None:
        self._busy = ""

    def layers(self, num_layers: int, chunks: int, slice_bytes: int) -> npt.NDArray[np.uint8]:
        """The host bytes as (num_layers, chunks, slice_bytes): how fetches and stores lay them out."""
        assert self.view is not None, "device memory has no host view"
        used = self.view[: num_layers * chunks * slice_bytes]
        return used.reshape(num_layers, chunks, slice_bytes)

    def close(self) -> None:
        """Unregister. Refused while a storage node may still write."""
        if self._busy:
            raise TargetInvalid(f"still in use by {self._busy}", field="buffer")
        self._region.close()
