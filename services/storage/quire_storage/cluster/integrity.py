"""Never wrong bytes: whole chunks read and verified, healed from another copy where they are not sound; a scrubber.

A place of a copy is sound, corrupt (its bytes were read and do not match) or unreadable (the drive failed the read).
A copy whose bytes are corrupt in all its places, with no sound copy elsewhere, is given up. One that is unreadable is
quarantined: it stays where it is, its header too, is a miss to readers, and is read again with back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from itertools import chain

import numpy as np
import numpy.typing as npt

from quire.telemetry import counter, logger, names
from quire.transport.pages import anonymous_memory
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk, Copy, DiskPlace
from quire_storage.core.pool.slots import Shape
from quire_storage.core.pool.striped import Striped
from quire_storage.errors import DriveFailed
from quire_storage.ports import Clock
from quire_storage.tiers.ring import Ring
from quire_storage.tiers.tiers import PinnedCopies, Tiers

Bytes = npt.NDArray[np.uint8]
Copies = Callable[[Chunk], AsyncIterator[Bytes]]
_IDLE_S = 1.0
_AT_ONCE = 4
_RETRY_S, _RETRY_S_MAX = 0.5, 60.0
_SCRUBBED_BYTES, _SCRUBBED_CHUNKS = 1 << 20, 64
"""About how much the scrubber reads at a time."""


class Unsound(Enum):
    """Why a place of a copy has no bytes to offer."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"


