"""Room: memory and slots on the drives are made free by writing what is dirty and letting go of what is not used.

What is in memory only is dirty: it goes to a drive in the background. A tier that is full evicts leaves
(`core.eviction`), and a chunk whose last copy would go is first taken out of the cluster's index, whose leases may
forbid it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from quire.errors import PoolFull
from quire.metadata.index import ChunkRecord
from quire.telemetry import background, counter, logger, names
from quire_storage.config import StorageConfig
from quire_storage.core.chunks import Chunk
from quire_storage.core.eviction import LeafArc
from quire_storage.core.slots import Shape
from quire_storage.errors import DriveFailed
from quire_storage.holdings import Holdings
from quire_storage.ports import Clock

_FLUSH_CHUNKS = 64
_EVICT_CHUNKS = 64
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Outside:
    """What the store asks of the node around it."""

    may_go: Callable[[Sequence[ChunkRecord]], Awaitable[set[bytes]]]
    """Take chunks, deepest first, out of the index because their last copy goes; which of them are out."""
    withdrawn: Callable[[Sequence[ChunkRecord]], Awaitable[None]]
    """Chunks that this node has no more, but others or the object tier do."""


_TIERS = tuple({"tier": tier} for tier in ("memory", "disk"))


class Room:
    """For one event loop."""

    def __init__(self, config: StorageConfig, held: Holdings, clock: Clock, outside: Outside) -> None:
        self._config = config
        self._held = held
        self._clock = clock
        self._outside = outside
        self._flusher: asyncio.Task[None] | None = None
        self._trimmer: asyncio.Task[None] | None = None
        self._trimming = asyncio.Lock()
        self._writing: dict[bytes, asyncio.Future[None]] = {}
        self._closing = False
        self._evictions = counter(names.EVICTIONS, "1", "chunks that went", _TIERS)
        held.on_dirty = self._wake_flusher

    async def close(self) -> None:
        """Stop what runs in the background; write what is dirty, as far as the pool has room."""
        self._closing = True
        for task in (self._flusher, self._trimmer):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._held.pool is not None:
            while self._held.dirty and await self._flush_once(list(islice(self._held.dirty, _FLUSH_CHUNKS))):
                pass

    async def reserve(self, shape: Shape, count: int) -> npt.NDArray[np.int64]:
        """Slots of the arena, freed by eviction if need be. Raises `PoolFull`, `LayoutInvalid`."""
        self._held.arena.check(shape)
        if self._held.pool is not None:
            self._held.pool.map.check(shape)
        if self._held.pool is not None and self._held.objects is not None:
            await self._held.objects.wait_for_room()
        deadline_s = self._clock.monotonic_s() + self._config.room_timeout_s
        while True:
            taken = self._held.arena.slots.take(shape, count)
            if len(taken) == count:
                return taken
            self._held.arena.free_slots(taken.tolist())
            needed = (count - len(taken)) * shape.slot_bytes
            if self.evict_clean(needed) or await self._evict_dirty(needed):
                continue
            # What is held or being written now may come free; only what can never fit is refused at once.
            never = count * shape.slot_bytes > self._held.arena.slots.capacity_bytes
            if never or self._clock.monotonic_s() > deadline_s:
                raise PoolFull(
                    f"no memory for {count} chunks of {shape.bytes} bytes ({self._held.arena.slots.used_bytes} in use)"
                )
            await self._clock.sleep(0.01)

    async def to_disk(self, chunks: Sequence[Chunk]) -> None:
        """See to it that chunks that lie in the arena are on the drives. The caller holds them, or nobody knows them.

        One write per chunk at a time: whoever comes second waits for the first, and finds it done.
        """
        assert self._held.pool is not None, "the caller asked for a drive where there is none"
        while busy := {self._writing[each.record.key] for each in chunks if each.record.key in self._writing}:
            await asyncio.wait(busy)
        left = [chunk for chunk in chunks if chunk.disk is None and chunk.memory is not None and not chunk.dropped]
        claim: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing.update({chunk.record.key: claim for chunk in left})
        try:
            for group in by_shape(left):
                await self._write(group)
        finally:
            for chunk in left:
                del self._writing[chunk.record.key]
            claim.set_result(None)
        if self._held.pool.map.used_bytes > self._config.pool_high_share * self._held.pool.map.capacity_bytes:
            self._wake_trimmer()

    async def off_disk(self, chunks: Sequence[Chunk]) -> None:
        """Take back what `to_disk` did to chunks that nobody knows."""
        assert self._held.pool is not None, "to_disk() was called"
        with contextlib.suppress(DriveFailed):
            await self._held.pool.forget(chunks)
        self._held.pool.release(chunks)

    async def _write(self, chunks: Sequence[Chunk]) -> None:
        assert self._held.pool is not None, "the caller checked"
        places = [chunk.memory for chunk in chunks if chunk.memory is not None]
        addresses = np.array([place.offset for place in places], dtype=np.int64) + self._held.arena.address
        size = sum(chunk.shape.slot_bytes for chunk in chunks)
        while True:
            try:
                await self._held.pool.store(chunks, addresses, places[0].layer_stride)
                break
            except PoolFull:
                if not await self._trim(size):
                    raise
        await self._held.pool.forget([chunk for chunk in chunks if chunk.dropped])  # dropped while it was written
        for chunk in reversed(chunks):
            key = chunk.record.key
            if self._held.table.get(key) is chunk:
                self._held.dirty.pop(key, None)
                if key not in self._held.on_disk:
                    self._held.on_disk.insert(key, chunk.record.parent, chunk.shape.slot_bytes)

    def evict_clean(self, needed: int) -> bool:
        """Free memory of chunks that have another copy; whether any was freed."""
        freed = 0
        while freed < needed:
            key = self._held.in_memory.evict(self._is_dirty_or_held)
            if key is None:
                break
            chunk = self._held.table.get(key)
            assert chunk is not None and chunk.memory is not None, "what is in memory is in the table"
            self._held.arena.free_slots([chunk.memory.offset])
            chunk.memory = None
            self._held.table.remove(key)
            self._held.dirty.pop(key, None)
            freed += chunk.shape.slot_bytes
            self._evictions.add(1, {"tier": "memory"})
        return freed > 0

    async def off_memory(self, chunks: Sequence[Chunk]) -> None:
        """Put chunks that only the caller holds on a drive, and free their memory: others are to come."""
        assert self._held.pool is not None, "only drives take what memory cannot"
        await self.to_disk(chunks)
        for chunk in chunks:
            if chunk.memory is not None and chunk.disk is not None and chunk.pins == 1 and not chunk.dropped:
                self._held.in_memory.remove(chunk.record.key)
                self._held.arena.free_slots([chunk.memory.offset])
                chunk.memory = None

    async def _evict_dirty(self, needed: int) -> bool:
        """Nothing clean is left: write some of what is dirty, or, without drives, let go of what nobody needs."""
        if self._held.pool is not None:
            return await self._flush_once(list(islice(self._held.dirty, _FLUSH_CHUNKS))) > 0
        victims: list[Chunk] = []
        while sum(chunk.shape.slot_bytes for chunk in victims) < needed and len(victims) < _EVICT_CHUNKS:
            key = self._held.in_memory.evict(self._held.is_held)
            if key is None:
                break
            chunk = self._held.table.get(key)
            assert chunk is not None, "what is in memory is in the table"
            victims.append(chunk)
        return bool(await self._let_die(victims, self._held.in_memory, "memory"))

    async def let_go_of(self, chunks: Sequence[Chunk]) -> int:
        """Evict these, children before parents, as far as the index allows; how many went."""
        order, tier = (self._held.on_disk, "disk") if self._held.pool else (self._held.in_memory, "memory")
        for chunk in chunks:
            order.remove(chunk.record.key)
        return len(await self._let_die(chunks, order, tier))

    async def _let_die(self, victims: Sequence[Chunk], order: LeafArc, tier: str) -> list[Chunk]:
        """Last copies, deepest first, that the index gives free are dropped; the others stay. Those that went."""
        if not victims:
            return []
        out: set[bytes] = set()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keys = [chunk.record.key for chunk in victims]
        self._held.doomed.update(dict.fromkeys(keys, answer))  # a store of one of them waits for the answer
        try:
            out = await self._outside.may_go([chunk.record for chunk in victims])
            gone = [chunk for chunk in victims if chunk.record.key in out]
            await self._drop(gone, tier)
        finally:
            for chunk in victims:
                key, in_tier = chunk.record.key, chunk.disk if order is self._held.on_disk else chunk.memory
                if key not in out and key not in order and in_tier and self._held.find(key) is not None:
                    order.insert(key, chunk.record.parent, chunk.shape.slot_bytes)
                    order.touch(key)
            for key in keys:
                del self._held.doomed[key]
            answer.set_result(None)
        return gone

    def _is_dirty_or_held(self, key: bytes) -> bool:
        chunk = self._held.table.get(key)
        assert chunk is not None, "what is in memory is in the table"
        return chunk.pins > 0 or (chunk.disk is None and not chunk.in_object)

    def _wake_flusher(self) -> None:
        if (self._flusher is None or self._flusher.done()) and not self._closing:
            self._flusher = asyncio.create_task(self._flush(), context=background())

    async def _flush(self) -> None:
        while self._held.dirty:
            if not await self._flush_once(list(islice(self._held.dirty, _FLUSH_CHUNKS))):
                await self._clock.sleep(_RETRY_S)

    async def _flush_once(self, keys: Sequence[bytes]) -> int:
        """Write dirty chunks; how many are clean now."""
        for key in keys:
            chunk = self._held.table.get(key)
            if chunk is None or chunk.disk is not None or chunk.memory is None:
                self._held.dirty.pop(key, None)
        held = [chunk for key in keys if key in self._held.dirty and (chunk := self._held.pin(key)) is not None]
        try:
            await self.to_disk(held)
        except (PoolFull, DriveFailed) as error:
            logger().warning("chunks stay in memory only", error=str(error), dirty=len(self._held.dirty))
        finally:
            self._held.let_go(held)
        return len(keys) - sum(key in self._held.dirty for key in keys)

    # ---- the pool's size

    def _wake_trimmer(self) -> None:
        if (self._trimmer is None or self._trimmer.done()) and not self._closing:
            self._trimmer = asyncio.create_task(self._trim_to_low(), context=background())

    async def _trim_to_low(self) -> None:
        """Down to the low watermark, so that stores need not wait for room."""
        assert self._held.pool is not None, "only a pool is trimmed"
        low = self._config.pool_low_share * self._held.pool.map.capacity_bytes
        while (excess := self._held.pool.map.used_bytes - low) > 0 and await self._trim(int(excess)):
            pass

    async def _trim(self, needed: int) -> int:
        """Let chunks go from the drives until `needed` bytes are free; how many went.

        Those that the index keeps are asked for once: they count as used now.
        """
        gone = freed = refused = 0
        async with self._trimming:
            while freed < needed and refused <= len(self._held.on_disk):
                victims = self._disk_victims(needed - freed)
                if not victims:
                    break
                out = await self._let_die(
                    [chunk for chunk in victims if not chunk.in_object], self._held.on_disk, "disk"
                )
                in_object = [chunk for chunk in victims if chunk.in_object]
                await self._outside.withdrawn([chunk.record for chunk in in_object])
                await self._drop(in_object, "disk")
                out += in_object
                gone, freed = gone + len(out), freed + sum(chunk.shape.slot_bytes for chunk in out)
                refused += len(victims) - len(out)
        return gone

    def _disk_victims(self, needed: int) -> list[Chunk]:
        victims: list[Chunk] = []
        while sum(chunk.shape.slot_bytes for chunk in victims) < needed and len(victims) < _EVICT_CHUNKS:
            key = self._held.on_disk.evict(lambda key: self._held.is_held(key) or key in self._held.arriving)
            if key is None:
                break
            if (chunk := self._held.find(key)) is not None:
                victims.append(chunk)
        return victims

    async def _drop(self, chunks: Sequence[Chunk], tier: str) -> None:
        self._evictions.add(len(chunks), {"tier": tier})
        with contextlib.suppress(DriveFailed):  # then they are gone all the more
            await self._held.drop([chunk.record.key for chunk in chunks])


def by_shape(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks gathered by shape."""
    groups: dict[Shape, list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.shape, []).append(chunk)
    return list(groups.values())
