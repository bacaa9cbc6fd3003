"""The storage engine of a node without its network: tiers on simulated drives, stores in, verified layers out."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import ChunkMissing
from quire.model.keys import ChunkKeys
from quire.model.ranges import ChunkRange
from quire.model.records import ChunkRecord
from quire.transport.fair_threads import FairThreads
from quire_server.clock import SystemClock
from quire_storage.cluster.integrity import Integrity
from quire_storage.cluster.registry import Registry
from quire_storage.config import StorageConfig
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk, DiskPlace
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency import Residency, ResidencySettings
from quire_storage.core.slack import SlackLimits
from quire_storage.delivery.batches import Batches
from quire_storage.delivery.promotions import Promotions
from quire_storage.delivery.reading import Reading
from quire_storage.tiers.arena import Arena
from quire_storage.tiers.pool import Pool, PoolSettings
from quire_storage.tiers.ring import Ring
from quire_storage.tiers.tiers import Tiers
from tests.integration.engine.disk import SimDisk

SHAPE = Shape(3, 4096)
CONFIG = StorageConfig(
    arena_bytes=1 << 20,
    slab_bytes=1 << 16,
    staging_bytes=1 << 16,
    block_bytes=1 << 14,
    drive_bytes=4 << 20,
    stripe_bytes=8192,
    chunk_bytes_min=8192,
    room_timeout_s=5.0,
    drive_write_error_s_max=0.0,
)
Bytes = npt.NDArray[np.uint8]


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def payload_of(number: int, version: int = 0, shape: Shape = SHAPE) -> Bytes:
    """(L, S) bytes that no other chunk has."""
    generator = np.random.default_rng(number * 1000 + version)
    return generator.integers(0, 256, (shape.num_layers, shape.slice_bytes), dtype=np.uint8)


def record_of(number: int, chain: int = 8) -> ChunkRecord:
    """Chunks are in chains of `chain`: 0 … 7, 8 … 15, …"""
    start = number - number % chain
    parent = key_of(number - 1) if number % chain else b""
    return ChunkRecord(key_of(number), parent, key_of(start), key_of(start) if parent else b"")


class EngineIndex:
    """Indexes whatever it is given, and lets go of what is not `pinned`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def commit(
        self, node_id: str, records: Sequence[ChunkRecord], *, reporter: str, fresh: int = 0, wait_ms: int = 0
    ) -> list[int]:
        await asyncio.sleep(0)
        return [self._engine.listed.setdefault(record.key, fresh or 1) for record in records]

    async def generations(self, node_id: str, records: Sequence[ChunkRecord]) -> list[int]:
        await asyncio.sleep(0)
        return [self._engine.listed.get(record.key, 0) for record in records]

    async def evict(self, node_id: str, records: Sequence[ChunkRecord]) -> list[bool]:
        await asyncio.sleep(0)
        marks = [record.key not in self._engine.pinned for record in records]
        self._engine.end(record.key for record, out in zip(records, marks, strict=True) if out)
        return marks

    async def withdraw(
        self, node_id: str, records: Sequence[ChunkRecord], *, reporter: str, hidden: bool = False
    ) -> None:
        self._engine.withdrawn += [record.key for record in records]
        for record in records:
            self._engine.listed.pop(record.key, None)


