"""Never wrong bytes: whole chunks read and verified, what is corrupt healed from another copy, and a scrubber."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from itertools import chain

import numpy as np
import numpy.typing as npt

from quire.telemetry import counter, logger, names
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk, Copy
from quire_storage.core.striped import Striped
from quire_storage.errors import DriveFailed
from quire_storage.ports import Clock
from quire_storage.ring import Ring
from quire_storage.tiers import Pinned, Tiers

Bytes = npt.NDArray[np.uint8]
Copies = Callable[[Chunk], AsyncIterator[Bytes]]
_IDLE_S = 1.0
_AT_ONCE = 4


class Integrity:
    """`copies` offers a chunk's (L, S) bytes as others have them, nearest first; none of it is believed unseen."""

    def __init__(self, *, tiers: Tiers, ring: Ring | None, threads: Executor, clock: Clock, copies: Copies) -> None:
        self._tiers = tiers
        self._ring = ring
        self._threads = threads
        self._clock = clock
        self._copies = copies
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._scratches: list[Bytes] = []
        self._healing: dict[int, asyncio.Task[Bytes | None]] = {}
        self.corrupt = 0
        self.healed = 0
        self.scrubbed = 0
        self._failures = counter(names.CHECKSUM_FAILURES, "1", "chunks that did not match their checksums")
        self._repairs = counter(names.REPAIRS, "1", "chunks put right from another copy")

    async def sound(self, key: bytes) -> tuple[Chunk, Bytes] | None:
        """A chunk that is here with its (L, S) bytes, verified, healed if need be; None if it is not here."""
        async with self._tiers.pinned([key]) as copies:
            for copy in copies:
                payload = await self._read(copy, from_disk=copy.memory is None)
                if payload is None:
                    payload = await self.heal(copy)
                if payload is None:
                    self.give_up([copy])
                    return None
                return copy.chunk, payload
        return None

    async def heal(self, copy: Copy) -> Bytes | None:
        """Put a pinned copy right whose bytes do not match, from any other that does; its bytes, None for no hope."""
        task = self._healing.get(copy.number)
        if task is None:
            pinned = self._tiers.pin_also(copy)  # its own: the caller may be gone before it is done
            task = self._healing[copy.number] = asyncio.create_task(self._heal(copy, pinned))
            task.add_done_callback(lambda _: self._healing.pop(copy.number, None))
        return await asyncio.shield(task)

    def give_up(self, copies: list[Copy]) -> None:
        """Copies without a sound byte anywhere: misses from now on."""
        logger().error("chunks are lost to corruption", chunks=[copy.chunk.key.hex() for copy in copies])
        self._tiers.lose(copies)

    async def scrub(self, bytes_per_s: int) -> None:
        """Read everything on the drives again and again, at a pace, and heal what has rotted. Runs until cancelled."""
        while True:
            pages = self._tiers.pool.map.scan() if self._tiers.pool is not None else iter(())
            for key in chain.from_iterable(pages):
                size = await self._scrub_one(key)
                self.scrubbed += 1
                await self._clock.sleep(size / bytes_per_s)
            await self._clock.sleep(_IDLE_S)

    # ----

    async def _scrub_one(self, key: bytes) -> int:
        """Bytes that were read."""
        size = 0
        try:
            async with self._tiers.pinned([key]) as copies:
                for copy in copies:
                    size = copy.chunk.bytes
                    sound = copy.disk is None or await self._read(copy, from_disk=True) is not None
                    if not sound and await self.heal(copy) is None:
                        self.give_up([copy])
        except Exception as error:  # one chunk must not end the scrubber
            logger().warning("a chunk could not be scrubbed", key=key.hex(), error=str(error))
        return size

    async def _heal(self, copy: Copy, pinned: Pinned) -> Bytes | None:
        self.corrupt += 1
        self._failures.add(1)
        drive = copy.disk.drive if copy.disk is not None else None
        logger().error(
            "a chunk does not match its checksums",
            key=copy.chunk.key.hex(),
            in_memory=copy.memory is not None,
            drive=drive,
        )
        try:
            for from_disk in (False, True):
                payload = await self._read(copy, from_disk=from_disk)
                if payload is not None:
                    return await self._put_right(copy, payload)
            async for payload in self._copies(copy.chunk):
                if await self._matches(copy.chunk, payload):
                    return await self._put_right(copy, payload)
            return None
        finally:
            self._tiers.unpin(pinned)

    async def _put_right(self, copy: Copy, payload: Bytes) -> Bytes:
        """Write what does not match where the copy lies. Both places are its own for as long as it is pinned.

        A drive that does not take it is used no more; who reads gets the bytes all the same.
        """
        arena, chunk = self._tiers.arena, copy.chunk
        if copy.memory is not None:
            slices = arena.slices(copy.memory.offset, copy.memory.layer_stride, chunk.shape)
            for at, row in zip(slices.tolist(), payload, strict=True):
                here = arena.view[at : at + chunk.slice_bytes]
                if not np.array_equal(here, row):
                    here[:] = row
        if copy.disk is not None:
            try:
                await self._put_right_on_drive(copy, payload)
            except DriveFailed as error:
                assert self._tiers.pool is not None, "what lies on a drive is in the pool"
                self._tiers.pool.lose(error)
                return payload
        self.healed += 1
        self._repairs.add(1)
        logger().warning("a chunk was healed from another copy", key=chunk.key.hex())
        return payload

    async def _put_right_on_drive(self, copy: Copy, payload: Bytes) -> None:
        """Raises `DriveFailed`."""
        if self._ring is None or copy.disk is None:
            return
        async with self._scratch() as scratch:
            for first, stop, source in self._groups(copy):
                rows = _rows(scratch, stop - first, copy.chunk)
                rows[:] = payload[first:stop]
                await self._ring.write(source.layers(first, stop).moved(int(scratch.ctypes.data)))
            await self._ring.sync([copy.disk.drive])

    async def _read(self, copy: Copy, *, from_disk: bool) -> Bytes | None:
        """The chunk's bytes from one of its places; None if it has no such place, or what lies there is not sound."""
        chunk, arena = copy.chunk, self._tiers.arena
        payload = np.empty((chunk.num_layers, chunk.slice_bytes), dtype=np.uint8)
        if not from_disk:
            if copy.memory is None:
                return None
            slices = arena.slices(copy.memory.offset, copy.memory.layer_stride, chunk.shape)
            for layer, at in enumerate(slices.tolist()):
                payload[layer] = arena.view[at : at + chunk.slice_bytes]
        else:
            if copy.disk is None or self._ring is None:
                return None
            async with self._scratch() as scratch:
                for first, stop, source in self._groups(copy):
                    await self._ring.read(source.layers(first, stop).moved(int(scratch.ctypes.data)))
                    payload[first:stop] = _rows(scratch, stop - first, chunk)
        return payload if await self._matches(chunk, payload) else None

    @contextlib.asynccontextmanager
    async def _scratch(self) -> AsyncIterator[Bytes]:
        """Memory to read into, of its own: a delivery that waits for a chunk to be healed holds staging blocks."""
        async with self._turns:
            if not self._scratches:
                size = self._tiers.arena.block_bytes
                self._scratches.append(np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8))
            scratch = self._scratches.pop()
            try:
                yield scratch
            finally:
                self._scratches.append(scratch)

    def _groups(self, copy: Copy) -> Iterator[tuple[int, int, Striped]]:
        """Layers [first, stop) that fit a block together, with a source whose addresses count from its start."""
        assert self._tiers.pool is not None, "what is on a drive is in the pool"
        chunk, room = copy.chunk, copy.chunk.shape.slice_room
        most = max(1, self._tiers.arena.block_bytes // room)
        for first in range(0, chunk.num_layers, most):
            addresses, strides = np.array([-first * room]), np.array([room])
            yield first, min(chunk.num_layers, first + most), self._tiers.pool.striped([copy], addresses, strides)

    async def _matches(self, chunk: Chunk, payload: Bytes) -> bool:
        if payload.shape != (chunk.num_layers, chunk.slice_bytes):
            return False
        sums = await asyncio.get_running_loop().run_in_executor(self._threads, row_checksums, payload)
        return bool(np.array_equal(sums, chunk.checksums))


def _rows(scratch: Bytes, count: int, chunk: Chunk) -> Bytes:
    """(count, S): where that many slices of a chunk lie in scratch memory."""
    room = chunk.shape.slice_room
    return scratch[: count * room].reshape(count, room)[:, : chunk.slice_bytes]
