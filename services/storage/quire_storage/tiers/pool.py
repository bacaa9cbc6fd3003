"""The pool: chunks on the drives, written in groups, found again after a crash. The format is `core.pool_format`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quire.model.errors import ConfigInvalid
from quire.model.iocb import Contexts
from quire.telemetry import logger
from quire_storage.core.chunks import Copy, DiskPlace, Placed
from quire_storage.core.pool.error_budget import ErrorBudget
from quire_storage.core.pool.format import (
    HEADERS_OFFSET,
    PAGE_BYTES,
    DriveGeometry,
    Superblock,
    joined,
    newest_slot,
    pack_superblock,
    read_superblock,
    upgrade,
)
from quire_storage.core.pool.map import Pages, PoolMap
from quire_storage.core.pool.slots import Shape
from quire_storage.core.pool.striped import Striped
from quire_storage.errors import DriveFailed, DriveUnusable
from quire_storage.ports import Drives
from quire_storage.tiers.ring import Ring

Bytes = npt.NDArray[np.uint8]
_PAGES_STEP = 1024
_RETRY_S = 0.05
_GENERATIONS_STEP = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """`drive_bytes`: size of the file on each drive; `stripe_bytes`: what of a layer lies together on one drive.

    `error_s_max`: a drive is retired that failed reads in more seconds of ten minutes, `write_error_s_max`: one that
    keeps failing a write for this time, in seconds.
    """

    node_id: str
    drive_bytes: int
    slab_bytes: int
    chunk_bytes_min: int
    stripe_bytes: int
    error_s_max: int = 30
    write_error_s_max: float = 3.0


@dataclass(slots=True)
class _Change:
    """Headers that are waited for: to be written (`commit`), or zeroed."""

    placed: Sequence[Placed]
    commit: bool
    done: asyncio.Future[None]


class Pool:
    """`open` → start a ring with the files → `recover`. For one event loop. `draw` makes the random bytes of salts."""

    _ring: Ring

    def __init__(
        self,
        settings: PoolSettings,
        names: Sequence[str],
        drives: Drives,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._settings = settings
        self._names = list(names)
        self._drives = drives
        self._draw = draw
        self._monotonic_s = monotonic_s
        self._budget = ErrorBudget(settings.error_s_max)
        self._files: list[int] = []
        self._superblocks: list[Superblock] = []
        self._newest: list[int] = []
        """Of each drive the superblock, 0 or 1, that must not be overwritten first."""
        self._outdated: set[int] = set()
        """Drives that have superblocks to be written before anything else."""
        self._failed: set[int] = set()
        self._changes: list[_Change] = []
        self._committer: asyncio.Task[None] | None = None
        self._on_lost: Callable[[int], None] = lambda drive: None

    def open(self) -> list[int]:
        """Open every drive's file, creating those that are not there. Returns file descriptors for the ring.

        Raises `ForeignPool` or `DriveUnusable`; existing files are left unchanged, but a file smaller than configured
        grows, and a larger one raises `ConfigInvalid`.
        """
        for name in self._names:
            file = self._drives.open(name)
            if file is None:
                file = self._create(name)
            self._files.append(file)
            head = self._drives.head(file, 2 * PAGE_BYTES)
            block = read_superblock(head, self._settings.node_id, name)
            if self._drives.size(file) < block.geometry.file_bytes:
                raise DriveUnusable(f"{name} was cut short: {block.geometry.file_bytes} bytes were expected")
            newest = newest_slot(head, name)
            grown = self._grown(name, file, block, 1 - newest)
            self._newest.append(newest if grown is block else 1 - newest)
            if grown.upgrading and not grown.salt:
                grown = replace(grown, salt=self._new_salt(), generation=grown.generation + 1)
            if pack_superblock(grown) * 2 != head:  # one is rotten or older, or the pool is of an older format
                self._outdated.add(len(self._superblocks))
            self._superblocks.append(grown)
        geometries = [block.geometry for block in self._superblocks]
        images = [_zeroes(geometry.header_pages * PAGE_BYTES) for geometry in geometries]
        salts = [block.salt for block in self._superblocks]
        self.map = PoolMap(geometries, images, self._settings.stripe_bytes, salts)
        return self._files

    async def recover(self, ring: Ring) -> int:
        """Read the header regions; how many chunks there are. A drive that cannot be read raises `DriveUnusable`."""
        self.use(ring)
        for drive, block in enumerate(self._superblocks):
            if drive in self._outdated:
                await self._write_superblock(drive, block)
            used = block.header_pages_used
            if used:
                problem = await self._ring.read(_region(drive, 0, used, self.map.image(drive)))
                if problem is not None:
                    raise DriveUnusable(f"{self._names[drive]}: its headers cannot be read: {problem}")
            if block.upgrading:
                await self._upgrade(drive)
            stale = self.map.recover(drive, used, block.place_generations)
            for number, pages in stale.items():
                logger().warning("headers without a slot", drive=self._names[number], headers=len(pages))
            if stale:
                await self._write_pages(stale)
                await self._ring.sync(list(stale))
        self._outdated.clear()
        return len(self.map)

    async def _upgrade(self, drive: int) -> None:
        """Bring headers of format 2 to format 3, in place.

        A crash leaves both kinds, and the superblock records that.
        """
        block, image = self._superblocks[drive], self.map.image(drive)
        upgraded = upgrade(image[: block.header_pages_used * PAGE_BYTES], block.salt)
        if upgraded:
            await self._write(_region(drive, 0, block.header_pages_used, image), at_once=True)
            await self._ring.sync([drive])
        await self._write_superblock(drive, replace(block, upgrading=False, generation=block.generation + 1))
        logger().info("pool upgraded", drive=self._names[drive], headers=upgraded)

    def use(self, ring: Ring) -> None:
        """Read and write through this ring from now on."""
        self._ring = ring
        ring.on_read_failed(self._read_failed)

    def _read_failed(self, problem: DriveFailed) -> None:
        over = [drive for drive in problem.drives if self._budget.failed(drive, self._monotonic_s())]
        if over:
            limit = self._settings.error_s_max
            self.lose(DriveFailed(f"reads failed in more than {limit} seconds of ten minutes", frozenset(over)))

    def on_lost(self, callback: Callable[[int], None]) -> None:
        """Called with a drive that has failed, once."""
        self._on_lost = callback

    async def close(self) -> None:
        if self._committer is not None:
            await self._committer
        await self._ring.close()
        self._drives.close()

    # ---- chunks

    async def write(
        self, placed: Sequence[Placed], addresses: npt.NDArray[np.int64], strides: npt.NDArray[np.int64]
    ) -> None:
        """Write chunks of one shape from memory, then their headers: they survive when this returns.

        Raises `DriveFailed`; then none of their headers will come back, except with a drive that has failed.
        """
        shape = placed[0].header.chunk.shape
        source = self._striped([chunk.place for chunk in placed], shape.slice_bytes, addresses, strides)
        try:
            await self._write(source.layers(0, shape.num_layers))
            await self._change(placed, commit=True)
        except DriveFailed as error:
            self.lose(error)
            with contextlib.suppress(DriveFailed):
                await self._change(placed, commit=False)
            raise

    async def rewrite(self, placed: Sequence[Placed]) -> None:
        """Write headers again. Raises `DriveFailed`."""
        await self._change(placed, commit=True)

    async def forget(self, placed: Sequence[Placed]) -> None:
        """When this returns the chunks will not come back. Raises `DriveFailed`: with its drive they may."""
        await self._change(placed, commit=False)

    def striped(
        self, copies: Sequence[Copy], addresses: npt.NDArray[np.int64], memory_strides: npt.NDArray[np.int64]
    ) -> Striped:
        """How chunks of one shape are read into, or written from, memory: slice l of each at address + l·stride."""
        places = [copy.disk for copy in copies if copy.disk is not None]
        assert len(places) == len(copies), "only what lies on a drive is read from one"
        return self._striped(places, copies[0].chunk.slice_bytes, addresses, memory_strides)

    def _striped(
        self,
        places: Sequence[DiskPlace],
        slice_bytes: int,
        addresses: npt.NDArray[np.int64],
        memory_strides: npt.NDArray[np.int64],
    ) -> Striped:
        offsets = [self.map.data_offset(drive) for drive in range(len(self._files))]
        return Striped(places, offsets, Shape(1, slice_bytes).slice_room, addresses, memory_strides)

    async def _write(self, contexts: Contexts, *, at_once: bool = False) -> None:
        """Write, and retry for `write_error_s_max` seconds. Raises `DriveFailed` if the drive keeps failing.

        A failed sync is not retried: the drive may have dropped earlier writes.
        """
        pause_s, until_s = _RETRY_S, math.inf
        while True:
            try:
                await self._ring.write(contexts, at_once=at_once)
                return
            except DriveFailed as error:
                now_s = self._monotonic_s()
                until_s = min(until_s, now_s + self._settings.write_error_s_max)
                if error.drives & self._failed or now_s + pause_s > until_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s *= 2

    # ---- group commit

    async def _change(self, placed: Sequence[Placed], *, commit: bool) -> None:
        if not placed:
            return
        change = _Change(placed, commit, asyncio.get_running_loop().create_future())
        self._changes.append(change)
        if self._committer is None or self._committer.done():
            self._committer = asyncio.create_task(self._commit_groups())
        await asyncio.shield(change.done)

    async def _commit_groups(self) -> None:
        """Commit in groups: changes that arrive during a sync are the next group; two syncs serve them all."""
        while self._changes:
            group, self._changes = self._changes, []
            error = await self._commit_while_drives_last(group)
            for change in group:
                is_lost = any(chunk.place.drive in self._failed for chunk in change.placed)
                if change.done.done():
                    continue
                if error is not None or is_lost:
                    change.done.set_exception(error or DriveFailed("its drive has failed", frozenset(self._failed)))
                    change.done.exception()  # the waiter has gone, perhaps
                else:
                    change.done.set_result(None)

    async def _commit_while_drives_last(self, group: Sequence[_Change]) -> Exception | None:
        """Commit on the drives that work; the error if even that is impossible.

        A drive that was given up during the attempt fails its own changes only: the other drives are written again.
        """
        while True:
            failed = set(self._failed)
            try:
                await self._commit_group(group)
            except DriveFailed as error:
                if error.drives <= failed:
                    return error
                self.lose(error)
            except Exception as error:
                logger().error("a group commit failed unexpectedly", exc_info=error)
                return error
            else:
                return None

    async def _commit_group(self, group: Sequence[_Change]) -> None:
        written = {placed.place.drive for change in group if change.commit for placed in change.placed} - self._failed
        if written:
            await self._ring.sync(sorted(written))
        pages: Pages = {}
        for change in group:
            placed = [placed for placed in change.placed if placed.place.drive not in self._failed]
            changed = self.map.commit(placed) if change.commit else self.map.forget(placed)
            for drive, changed_pages in changed.items():
                pages.setdefault(drive, []).extend(changed_pages)
        if not pages:
            return
        for drive in pages:
            await self._cover(drive)
        await self._write_pages(pages)
        await self._ring.sync(sorted(pages))

    async def _cover(self, drive: int) -> None:
        """Make the superblocks cover the header pages and the generations in use."""
        block, used = self._superblocks[drive], self.map.pages_used(drive)
        generations = self.map.place_generations
        if used <= block.header_pages_used and generations <= block.place_generations:
            return
        if used > block.header_pages_used:
            used = min(block.geometry.header_pages, -(-used // _PAGES_STEP) * _PAGES_STEP)
        if generations > block.place_generations:
            generations += _GENERATIONS_STEP
        fresh = replace(
            block,
            generation=block.generation + 1,
            header_pages_used=max(used, block.header_pages_used),
            place_generations=max(generations, block.place_generations),
        )
        await self._write_superblock(drive, fresh)

    async def _write_superblock(self, drive: int, block: Superblock) -> None:
        """Write both, one after the other: a sound one is there at any instant, and afterwards either may rot."""
        page = _zeroes(PAGE_BYTES)
        page[:] = np.frombuffer(pack_superblock(block), dtype=np.uint8)
        newest = self._newest[drive]
        for at in (1 - newest, newest):
            contexts = _contexts([drive], [at * PAGE_BYTES], [PAGE_BYTES], [int(page.ctypes.data)])
            await self._write(contexts, at_once=True)
            await self._ring.sync([drive])
        self._superblocks[drive] = block

    def _new_salt(self) -> int:
        return int.from_bytes(self._draw(8), "little") | 1

    async def _write_pages(self, pages: Pages) -> None:
        parts = [
            _region(drive, first, count, self.map.image(drive))
            for drive, drive_pages in pages.items()
            for first, count in joined(drive_pages)
        ]
        await self._write(Contexts.join(parts), at_once=True)

    def lose(self, error: DriveFailed) -> None:
        """Use the drives no more that `error` names, and tell of it."""
        for drive in sorted(error.drives - self._failed):
            self._failed.add(drive)
            logger().error("a drive is used no more", drive=self._names[drive], error=str(error))
            self._on_lost(drive)

    def _grown(self, name: str, file: int, block: Superblock, slot: int) -> Superblock:
        """Slabs are added at the end; there are no more headers than there were."""
        geometry = block.geometry
        slabs = (self._settings.drive_bytes - geometry.data_offset) // geometry.slab_bytes
        if slabs < geometry.slab_count:
            raise ConfigInvalid(
                f"QUIRE_STORAGE_DRIVE_BYTES={self._settings.drive_bytes}: the pool on {name} has {geometry.file_bytes} "
                "bytes and cannot be made smaller; set so many at least, or give the node an empty folder, into which "
                "its chunks come back from other nodes and the object tier"
            )
        if slabs == geometry.slab_count:
            return block
        grown = replace(block, geometry=replace(geometry, slab_count=slabs), generation=block.generation + 1)
        self._drives.grow(file, grown.geometry.file_bytes, pack_superblock(grown), PAGE_BYTES * slot)
        logger().info("a pool has grown", drive=name, before=geometry.file_bytes, now=grown.geometry.file_bytes)
        return grown

    def _create(self, name: str) -> int:
        settings = self._settings
        geometry = DriveGeometry.within(settings.drive_bytes, settings.slab_bytes, settings.chunk_bytes_min)
        if geometry.slab_count < 1:
            raise DriveUnusable(
                f"{name}: {settings.drive_bytes} bytes are too few for a slab of {settings.slab_bytes} and its headers"
            )
        block = pack_superblock(Superblock(settings.node_id, geometry, 1, 0, self._new_salt(), _GENERATIONS_STEP))
        return self._drives.create(name, geometry.file_bytes, block + block)


def _region(drive: int, first: int, count: int, image: Bytes) -> Contexts:
    """Header pages of a drive and their place in its image."""
    at = HEADERS_OFFSET + first * PAGE_BYTES
    return _contexts([drive], [at], [count * PAGE_BYTES], [int(image.ctypes.data) + first * PAGE_BYTES])


def _contexts(files: list[int], offsets: list[int], lengths: list[int], addresses: list[int]) -> Contexts:
    return Contexts(*(np.array(column, dtype=np.int64) for column in (files, offsets, lengths, addresses)))


def _zeroes(size: int) -> Bytes:
    """Page-aligned memory that costs nothing until it is touched."""
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