@dataclass
class Engine:
    """One life of the engine. `start`, then stores and reads, then `stop`; `copies` are what others have.

    The invariants of the residency machine are looked at after every event.
    """

    disk: SimDisk
    config: StorageConfig = CONFIG
    drives: tuple[str, ...] = ("a", "b")
    copies: dict[bytes, Bytes] = field(default_factory=dict)
    evicted: list[bytes] = field(default_factory=list)
    withdrawn: list[bytes] = field(default_factory=list)
    pinned: set[bytes] = field(default_factory=set)
    listed: dict[bytes, int] = field(default_factory=dict)

    async def start(self) -> Engine:
        config, clock = self.config, SystemClock()
        self._threads = ThreadPoolExecutor(1)
        self.arena = Arena(config.arena_bytes, config.slab_bytes, config.staging_bytes, config.block_bytes)
        self.arena.map()
        settings = PoolSettings(
            node_id="node",
            drive_bytes=config.drive_bytes,
            slab_bytes=config.slab_bytes,
            chunk_bytes_min=config.chunk_bytes_min,
            stripe_bytes=config.stripe_bytes,
            error_s_max=config.drive_error_s_max,
            write_error_s_max=config.drive_write_error_s_max,
        )
        self.pool = Pool(settings, self.drives, self.disk)
        files = self.pool.open()
        self.ring = Ring(self.disk, clock, SlackLimits(age_s_max=0.01))
        await self.ring.start(files, [self.arena.view])
        await self.pool.recover(self.ring)
        shares = ResidencySettings(pool_high_share=config.pool_high_share, pool_low_share=config.pool_low_share)
        self.residency = Residency(shares, self.arena.slots, self.pool.map, objects=False)
        index: Any = EngineIndex(self)
        self.tiers = Tiers(
            residency=self.residency,
            arena=self.arena,
            pool=self.pool,
            objects=None,
            write_behind=None,
            registry=Registry("node", index, clock, 1.0),
            clock=clock,
            wait_s=config.room_timeout_s,
            checked=1,
        )
        self.integrity = Integrity(
            tiers=self.tiers, ring=self.ring, threads=self._threads, clock=clock, copies=self._copies
        )
        self.promotions = Promotions()
        self.reading = Reading(
            tiers=self.tiers,
            ring=self.ring,
            threads=FairThreads(self._threads),
            heal=self.integrity.heal,
        )
        return self

    async def stop(self) -> None:
        await self.tiers.close()
        await self.pool.close()
        self._threads.shutdown()

    async def put(
        self,
        numbers: Sequence[int],
        level: Durability,
        version: int = 0,
        shape: Shape = SHAPE,
        on_existing: OnExisting = OnExisting.VERIFY,
    ) -> set[bytes]:
        """Store chunks as an ingest does; the keys that are acknowledged."""
        async with self.tiers.reserved(shape, len(numbers)) as slots:
            chunks = []
            for index, number in enumerate(numbers):
                payload = payload_of(number, version, shape)
                self.tiers.lay(slots, index, payload)
                record = record_of(number)
                chunks.append(Chunk(record, shape.num_layers, shape.slice_bytes, row_checksums(payload)))
            async with self.tiers.storing(slots, chunks, level, on_existing) as stored:
                return stored.now()

    async def get(self, numbers: Sequence[int], shape: Shape = SHAPE) -> Bytes:
        """(L, N, S) as a delivery would send it: in batches, verified. Raises `ChunkMissing`, `CorruptData`."""
        keys = ChunkKeys(b"".join(map(key_of, numbers)))
        target = RdmaTarget(b"w", 4096, len(numbers) * shape.bytes, b"k")
        descriptor = Descriptor(keys, shape.num_layers, 1, shape.slice_bytes, DeliveryOrder.LAYERWISE, target)
        out = np.zeros(descriptor.payload_bytes, dtype=np.uint8)
        held = self.tiers.pin(list(keys))
        if held.missing:
            self.tiers.unpin(held)
            raise ChunkMissing(f"{len(held.missing)} of {len(keys)}", field="chunk_keys")
        batches = None
        try:
            everything = (ChunkRange("", 0, len(numbers)),)
            batches = Batches(self.reading, self.promotions, descriptor, everything, held.copies)
            for layer in range(shape.num_layers):
                for batch in batches.batches:
                    ready = await batches.prepare(batch, layer, 0.0)
                    await ready.until(len(batch.copies))
                    for piece in batch.plan.pieces(layer, ready.shift, 1 << 20):
                        at = piece.remote_offset
                        for offset in piece.offsets.tolist():
                            out[at : at + piece.length] = self.arena.view[offset : offset + piece.length]
                            at += piece.length
                    batches.release(ready)
        finally:
            if batches is not None:
                await batches.close()
            self.tiers.unpin(held)
        return out.reshape(shape.num_layers, len(numbers), shape.slice_bytes)

    async def drop(self, numbers: Sequence[int]) -> int:
        """Forget chunks, under whichever index entries they are listed; how many there were."""
        generations = {key_of(number): self.residency.recorded(key_of(number)) for number in numbers}
        for key in generations:
            self.listed.pop(key, None)
        return await self.tiers.drop({key: each for key, each in generations.items() if each})

    def end(self, keys: Iterable[bytes]) -> None:
        """Index entries end."""
        for key in keys:
            self.evicted.append(key)
            self.listed.pop(key, None)

    def has(self, number: int) -> bool:
        return key_of(number) in self.residency

    def place(self, number: int) -> DiskPlace | None:
        """Where on the drives a chunk lies."""
        placed = self.pool.map.get(key_of(number))
        return placed.place if placed is not None else None

    async def clean(self) -> None:
        """Return when nothing lies in memory only."""
        async with asyncio.timeout(10):
            while self.residency.dirty_chunks:
                await asyncio.sleep(0.01)

    async def _copies(self, chunk: Chunk) -> AsyncIterator[Bytes]:
        if chunk.key in self.copies:
            yield self.copies[chunk.key]


def with_settings(**changes: object) -> StorageConfig:
    return dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
