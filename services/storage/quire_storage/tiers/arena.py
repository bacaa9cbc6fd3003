"""Memory of a node: slots that hold chunks, and staging blocks that layers pass through on their way from a drive.

Both are in one range that is registered once, with the network and with the ring.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import defaultdict, deque

import numpy as np
import numpy.typing as npt

from quire.model.errors import ConfigInvalid, LayoutInvalid
from quire.transport.pages import anonymous_memory
from quire_storage.core.pool.slots import Shape, SlotAllocator

Bytes = npt.NDArray[np.uint8]
_HUGE_PAGE_BYTES = 2 << 20
_MAP_HUGETLB = 0x40000


class Arena:
    """`slots` hands out the first `slot_bytes`; behind them lie the blocks."""

    def __init__(self, slot_bytes: int, slab_bytes: int, staging_bytes: int, block_bytes: int) -> None:
        self.slots = SlotAllocator(slot_bytes, slab_bytes)
        self.block_bytes = block_bytes
        self._slot_bytes = self.slots.capacity_bytes
        count = max(2, staging_bytes // block_bytes)
        self.staging_bytes = count * block_bytes
        self._size = self._slot_bytes + self.staging_bytes
        self._free = [self._slot_bytes + index * block_bytes for index in range(count)]
        self._taken: defaultdict[bytes, int] = defaultdict(int)
        self._blocks = count
        self._waiters: deque[tuple[bytes, asyncio.Future[int]]] = deque()

    def map(self, *, reserved: bool = False) -> None:
        """Get the memory; `reserved`: of the huge pages that were set apart. Raises `ConfigInvalid` if they are not."""
        if reserved:
            size = -(-self._size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            try:
                self._memory = mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_HUGETLB)
            except OSError as error:
                raise ConfigInvalid(
                    f"QUIRE_STORAGE_HUGE_PAGES: {size >> 20} MiB are not set apart ({error.strerror}): vm.nr_hugepages"
                ) from None
        else:
            self._memory = anonymous_memory(self._size)
        self.view: Bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.address = int(self.view.ctypes.data)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def check(self, shape: Shape) -> None:
        """Check a shape. Raises `LayoutInvalid` for chunks that this node cannot hold."""
        self.slots.slots_per_slab(shape)
        if shape.slice_room > self.block_bytes:
            raise LayoutInvalid(
                f"a slice of {shape.slice_bytes} bytes exceeds the node's staging blocks of {self.block_bytes}",
                field="layout",
            )

    def slices(self, offset: int, stride: int, shape: Shape) -> npt.NDArray[np.int64]:
        """Offsets of a slot's slices, layer 0 first."""
        return offset + np.arange(shape.num_layers, dtype=np.int64) * stride

    async def take_block(self, owner: bytes) -> int:
        """Offset of a block, for a client (its data plane's address). Give it back with `free_block`.

        The more clients want blocks, the fewer one may have, so that those that are slow leave some to the rest. Of
        those that wait the one is served that has fewest, and of these the first.
        """
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append((owner, turn))
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free_block(turn.result(), owner)
            raise

    def free_block(self, offset: int, owner: bytes) -> None:
        """Give a block back: of those that wait, one that has the fewest gets it."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        self._free.append(offset)
        self._serve()

    def _serve(self) -> None:
        self._waiters = deque((owner, turn) for owner, turn in self._waiters if not turn.done())
        while self._free and self._waiters:
            owner, turn = min(self._waiters, key=lambda waiter: self._taken.get(waiter[0], 0))
            clients = len(self._taken.keys() | {client for client, _ in self._waiters})
            if self._taken.get(owner, 0) >= max(1, self._blocks // (2 * clients + 2)):
                return
            self._waiters.remove((owner, turn))
            self._taken[owner] += 1
            turn.set_result(self._free.pop())
