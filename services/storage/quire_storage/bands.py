"""The bands of a delivery: where each lies or comes to lie in the arena, and its bytes brought there and verified.

Chunks in memory are used where they are. Chunks on a drive pass through a staging block, or, if they are wanted in
memory from now on, go straight to the slots that they will keep: either way the drive writes each slice where the
network reads it, and nothing is copied in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.descriptor import Descriptor
from quire.errors import ChunkMissing, CorruptData
from quire.outcome import ChunkRun
from quire.telemetry import names, tracer
from quire_storage.arena import Arena
from quire_storage.core.chunks import Chunk, MemoryPlace
from quire_storage.core.plan import BandPlan, cut_runs
from quire_storage.core.slots import Shape
from quire_storage.core.striped import Striped
from quire_storage.ring import Ring
from quire_storage.store import ChunkStore

Bytes = npt.NDArray[np.uint8]
_AHEAD_OF_DRIVES = 3
Healer = Callable[[Chunk], Awaitable[Bytes | None]]


@dataclass(slots=True)
class Band:
    """Some consecutive chunks of a delivery. `stride`: between layers in the arena; 0 for one that is staged."""

    plan: BandPlan
    chunks: Sequence[Chunk]
    stride: int
    source: Striped | None = None
    staged: bool = False


@dataclass(frozen=True, slots=True)
class ReadyBand:
    """A layer of a band, verified, at `shift` of its bases; `block` is given back when it has left."""

    band: Band
    layer: int
    shift: int
    block: int | None


class Bands:
    """The bands of one delivery of held chunks. `close` when nothing reads the arena for it any more."""

    def __init__(
        self,
        store: ChunkStore,
        ring: Ring | None,
        threads: Executor,
        heal: Healer,
        on_corrupt: Callable[[list[Chunk]], None],
        descriptor: Descriptor,
        runs: Sequence[ChunkRun],
        chunks: Sequence[Chunk],
    ) -> None:
        self._store = store
        self._arena: Arena = store.arena
        self._ring = ring
        self._threads = threads
        self._heal = heal
        self._on_corrupt = on_corrupt
        self._blocks: set[int] = set()
        on_disk = [chunk for chunk in chunks if chunk.memory is None]
        if any(chunk.disk is None for chunk in on_disk):
            raise ChunkMissing("a drive has just failed, and chunks with it", field="chunk_keys")
        self._promoting = store.memory_for([chunk for chunk in on_disk if store.wanted_in_memory(chunk)])
        self.bands = [
            self._band(descriptor, cut_runs(runs, start, stop), chunks[start:stop])
            for start, stop in self._cuts(chunks)
        ]
        self._chunks = chunks

    @property
    def ahead(self) -> int:
        """How many to prepare while one is being sent: drives want several reads at a time, checksums only a core."""
        return _AHEAD_OF_DRIVES if any(band.source is not None for band in self.bands) else 1

    async def prepare(self, band: Band, layer: int, due_s: float) -> ReadyBand:
        """Bring a layer of a band into the arena and verify it. Raises `CorruptData` for what cannot be healed."""
        block, shift = None, layer * band.stride
        if band.staged:
            shift = block = await self._arena.take_block()
            self._blocks.add(block)
        if band.source is not None:
            with tracer().start_as_current_span(names.STORAGE_READ, attributes={"quire.layer": layer}):
                await self._read(band, layer, block, due_s)
        loop = asyncio.get_running_loop()
        bad = await loop.run_in_executor(self._threads, band.plan.corrupt, self._arena.view, layer, shift)
        if bad:
            await self._mend(band, layer, shift, bad)
        return ReadyBand(band, layer, shift, block)

    def release(self, ready: ReadyBand) -> None:
        """The bytes of a ready band have left."""
        if ready.block is not None and ready.block in self._blocks:
            self._blocks.discard(ready.block)
            self._arena.free_block(ready.block)

    def close(self, *, complete: bool) -> None:
        """Give memory back. `complete`: every layer was read and verified, so what was promoted may stay."""
        for block in self._blocks:
            self._arena.free_block(block)
        self._blocks.clear()
        by_key = {chunk.record.key: chunk for chunk in self._chunks}
        promoting, self._promoting = self._promoting, {}
        for key, place in promoting.items():
            if complete:
                self._store.promoted(by_key[key], place)
            else:
                self._store.give_back([place.offset])

    # ----

    def _cuts(self, chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
        """[start, stop) of runs of chunks that are treated alike; those that are staged fit a block."""
        kinds = [self._kind(chunk) for chunk in chunks]
        room = Shape(1, chunks[0].slice_bytes).slice_room
        most = max(1, self._arena.block_bytes // room)
        cuts, start = [], 0
        for at in range(1, len(chunks) + 1):
            full = kinds[start] != "memory" and at - start >= most
            if at == len(chunks) or kinds[at] != kinds[start] or full:
                cuts.append((start, at))
                start = at
        return cuts

    def _kind(self, chunk: Chunk) -> str:
        if chunk.memory is not None:
            return "memory"
        return "promoted" if chunk.record.key in self._promoting else "staged"

    def _band(self, descriptor: Descriptor, runs: Sequence[ChunkRun], chunks: Sequence[Chunk]) -> Band:
        kind = self._kind(chunks[0])
        if kind == "staged":
            room = chunks[0].shape.slice_room
            bases = np.arange(len(chunks), dtype=np.int64) * room
            return Band(BandPlan(descriptor, runs, chunks, bases), chunks, 0, staged=True, source=self._staged(chunks))
        places = [self._place(chunk) for chunk in chunks]
        bases = np.array([place.offset for place in places], dtype=np.int64)
        stride, source = places[0].layer_stride, None
        if kind == "promoted":
            pool = self._store.pool
            assert pool is not None, "what is on a drive is in the pool"
            source = pool.striped(chunks, bases + self._arena.address, np.full(len(chunks), stride))
        return Band(BandPlan(descriptor, runs, chunks, bases), chunks, stride, source)

    def _staged(self, chunks: Sequence[Chunk]) -> Striped:
        """Addresses count from the block that is taken for the layer."""
        pool = self._store.pool
        assert pool is not None, "what is on a drive is in the pool"
        addresses = np.arange(len(chunks), dtype=np.int64) * chunks[0].shape.slice_room
        return pool.striped(chunks, addresses, np.zeros(len(chunks), dtype=np.int64))

    def _place(self, chunk: Chunk) -> MemoryPlace:
        place = chunk.memory or self._promoting.get(chunk.record.key)
        assert place is not None, "_kind() saw one"
        return place

    async def _read(self, band: Band, layer: int, block: int | None, due_s: float) -> None:
        assert self._ring is not None and band.source is not None, "only drives are read"
        contexts = band.source.layer(layer)
        if block is not None:
            contexts = contexts.moved(self._arena.address + block)
        await self._ring.read(contexts, due_s)

    async def _mend(self, band: Band, layer: int, shift: int, bad: list[int]) -> None:
        """Put slices right that do not match, from another copy. Raises `CorruptData` where there is none."""
        hopeless = []
        for index in bad:
            chunk = band.chunks[index]
            payload = await self._heal(chunk)
            if payload is None:
                hopeless.append(chunk)
                continue
            at = int(band.plan.bases[index]) + shift
            self._arena.view[at : at + chunk.slice_bytes] = payload[layer]
        if hopeless:
            self._on_corrupt(hopeless)
            raise CorruptData(f"{len(hopeless)} chunks do not match their checksums in layer {layer}")
