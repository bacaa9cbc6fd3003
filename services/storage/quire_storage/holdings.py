"""What a node holds and where: the table of chunks in hand, the order in which each tier lets go, and removal."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from quire.metadata.index import ChunkRecord
from quire_storage.arena import Arena
from quire_storage.core.chunks import Chunk, ChunkTable
from quire_storage.core.eviction import LeafArc
from quire_storage.object_store import ObjectStore
from quire_storage.pool import Pool


class Holdings:
    """`pool` and `objects` are None for a node without drives, or without an object tier.

    A chunk that lies on a drive only has no `Chunk` until somebody asks for it; one that is in memory, or held, is in
    the table. `dirty`: in memory only, to be written to a drive.
    """

    def __init__(self, arena: Arena, pool: Pool | None, objects: ObjectStore | None) -> None:
        self.arena = arena
        self.pool = pool
        self.objects = objects
        self.table = ChunkTable()
        self.arriving: dict[bytes, asyncio.Future[None]] = {}  # being stored, not readable yet
        self.doomed: dict[bytes, asyncio.Future[None]] = {}  # the index is being asked whether they may go
        self.dirty: OrderedDict[bytes, None] = OrderedDict()
        self.in_memory = LeafArc(arena.slots.capacity_bytes, leaves_only=pool is None)
        self.on_disk = LeafArc(pool.map.capacity_bytes if pool else 0)
        self.on_dirty: Callable[[], None] = lambda: None
        self.on_lost: Callable[[Sequence[ChunkRecord]], None] = lambda records: None
        self._leaving: dict[bytes, int] = {}  # dropped, but not free yet: what the pool still says does not count

    def adopt(self) -> int:
        """Take over what the pool recovered; how many chunks."""
        if self.pool is None:
            return 0
        self.pool.on_lost(self._drive_lost)
        for key, parent, size, in_object in self.pool.map.entries():
            self.on_disk.insert(key, parent, size)
            if self.objects is not None and not in_object:
                self.objects.enqueue(key, size)
        return len(self.pool.map)

    def __len__(self) -> int:
        return (len(self.pool.map) if self.pool else 0) + sum(1 for chunk in self.table if chunk.disk is None)

    def find(self, key: bytes) -> Chunk | None:
        """A chunk that is here, in memory or on a drive."""
        chunk = self.table.get(key)
        if chunk is None and self.pool is not None and key not in self._leaving and key not in self.arriving:
            chunk = self.pool.map.get(key)
        return chunk

    def pin(self, key: bytes) -> Chunk | None:
        """A chunk that is here, kept where it is until `let_go`."""
        chunk = self.find(key)
        if chunk is None:
            return None
        if self.table.get(key) is None:
            self.table.add(chunk)
        chunk.pins += 1
        return chunk

    def let_go(self, chunks: Sequence[Chunk]) -> None:
        for chunk in self.table.unpin(chunks):
            if chunk.dropped:
                self._free(chunk)
            elif chunk.memory is None and self.table.get(chunk.record.key) is chunk:
                self.table.remove(chunk.record.key)

    def is_held(self, key: bytes) -> bool:
        chunk = self.table.get(key)
        return chunk is not None and chunk.pins > 0

    def enter(self, chunks: Sequence[Chunk]) -> None:
        """Make chunks readable that have their places. Parents before children, as they come in a prefix."""
        for chunk in chunks:
            self.table.add(chunk)
        for chunk in reversed(chunks):  # the order of eviction wants the deepest to be the oldest
            size, key, parent = chunk.shape.slot_bytes, chunk.record.key, chunk.record.parent
            if chunk.memory is not None and key not in self.in_memory:
                self.in_memory.insert(key, parent, size)
            if chunk.disk is not None and key not in self.on_disk:
                self.on_disk.insert(key, parent, size)
        for chunk in chunks:
            if self.objects is not None and not chunk.in_object:
                self.objects.enqueue(chunk.record.key, chunk.shape.slot_bytes)
            if chunk.disk is None and self.pool is not None:
                self.dirty[chunk.record.key] = None
        if self.dirty:
            self.on_dirty()

    async def drop(self, keys: Iterable[bytes]) -> int:
        """Forget chunks here: unreadable at once, gone from the drives when this returns. How many there were.

        Raises `DriveFailed` if their drive has failed: unreadable, but they may come back with it.
        """
        dropped = [chunk for key in keys if (chunk := self.find(key)) is not None]
        for chunk in dropped:
            key = chunk.record.key
            self.table.remove(key)
            self.dirty.pop(key, None)
            self.in_memory.remove(key)
            self.on_disk.remove(key)
            if self.objects is not None:
                self.objects.forget(key)
            self._leaving[key] = self._leaving.get(key, 0) + 1
            chunk.dropped = True
            chunk.pins += 1
        try:
            if self.pool is not None:
                await self.pool.forget([chunk for chunk in dropped if chunk.disk is not None])
        finally:
            self.let_go(dropped)
        return len(dropped)

    def _free(self, chunk: Chunk) -> None:
        """Places of a dropped chunk that nobody holds."""
        if chunk.memory is not None:
            self.arena.free_slots([chunk.memory.offset])
            chunk.memory = None
        if chunk.disk is not None and self.pool is not None:
            self.pool.release([chunk])
        key = chunk.record.key
        self._leaving[key] -= 1
        if not self._leaving[key]:
            del self._leaving[key]

    def _drive_lost(self, records: Sequence[ChunkRecord]) -> None:
        """A drive failed: what is in memory too lives on, the rest is gone."""
        lost = []
        for record in records:
            self.on_disk.remove(record.key)
            chunk = self.table.get(record.key)
            if chunk is not None:
                chunk.disk = None
            if chunk is not None and chunk.memory is not None:
                self.dirty[record.key] = None
                continue
            lost.append(record)
            if chunk is not None:  # held, but nowhere any more: those who hold it find that out
                self.table.remove(record.key)
                chunk.dropped = True
                self._leaving[record.key] = self._leaving.get(record.key, 0) + 1
        if self.dirty:
            self.on_dirty()
        self.on_lost(lost)
