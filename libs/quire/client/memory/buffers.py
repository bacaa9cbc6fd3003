"""Memory that storage nodes write to and read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import Descriptor, RdmaTarget
from quire.model.errors import InvalidRequest, TargetInvalid
from quire.transport import Region, Transport


class Loans(set["Loan"]):
    """The open loans of a region. `then`: called once the last one ends."""

    then: Callable[[], None] | None = None

    def end(self, loan: Loan) -> None:
        """End a loan."""
        self.discard(loan)
        if not self and self.then is not None:
            then, self.then = self.then, None
            then()


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """Memory of a region that a transfer has. `offsets`: of its slices within a layer, (N,), counted from the region.

    `end` gives it back; twice is as good as once.
    """

    to: str
    offsets: npt.NDArray[np.int64]
    slice_bytes: int
    stride: int
    num_layers: int
    _all: Loans

    def end(self) -> None:
        """End the loan."""
        self._all.end(self)

    @property
    def is_open(self) -> bool:
        """Whether the loan has not ended."""
        return self in self._all

    @property
    def start(self) -> int:
        """First byte."""
        return int(self.offsets[0])

    @property
    def stop(self) -> int:
        """Byte behind the last one."""
        return int(self.offsets[-1]) + (self.num_layers - 1) * self.stride + self.slice_bytes

    def meets(self, loan: Loan) -> bool:
        """Whether a slice of one overlaps a slice of the other. Of two with different strides only extents are seen."""
        if self.stop <= loan.start or loan.stop <= self.start:
            return False
        flat = self.num_layers == loan.num_layers == 1
        if not flat and (self.stride != loan.stride or self.stride == 0):
            return True
        # Slices of one stride repeat alike in every layer: they meet in a layer or not at all, if layers do not.
        if not flat and (
            max(self.offsets[-1] + self.slice_bytes, loan.offsets[-1] + loan.slice_bytes) - min(self.start, loan.start)
            > self.stride
        ):
            return True
        at = np.searchsorted(loan.offsets, self.offsets)
        next_offset = loan.offsets[np.minimum(at, len(loan.offsets) - 1)]
        previous_offset = loan.offsets[np.maximum(at - 1, 0)]
        return bool(
            np.any((next_offset >= self.offsets) & (next_offset < self.offsets + self.slice_bytes))
            or np.any((previous_offset <= self.offsets) & (previous_offset + loan.slice_bytes > self.offsets))
        )


class Buffer:
    """Registered memory of this process. `view`: its bytes (None for device memory).

    Several transfers may use it at a time, at places that do not overlap. After a fetch the memory is the caller's
    again only once every storage node has quiesced; before that another transfer there, and `close()`, are refused.
    """

    def __init__(self, transport: Transport, memory: Any, view: npt.NDArray[np.uint8] | None) -> None:
        self._transport = transport
        self._memory = memory
        self._region: Region = transport.register(memory)
        self._loans = Loans()
        self._offset, self._length = 0, self._region.length
        self.view = view

    @classmethod
    def allocate(cls, transport: Transport, length: int) -> Buffer:
        """`length` bytes of zeroed host memory, which storage nodes of this host can map."""
        if length <= 0:
            raise InvalidRequest(f"{length} bytes", field="length")
        array = transport.allocate(length)
        return cls(transport, array, array)

    @classmethod
    def register(cls, transport: Transport, memory: Any) -> Buffer:
        """An array or tensor of the caller's, in place. Raises `InvalidRequest` for anything else, and for no bytes."""
        if not hasattr(memory, "reshape") or not memory.nbytes:
            kind = type(memory).__name__
            raise InvalidRequest(f"{kind}; an array or tensor of a byte or more is wanted", field="memory")
        on_host = not getattr(memory, "is_cuda", False)
        array = memory.numpy() if hasattr(memory, "numpy") and on_host else memory
        return cls(transport, memory, array.reshape(-1).view("uint8") if on_host else None)

    def part(self, offset: int, length: int) -> Buffer:
        """`length` bytes of it from `offset` on, as a buffer of the same registration. Raises `TargetInvalid`."""
        if offset < 0 or length <= 0 or offset + length > self._length:
            raise TargetInvalid(f"[{offset}, {offset + length}) is outside of {self._length} bytes", field="buffer")
        buffer = object.__new__(Buffer)
        buffer._transport, buffer._memory, buffer._region = self._transport, self._memory, self._region
        buffer._loans, buffer._offset, buffer._length = self._loans, self._offset + offset, length
        buffer.view = self.view[offset : offset + length] if self.view is not None else None
        return buffer

    @property
    def region(self) -> Region:
        """The registered memory, for transfers of one's own."""
        return self._region

    @property
    def length(self) -> int:
        """Length in bytes."""
        return self._length

    @property
    def is_busy(self) -> bool:
        """Whether a transfer has memory of it."""
        end = self._offset + self._length
        return any(loan.start < end and self._offset < loan.stop for loan in self._loans)

    def target(self) -> RdmaTarget:
        """Descriptor that a storage node needs to write to it."""
        region, transport = self._region, self._transport
        start = region.address + self._offset
        return RdmaTarget(transport.address, start, self._length, region.remote_key, transport.proof)

    def lend(self, to: str, descriptor: Descriptor) -> Loan:
        """Reserve the bytes that a delivery writes. Raises `TargetInvalid` if another transfer has some of them."""
        offsets, slice_bytes = np.sort(descriptor.offsets()), descriptor.slice_bytes
        if not descriptor.chunk_offsets:  # one range
            offsets, slice_bytes = offsets[:1], descriptor.layer_bytes
        return self._lend(to, offsets, slice_bytes, descriptor.stride, descriptor.num_layers)

    def lend_range(self, to: str, length: int) -> Loan:
        """Reserve its first `length` bytes. Raises `TargetInvalid` when too small or lent already."""
        if self._length < length:
            raise TargetInvalid(f"{self._length} bytes, but {length} are needed", field="buffer")
        return self._lend(to, np.zeros(1, dtype=np.int64), length, 0, 1)

    def layers(self, num_layers: int, chunks: int, slice_bytes: int) -> npt.NDArray[np.uint8]:
        """The host bytes as (num_layers, chunks, slice_bytes): how fetches and stores lay them out."""
        assert self.view is not None, "device memory has no host view"
        used = self.view[: num_layers * chunks * slice_bytes]
        return used.reshape(num_layers, chunks, slice_bytes)

    def close(self) -> None:
        """Unregister it, with all parts. Refused while a storage node may still write."""
        if self._loans:
            raise TargetInvalid(f"still in use by {next(iter(self._loans)).to}", field="buffer")
        self._region.close()

    def let_go(self) -> None:
        """Close it now, or as soon as the last transfer with memory of it has ended."""
        if self._loans:
            self._loans.then = self._region.close
        else:
            self._region.close()

    def _lend(self, to: str, offsets: npt.NDArray[np.int64], slice_bytes: int, stride: int, num_layers: int) -> Loan:
        loan = Loan(to, offsets + self._offset, slice_bytes, stride, num_layers, self._loans)
        for running in self._loans:
            if loan.meets(running):
                raise TargetInvalid(f"still in use by {running.to}", field="buffer")
        self._loans.add(loan)
        return loan