@dataclass(slots=True)
class _Quarantine:
    """An unreadable copy. `retry_at_s`: monotonic time of the next read."""

    place: DiskPlace | None
    retry_at_s: float
    pause_s: float


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
        self._quarantined: dict[bytes, _Quarantine] = {}
        self.corrupt = 0
        self.healed = 0
        self.scrubbed = 0
        self._failures = counter(names.CHECKSUM_FAILURES, "1", "chunks that did not match their checksums")
        self._repairs = counter(names.REPAIRS, "1", "chunks put right from another copy")

    @property
    def quarantined(self) -> int:
        """Copies that could not be read and wait for their next try."""
        return len(self._quarantined)

    async def sound(self, key: bytes) -> tuple[Chunk, Bytes] | None:
        """A chunk that is here with its (L, S) bytes, verified, healed if need be; None if there are none now."""
        with self._tiers.pinned([key]) as copies:
            for copy in copies:
                result = await self._read(copy, from_disk=copy.memory is None)
                payload = await self.heal(copy) if isinstance(result, Unsound) else result
                return (copy.chunk, payload) if payload is not None else None
        return None

    async def heal(self, copy: Copy) -> Bytes | None:
        """Put a pinned copy right that did not match, from any that does.

        Returns:
            Its (L, S) bytes. None where there are none now: the copy is given up if its bytes were found wrong, and
            quarantined if they could not be read.
        """
        task = self._healing.get(copy.number)
        if task is None:
            quarantine = self._quarantined.get(copy.chunk.key)
            early = quarantine is not None and self._clock.monotonic_s() < quarantine.retry_at_s
            if quarantine is not None and quarantine.place == copy.disk and early:
                return None
            pinned = self._tiers.pin_also(copy)  # its own: the caller may be gone before it is done
            task = self._healing[copy.number] = asyncio.create_task(self._heal(copy, pinned))
            task.add_done_callback(lambda _: self._healing.pop(copy.number, None))
        return await asyncio.shield(task)

    async def retry(self) -> None:
        """Read quarantined copies again when their time has come. Runs until cancelled."""
        while True:
            await self._clock.sleep(_RETRY_S)
            now_s = self._clock.monotonic_s()
            for key in [key for key, quarantine in self._quarantined.items() if quarantine.retry_at_s <= now_s]:
                if key not in self._tiers.residency:
                    self._quarantined.pop(key, None)  # dropped meanwhile, or its drive was retired
                    continue
                await self._scrub_one(key)

    async def scrub(self, bytes_per_s: int) -> None:
        """Read everything on the drives again and again, at a pace, and heal rotten copies. Runs until cancelled."""
        while True:
            for keys in self._batches():
                size = await self._scrub_together(keys)
                self.scrubbed += len(keys)
                await self._clock.sleep(size / bytes_per_s)
            await self._clock.sleep(_IDLE_S)

    # ----

    def _batches(self) -> Iterator[list[bytes]]:
        """Yield the keys of all chunks on the drives: of a large chunk, or of several small ones."""
        if self._tiers.pool is None:
            return
        batch, size, chunks = list[bytes](), 0, self._tiers.pool.map
        for key in chain.from_iterable(chunks.scan()):
            shape = chunks.shape_of(key)
            batch.append(key)
            size += shape.bytes if shape is not None else 0
            if size >= _SCRUBBED_BYTES or len(batch) == _SCRUBBED_CHUNKS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    async def _scrub_together(self, keys: Sequence[bytes]) -> int:
        """Read chunks from the drives together, and those that are not sound one by one. Returns the bytes read."""
        sizes, suspects = dict[bytes, int](), keys
        try:
            with self._tiers.pinned(keys) as copies:
                groups: dict[Shape, list[Copy]] = {}
                for copy in copies:
                    sizes[copy.chunk.key] = copy.chunk.slot_bytes
                    groups.setdefault(copy.chunk.shape, []).append(copy)
                sound = set[bytes]().union(*[await self._sound_on_drives(group) for group in groups.values()])
            on_drives = [copy.chunk.key for copy in copies if copy.disk is not None]
            suspects = [key for key in on_drives if key not in sound] + [
                key for key in keys if self.is_quarantined(key)
            ]
        except Exception as error:
            logger().warning("chunks are scrubbed one by one", chunks=len(keys), error=str(error))
        for key in dict.fromkeys(suspects):
            await self._scrub_one(key)
        return sum(sizes.values()) + sum(sizes.get(key, 0) for key in suspects)

    async def _sound_on_drives(self, copies: Sequence[Copy]) -> set[bytes]:
        """Return the keys of copies of one shape whose bytes on the drives could be read together, and match."""
        copies, pool = [copy for copy in copies if copy.disk is not None], self._tiers.pool
        if not copies or pool is None or self._ring is None:
            return set()
        layers, room, sound = copies[0].chunk.num_layers, copies[0].chunk.shape.slice_room, set[bytes]()
        limit = self._tiers.arena.block_bytes // (layers * room)
        for first in range(0, len(copies), limit) if limit else ():
            part = copies[first : first + limit]
            count = len(part)
            async with self._scratch() as scratch:
                addresses, strides = np.arange(count) * room, np.full(count, count * room)
                contexts = pool.striped(part, addresses, strides).layers(0, layers)
                if await self._ring.read(contexts.moved(int(scratch.ctypes.data))) is not None:
                    continue
                rows = _rows(scratch, layers * count, part[0].chunk)
                sums = await asyncio.get_running_loop().run_in_executor(self._threads, row_checksums, rows)
            expected = np.stack([copy.chunk.checksums for copy in part], axis=1)
            matching = (sums.reshape(layers, count) == expected).all(axis=0)
            sound.update(part[at].chunk.key for at in np.flatnonzero(matching).tolist())
        return sound

    async def _scrub_one(self, key: bytes) -> None:
        try:
            with self._tiers.pinned([key]) as copies:
                for copy in copies:
                    if copy.disk is not None and isinstance(await self._read(copy, from_disk=True), Unsound):
                        await self.heal(copy)
                    elif key in self._quarantined:
                        await self._tiers.show(key)
                        self._quarantined.pop(key, None)
        except Exception as error:  # one chunk must not end the scrubber
            logger().warning("a chunk could not be scrubbed", key=key.hex(), error=str(error))

    async def _heal(self, copy: Copy, pinned: PinnedCopies) -> Bytes | None:
        key = copy.chunk.key
        try:
            places = {from_disk: await self._read(copy, from_disk=from_disk) for from_disk in (False, True)}
            wrong = {from_disk for from_disk, result in places.items() if result is Unsound.CORRUPT}
            unreadable = places[True] is Unsound.UNREADABLE
            if wrong:
                self.corrupt += 1
                self._failures.add(1)
                drive = copy.disk.drive if copy.disk is not None else None
                logger().error(
                    "a chunk does not match its checksums", key=key.hex(), in_memory=False in wrong, drive=drive
                )
            payload = next((result for result in places.values() if not isinstance(result, Unsound)), None)
            if payload is None:
                payload = await self.from_others(copy.chunk)
            if payload is not None:
                if key in self._quarantined:  # `retry` tells the index
                    self._quarantined[key].retry_at_s = 0.0
                if wrong or unreadable:
                    await self._put_right(copy, payload)
            elif unreadable:
                self._quarantine(copy)
            else:
                self._give_up(copy)
            return payload
        finally:
            self._tiers.unpin(pinned)

    async def from_others(self, chunk: Chunk) -> Bytes | None:
        """Return a chunk's (L, S) bytes, verified, from another node or the object tier; None if there are none."""
        async for payload in self._copies(chunk):
            if await self._matches(chunk, payload):
                return payload
        return None

    def _give_up(self, copy: Copy) -> None:
        """Drop a copy whose bytes were read and are wrong, without sound ones anywhere: a miss from now on."""
        logger().error("a chunk is lost to corruption", key=copy.chunk.key.hex())
        self._quarantined.pop(copy.chunk.key, None)
        self._tiers.lose([copy])

    def is_quarantined(self, key: bytes) -> bool:
        """Whether the copy of a key could not be read, and was not since."""
        return key in self._quarantined

    def _quarantine(self, copy: Copy) -> None:
        """Keep it and its header, and try again later, each time after a longer pause. Look-ups do not promise it."""
        previous = self._quarantined.get(copy.chunk.key)
        if previous is None:
            self._tiers.hide(copy)
        pause_s = min(2 * previous.pause_s, _RETRY_S_MAX) if previous is not None else _RETRY_S
        self._quarantined[copy.chunk.key] = _Quarantine(copy.disk, self._clock.monotonic_s() + pause_s, pause_s)
        drive = copy.disk.drive if copy.disk is not None else None
        logger().warning("a chunk cannot be read", key=copy.chunk.key.hex(), drive=drive, retry_after_s=pause_s)

    async def _put_right(self, copy: Copy, payload: Bytes) -> None:
        """Rewrite the wrong slices at the places of the copy.

        Both places belong to the copy while it is pinned.

        A drive that fails the write is retired; the reader gets the bytes all the same.
        """
        arena, chunk = self._tiers.arena, copy.chunk
        if copy.memory is not None:
            slices = arena.slices(copy.memory.offset, copy.memory.layer_stride, chunk.shape)
            for at, row in zip(slices.tolist(), payload, strict=True):
                target = arena.view[at : at + chunk.slice_bytes]
                if not np.array_equal(target, row):
                    target[:] = row
        if copy.disk is not None:
            try:
                await self._put_right_on_drive(copy, payload)
            except DriveFailed as error:
                assert self._tiers.pool is not None, "what lies on a drive is in the pool"
                self._tiers.pool.lose(error)
                return
        self.healed += 1
        self._repairs.add(1)
        logger().warning("a chunk was healed from another copy", key=chunk.key.hex())

    async def _put_right_on_drive(self, copy: Copy, payload: Bytes) -> None:
        """Write to the drive. Raises `DriveFailed`."""
        if self._ring is None or copy.disk is None:
            return
        async with self._scratch() as scratch:
            for first, stop, source in self._groups(copy):
                rows = _rows(scratch, stop - first, copy.chunk)
                rows[:] = payload[first:stop]
                await self._ring.write(source.layers(first, stop).moved(int(scratch.ctypes.data)))
            await self._ring.sync([copy.disk.drive])

    async def _read(self, copy: Copy, *, from_disk: bool) -> Bytes | Unsound:
        """The chunk's bytes from one of its places, or why there are none."""
        chunk, arena = copy.chunk, self._tiers.arena
        payload = np.empty((chunk.num_layers, chunk.slice_bytes), dtype=np.uint8)
        if not from_disk:
            if copy.memory is None:
                return Unsound.ABSENT
            slices = arena.slices(copy.memory.offset, copy.memory.layer_stride, chunk.shape)
            for layer, at in enumerate(slices.tolist()):
                payload[layer] = arena.view[at : at + chunk.slice_bytes]
        else:
            if copy.disk is None or self._ring is None:
                return Unsound.ABSENT
            async with self._scratch() as scratch:
                for first, stop, source in self._groups(copy):
                    if await self._ring.read(source.layers(first, stop).moved(int(scratch.ctypes.data))) is not None:
                        return Unsound.UNREADABLE
                    payload[first:stop] = _rows(scratch, stop - first, chunk)
        return payload if await self._matches(chunk, payload) else Unsound.CORRUPT

    @contextlib.asynccontextmanager
    async def _scratch(self) -> AsyncIterator[Bytes]:
        """Memory to read into, of its own: a delivery that waits for a chunk to be healed holds staging blocks."""
        async with self._turns:
            if not self._scratches:
                size = self._tiers.arena.block_bytes
                self._scratches.append(np.frombuffer(anonymous_memory(size), dtype=np.uint8))
            scratch = self._scratches.pop()
            try:
                yield scratch
            finally:
                self._scratches.append(scratch)

    def _groups(self, copy: Copy) -> Iterator[tuple[int, int, Striped]]:
        """Layers [first, stop) that fit a block together, with a source whose addresses count from its start."""
        assert self._tiers.pool is not None, "what is on a drive is in the pool"
        chunk, room = copy.chunk, copy.chunk.shape.slice_room
        limit = max(1, self._tiers.arena.block_bytes // room)
        for first in range(0, chunk.num_layers, limit):
            addresses, strides = np.array([-first * room]), np.array([room])
            yield first, min(chunk.num_layers, first + limit), self._tiers.pool.striped([copy], addresses, strides)

    async def _matches(self, chunk: Chunk, payload: Bytes) -> bool:
        if payload.shape != (chunk.num_layers, chunk.slice_bytes):
            return False
        sums = await asyncio.get_running_loop().run_in_executor(self._threads, row_checksums, payload)
        return bool(np.array_equal(sums, chunk.checksums))


def _rows(scratch: Bytes, count: int, chunk: Chunk) -> Bytes:
    """Return the places of that many slices of a chunk in scratch memory, (count, S)."""
    room = chunk.shape.slice_room
    return scratch[: count * room].reshape(count, room)[:, : chunk.slice_bytes]
