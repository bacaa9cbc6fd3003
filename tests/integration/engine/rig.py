"""The storage engine of a node without its network: tiers on simulated drives, stores in, verified layers out."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.clock import SystemClock
from quire.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.durability import Durability
from quire.keys import ChunkKeys
from quire.metadata.index import ChunkRecord
from quire.outcome import ChunkRun
from quire_storage.arena import Arena
from quire_storage.bands import Bands
from quire_storage.config import StorageConfig
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk, MemoryPlace
from quire_storage.core.slack import SlackLimits
from quire_storage.core.slots import Shape
from quire_storage.holdings import Holdings
from quire_storage.integrity import Integrity
from quire_storage.pool import Pool, PoolSettings
from quire_storage.ring import Ring
from quire_storage.room import Outside
from quire_storage.store import ChunkStore
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


@dataclass
class Engine:
    """One life of the engine. `start`, then stores and reads, then `stop`; `copies` are what others have."""

    disk: SimDisk
    config: StorageConfig = CONFIG
    drives: tuple[str, ...] = ("a", "b")
    copies: dict[bytes, Bytes] = field(default_factory=dict)
    evicted: list[bytes] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)
    withdrawn: list[bytes] = field(default_factory=list)
    pinned: set[bytes] = field(default_factory=set)

    async def start(self) -> Engine:
        config = self.config
        self._threads = ThreadPoolExecutor(1)
        self.arena = Arena(config.arena_bytes, config.slab_bytes, config.staging_bytes, config.block_bytes)
        self.arena.map()
        settings = PoolSettings(
            "node", config.drive_bytes, config.slab_bytes, config.chunk_bytes_min, config.stripe_bytes
        )
        self.pool = Pool(settings, self.drives, self.disk)
        files = self.pool.open()
        self.ring = Ring(self.disk, SystemClock(), SlackLimits(age_s_max=0.01))
        await self.ring.start(files, [self.arena.view])
        await self.pool.recover(self.ring)
        held = Holdings(self.arena, self.pool, None)
        held.on_lost = lambda records: self.lost.extend(record.key for record in records)
        self.store = ChunkStore(config, held, SystemClock(), Outside(self._may_go, self._withdrawn))
        self.integrity = Integrity(self.store, self.ring, self._threads, SystemClock(), self._copies)
        held.adopt()
        return self

    async def stop(self) -> None:
        await self.store.close()
        await self.pool.close()
        self._threads.shutdown()

    async def put(
        self, numbers: Sequence[int], durability: Durability, version: int = 0, shape: Shape = SHAPE
    ) -> list[Chunk]:
        """Store chunks as an ingest does; returning is the acknowledgement."""
        offsets = await self.store.reserve(shape, len(numbers))
        stride = self.arena.slots.layer_stride(shape)
        chunks = []
        for number, offset in zip(numbers, offsets.tolist(), strict=True):
            payload = payload_of(number, version, shape)
            for place, row in zip(self.arena.slices(offset, stride, shape).tolist(), payload, strict=True):
                self.arena.view[place : place + shape.slice_bytes] = row
            chunk = Chunk(record_of(number), shape.num_layers, shape.slice_bytes, row_checksums(payload), durability)
            chunk.memory = MemoryPlace(offset, stride)
            chunks.append(chunk)
        fresh: list[Chunk] = []
        try:
            async with self.store.keeping(chunks, durability) as fresh:
                for chunk in fresh:
                    chunk.indexed = True
        finally:
            kept = {id(chunk) for chunk in fresh}
            mine = zip(chunks, offsets.tolist(), strict=True)
            self.store.give_back([offset for chunk, offset in mine if id(chunk) not in kept])
        return fresh

    async def get(self, numbers: Sequence[int], shape: Shape = SHAPE) -> Bytes:
        """(L, N, S) as a delivery would send it: through bands, verified. Raises `ChunkMissing`, `CorruptData`."""
        keys = ChunkKeys(b"".join(map(key_of, numbers)))
        target = RdmaTarget(b"w", 4096, len(numbers) * shape.bytes, b"k")
        descriptor = Descriptor(keys, shape.num_layers, 1, shape.slice_bytes, DeliveryOrder.LAYERWISE, target)
        out = np.zeros(descriptor.payload_bytes, dtype=np.uint8)
        chunks = await self.store.hold(keys)
        bands = None
        complete = False
        try:
            runs = (ChunkRun(0, len(numbers)),)
            bands = Bands(
                self.store, self.ring, self._threads, self.integrity.heal, self._corrupt, descriptor, runs, chunks
            )
            for layer in range(shape.num_layers):
                for band in bands.bands:
                    ready = await bands.prepare(band, layer, 0.0)
                    for piece in band.plan.pieces(layer, ready.shift, 1 << 20):
                        at = piece.remote_offset
                        for offset in piece.offsets.tolist():
                            out[at : at + piece.length] = self.arena.view[offset : offset + piece.length]
                            at += piece.length
                    bands.release(ready)
            complete = True
        finally:
            if bands is not None:
                bands.close(complete=complete)
            self.store.let_go(chunks)
        return out.reshape(shape.num_layers, len(numbers), shape.slice_bytes)

    def _corrupt(self, chunks: list[Chunk]) -> None:
        self.lost += [chunk.record.key for chunk in chunks]

    async def _may_go(self, records: Sequence[ChunkRecord]) -> set[bytes]:
        await asyncio.sleep(0)
        out = {record.key for record in records if record.key not in self.pinned}
        self.evicted += [record.key for record in records if record.key in out]
        return out

    async def _withdrawn(self, records: Sequence[ChunkRecord]) -> None:
        self.withdrawn += [record.key for record in records]

    async def _copies(self, chunk: Chunk) -> AsyncIterator[Bytes]:
        if chunk.record.key in self.copies:
            yield self.copies[chunk.record.key]


def with_settings(**changes: object) -> StorageConfig:
    return dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
