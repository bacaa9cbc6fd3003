"""The chunk store of a node: memory above drives above the object tier. Knows no network and no client.

A chunk has a copy in memory, on a drive, in the object tier, or in several of them. Who stores says how durable it
must be before it counts; who reads gets it from the nearest tier, and what is read again moves up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quire.durability import Durability
from quire.errors import ChunkMissing, ContentConflict, PoolFull
from quire.keys import ChunkKeys
from quire.telemetry import counter, logger, names
from quire_storage.config import StorageConfig
from quire_storage.core.chunks import Chunk, MemoryPlace
from quire_storage.errors import DriveFailed
from quire_storage.holdings import Holdings
from quire_storage.ports import Clock
from quire_storage.room import Outside, Room

_RECENT_MAX = 65_536
_WALK_CHUNKS = 1024
_OFF_CHUNKS = 64
_EVICT_CHUNKS = 512
_PROMOTE_SHARE = 0.8
Bytes = npt.NDArray[np.uint8]

_TIERS = tuple({"tier": tier} for tier in ("memory", "disk", "object"))


class ChunkStore:
    """For one event loop."""

    def __init__(self, config: StorageConfig, held: Holdings, clock: Clock, outside: Outside) -> None:
        self._held = held
        self._outside = outside
        self._room = Room(config, held, clock, outside)
        self._read_lately: OrderedDict[bytes, None] = OrderedDict()
        self.arena, self.pool, self.objects = held.arena, held.pool, held.objects
        self.find, self.let_go, self.drop = held.find, held.let_go, held.drop
        self.reserve = self._room.reserve
        self.hits = {"memory": 0, "disk": 0, "object": 0}
        self._hit_counter = counter(names.TIER_HITS, "1", "chunks asked for, by where they were", _TIERS)

    async def close(self) -> None:
        await self._room.close()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def used_bytes(self) -> int:
        return max(self.arena.slots.used_bytes, self.pool.map.used_bytes if self.pool else 0)

    @property
    def figures(self) -> dict[str, float]:
        """For `quire status`."""
        lag = {"object lag": self.objects.lag_chunks} if self.objects else {}
        return {
            "chunks": len(self),
            "memory MiB": self.arena.slots.used_bytes // 2**20,
            "disk MiB": self.pool.map.used_bytes // 2**20 if self.pool else 0,
            "dirty": len(self._held.dirty),
            **{f"hits {tier}": count for tier, count in self.hits.items()},
            **lag,
        }

    # ---- reading

    async def hold(self, keys: ChunkKeys) -> list[Chunk]:
        """The chunks, kept where they are until `let_go`. Those of the object tier alone are brought here first.

        Raises `ChunkMissing` with the first that nobody has.
        """
        found = {key: chunk for key in dict.fromkeys(keys) if (chunk := self._held.pin(key)) is not None}
        try:
            missing = [key for key in keys if key not in found]
            self._count_hits(list(found.values()), len(missing))
            if missing and self.objects is not None:
                for chunk in await self._bring(missing):
                    found[chunk.record.key] = chunk
            chunks = []
            for index, key in enumerate(keys):
                if key not in found:
                    raise ChunkMissing(f"chunk {index} of the run, key {key.hex()}", field="chunk_keys")
                chunks.append(found[key])
        except BaseException:
            self._held.let_go(list(found.values()))
            raise
        for chunk in reversed(chunks):
            self._held.in_memory.touch(chunk.record.key)
            self._held.on_disk.touch(chunk.record.key)
        return chunks

    async def walk(self) -> AsyncIterator[list[Chunk]]:
        """Everything that is here, some at a time, in the order in which it was stored: parents before children."""
        on_disk = [entry[0] for entry in self.pool.map.entries()] if self.pool is not None else []
        keys = on_disk + [chunk.record.key for chunk in self._held.table if chunk.disk is None]
        for first in range(0, len(keys), _WALK_CHUNKS):
            part = keys[first : first + _WALK_CHUNKS]
            yield [chunk for key in part if (chunk := self.find(key)) is not None]
            await asyncio.sleep(0)

    def hold_known(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Chunks that are here, kept where they are until `let_go`; uses that are no sign of interest."""
        chunks = [chunk for key in keys if (chunk := self._held.pin(key)) is not None]
        assert len(chunks) == len(keys), "the caller has just found them"
        return chunks

    def _count_hits(self, chunks: Sequence[Chunk], missing: int) -> None:
        in_memory = sum(1 for chunk in chunks if chunk.memory is not None)
        for tier, count in (("memory", in_memory), ("disk", len(chunks) - in_memory), ("object", missing)):
            if count:
                self.hits[tier] += count
                self._hit_counter.add(count, {"tier": tier})

    def wanted_in_memory(self, chunk: Chunk) -> bool:
        """Whether a chunk read from a drive should stay in memory: it was read before, or there is room anyway."""
        key, slots = chunk.record.key, self._held.arena.slots
        again = key in self._read_lately or self._held.in_memory.went_lately(key)
        self._read_lately[key] = None
        while len(self._read_lately) > _RECENT_MAX:
            self._read_lately.popitem(last=False)
        return again or slots.used_bytes + chunk.shape.slot_bytes < _PROMOTE_SHARE * slots.capacity_bytes

    def memory_for(self, chunks: Sequence[Chunk]) -> dict[bytes, MemoryPlace]:
        """Slots for chunks that are to be read into memory, as far as they can be had without waiting."""
        places: dict[bytes, MemoryPlace] = {}
        if not chunks:
            return places
        shape = chunks[0].shape
        taken = self._held.arena.slots.take(shape, len(chunks))
        if len(taken) < len(chunks) and self._room.evict_clean((len(chunks) - len(taken)) * shape.slot_bytes):
            more = self._held.arena.slots.take(shape, len(chunks) - len(taken))
            taken = np.concatenate([taken, more])
        stride = self._held.arena.slots.layer_stride(shape)
        for chunk, offset in zip(chunks, taken.tolist(), strict=False):
            places[chunk.record.key] = MemoryPlace(offset, stride)
        return places

    def promoted(self, chunk: Chunk, place: MemoryPlace) -> None:
        """All slices of a held chunk lie at `place` now, verified."""
        key = chunk.record.key
        if chunk.memory is not None or chunk.dropped or self._held.table.get(key) is not chunk:
            self._held.arena.free_slots([place.offset])
            return
        chunk.memory = place
        if chunk.disk is None and self.pool is not None:  # its drive has failed meanwhile
            self._held.dirty[key] = None
            self._held.on_dirty()
        if key not in self._held.in_memory:
            self._held.in_memory.insert(key, chunk.record.parent, chunk.shape.slot_bytes)

    # ---- storing

    def give_back(self, offsets: Iterable[int]) -> None:
        """Slots of the arena that hold nothing."""
        self.arena.free_slots(offsets)

    @contextlib.asynccontextmanager
    async def keeping(self, chunks: Sequence[Chunk], durability: Durability) -> AsyncIterator[list[Chunk]]:
        """Make chunks that lie in the arena readable, and as durable as asked; inside, those that are new here.

        Durable means on a drive here, for whatever level; that other nodes or the object tier have them is the
        caller's matter, to be settled inside: until the end all of them are held. Chunks that are here already are
        compared, and raised to the level if they are below. Raises `ContentConflict`, `PoolFull`, `DriveFailed`; then
        nothing was kept.
        """
        keys = [chunk.record.key for chunk in chunks]
        while busy := {wait for key in keys if (wait := self._busy(key)) is not None}:
            await asyncio.wait(busy)
        fresh = [chunk for chunk in chunks if not self._is_known(chunk)]
        new = {chunk.record.key for chunk in fresh}
        held = self.hold_known([key for key in keys if key not in new])
        claim: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.arriving.update(dict.fromkeys(new, claim))
        try:
            try:
                if durability is not Durability.MEMORY and self.pool is not None:
                    await self.raise_level([chunk.record.key for chunk in held], durability)
                    await self._to_disk(fresh)
                for chunk in fresh:
                    chunk.indexed = False
                    chunk.pins += 1
                self._held.enter(fresh)
                held += fresh
            finally:
                for key in new:
                    del self._held.arriving[key]
                claim.set_result(None)
            yield fresh
        finally:
            self.let_go(held)

    def _busy(self, key: bytes) -> asyncio.Future[None] | None:
        """What a store of this key has to wait for: another store of it, or the answer whether it may go."""
        return self._held.arriving.get(key) or self._held.doomed.get(key)

    async def _to_disk(self, fresh: Sequence[Chunk]) -> None:
        """All of them, or none."""
        try:
            await self._room.to_disk(fresh)
        except BaseException:
            written = [chunk for chunk in fresh if chunk.disk is not None]
            if written:
                await asyncio.shield(self._room.off_disk(written))
            raise

    async def raise_level(self, keys: Sequence[bytes], durability: Durability) -> list[bytes]:
        """Put chunks that are here on a drive, and note the level that was asked for; those that are on one now."""
        held = [chunk for key in keys if (chunk := self._held.pin(key)) is not None]
        try:
            if self.pool is not None:
                await self._room.to_disk(held)
            lower = [chunk for chunk in held if _rank(chunk.durability) < _rank(durability)]
            for chunk in lower:
                chunk.durability = durability
            if self.pool is not None:
                await self.pool.update([chunk for chunk in lower if not chunk.dropped])
        finally:
            self._held.let_go(held)
        return [chunk.record.key for chunk in held if chunk.disk is not None]

    def of_namespace(self, namespace: bytes) -> list[tuple[bytes, int, int]]:
        """(key, bytes taken up, stored at) of a namespace's chunks, the longest stored first."""
        found = self.pool.map.of_namespace(namespace) if self.pool is not None else []
        for chunk in self._held.table:
            if chunk.disk is None and chunk.namespace == namespace:
                found.append((chunk.record.key, chunk.shape.slot_bytes, chunk.stored_ms))
        return sorted(found, key=lambda entry: entry[2])

    def coldest(self, keys: Sequence[bytes], size: int) -> list[bytes]:
        """Of `keys` as many as take up `size` bytes, in the order in which they would be evicted."""
        wanted, order = set(keys), self._held.on_disk if self.pool is not None else self._held.in_memory
        chosen: list[bytes] = []
        for key in order.coldest():
            if size <= 0:
                break
            if key in wanted:
                chosen.append(key)
                size -= order.entries[key].size
        return chosen

    async def evict(self, keys: Sequence[bytes]) -> int:
        """Let chunks go, children before parents, from everywhere, as far as the index allows; how many went."""
        gone = 0
        for first in range(0, len(keys), _EVICT_CHUNKS):
            part = [key for key in keys[first : first + _EVICT_CHUNKS] if self._busy(key) is None]
            gone += await self._room.let_go_of([chunk for key in part if (chunk := self.find(key)) is not None])
        return gone

    async def take_in(self, chunk: Chunk, payload: Bytes) -> bool:
        """Lay a chunk's (L, S) bytes into the arena, for `keep`; False if there is no room."""
        try:
            offset = int((await self.reserve(chunk.shape, 1))[0])
        except PoolFull as error:
            logger().warning("no memory for a chunk from elsewhere", error=str(error))
            return False
        stride = self.arena.slots.layer_stride(chunk.shape)
        for place, row in zip(self.arena.slices(offset, stride, chunk.shape).tolist(), payload, strict=True):
            self.arena.view[place : place + chunk.slice_bytes] = row
        chunk.memory = MemoryPlace(offset, stride)
        return True

    async def _bring(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Chunks from the object tier, held, in memory or, when that gets tight, on the drives.

        Those that are not there, or not sound, are left out.
        """
        assert self.objects is not None, "the caller checked"
        brought: list[Chunk] = []
        try:
            async for chunk, payload in self.objects.fetch(keys):
                key = chunk.record.key
                while (busy := self._busy(key)) is not None:
                    await asyncio.wait([busy])
                if self.find(key) is None and not await self.take_in(chunk, payload):
                    continue
                while (busy := self._busy(key)) is not None:
                    await asyncio.wait([busy])
                if self.find(key) is None:
                    self._held.enter([chunk])
                elif chunk.memory is not None:
                    self.give_back([chunk.memory.offset])  # somebody else was quicker
                brought += self.hold_known([key])
                tight = self.arena.slots.used_bytes > _PROMOTE_SHARE * self.arena.slots.capacity_bytes
                if self.pool is not None and tight:
                    await self._room.off_memory(brought[-_OFF_CHUNKS:])
        except BaseException:
            self.let_go(brought)
            raise
        return brought

    async def in_object(self, chunks: Sequence[Chunk]) -> None:
        """Remember that chunks are in the object tier now: those that are still here, with the very same content."""
        held: list[Chunk] = []
        for chunk in chunks:
            now = self.find(chunk.record.key)
            if now is not None and now.same_content(chunk):
                held += self.hold_known([chunk.record.key])
        for chunk in held:
            chunk.in_object = True
        try:
            if self.pool is not None:
                await self.pool.update([chunk for chunk in held if chunk.disk is not None and not chunk.dropped])
        finally:
            self.let_go(held)

    async def lose(self, chunks: Sequence[Chunk]) -> None:
        """These very chunks are no good: unreadable here from now on, and not promised by the index any more."""
        found = [chunk for chunk in chunks if self.find(chunk.record.key) is chunk]
        with contextlib.suppress(DriveFailed):
            await self.drop([chunk.record.key for chunk in found])
        await self._outside.withdrawn([chunk.record for chunk in found])

    async def drop_these(self, chunks: Sequence[Chunk]) -> None:
        """Drop chunks that were kept a moment ago, unless somebody else has been promised them since."""
        found = [chunk for chunk in chunks if self.find(chunk.record.key) is chunk and not chunk.indexed]
        with contextlib.suppress(DriveFailed):
            await self.drop([chunk.record.key for chunk in found])

    def _is_known(self, chunk: Chunk) -> bool:
        known = self._held.find(chunk.record.key)
        if known is None:
            return False
        if not known.same_content(chunk):
            raise ContentConflict(f"key {chunk.record.key.hex()} holds other bytes; they were kept", field="chunk_keys")
        return True


def _rank(durability: Durability) -> int:
    return list(Durability).index(durability)
