"""The chunk batches of a delivery: the place of each in the arena; its bytes are brought there and verified.

Chunks in memory are used where they are. Chunks on a drive pass through a staging block, or, if they are wanted in
memory from now on, are read straight into the slots that they will keep: either way the drive writes each slice where
the network reads it, and nothing is copied in between. Several deliveries of one prefix share its promotion: one reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import Descriptor
from quire.model.errors import ChunkMissing, QuireError
from quire.model.ranges import ChunkRange
from quire.telemetry import names, tracer
from quire.transport.copying import wait_in_thread
from quire_storage.core.chunks import Copy, MemoryPlace
from quire_storage.core.plan import BatchPlan, Carried, places
from quire_storage.core.pool.slots import Shape
from quire_storage.core.pool.striped import Striped
from quire_storage.delivery.object_loads import ObjectChunk, ObjectLoad, joined
from quire_storage.delivery.promotions import Promotion, Promotions
from quire_storage.delivery.reading import Reading, Source, checksums_of
from quire_storage.delivery.verifying import Verifying
from quire_storage.ingest.arrivals import Arrival, ArrivingChunk

Bytes = npt.NDArray[np.uint8]
_AHEAD_OF_DRIVES = 3
_AHEAD_OF_WIRE, _AHEAD_BYTES = 6, 8 << 20
_INLINE_BYTES = 1 << 20
"""Verified without a thread, whose answer would cost more processor time than the checksum."""


@dataclass(slots=True)
class Batch:
    """Consecutive chunks of a delivery. `stride`: between layers in the arena; 0 for one that is staged.

    `load`: which brings them from the object tier, and the position of the first of them there. `arrival`: of the store
    that is running.
    """

    plan: BatchPlan
    copies: Sequence[Copy]
    stride: int
    staged: Striped | None = None
    promotion: Promotion | None = None
    load: tuple[ObjectLoad, int] | None = None
    arrival: Arrival | None = None

    @property
    def is_staged(self) -> bool:
        """Whether it passes through staging blocks."""
        return self.staged is not None or (self.load is not None and self.load[0].slots is None)

    @property
    def is_verified(self) -> bool:
        """Whether a promotion, a load or a store verifies its layers."""
        return self.promotion is not None or self.load is not None or self.arrival is not None

    def failed(self) -> dict[int, QuireError]:
        """Return the chunks that the object tier, or a failed store, did not deliver, by position in the batch."""
        if self.arrival is not None and self.arrival.failed is not None:
            return dict.fromkeys(range(len(self.plan.bases)), self.arrival.failed)
        if self.load is None:
            return {}
        load, first = self.load
        count = len(self.plan.bases)
        return {at - first: error for at, error in load.failed.items() if first <= at < first + count}


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A layer of a batch, at `shift` of its bases, verified, or being `verified`.

    `block` is given back when it has left. `is_void`: its store has failed, and nothing is to be sent.
    """

    batch: Batch
    layer: int
    shift: int
    block: int | None
    verified: Verifying | None = None
    is_void: bool = False

    async def until(self, chunks: int) -> None:
        """Wait until its first `chunks` may be sent. Raises `CorruptData`."""
        if self.verified is not None:
            await self.verified.until(chunks)


class Batches:
    """The batches of one delivery of held chunks, of chunks of the object tier, and of chunks whose store is running.

    `close` when nothing reads the arena for it. `needed_s`: seconds from now until a layer is needed.

    `copied`: to memory of this host, by `carry`, which verifies. `is_prepared`: a delivery before had the same plan.
    """

    def __init__(
        self,
        reading: Reading,
        promotions: Promotions,
        descriptor: Descriptor,
        ranges: Sequence[ChunkRange],
        chunks: Sequence[Source],
        *,
        copied: bool = False,
        tenant: str = "",
        needed_s: Callable[[int], float] | None = None,
    ) -> None:
        self._reading = reading
        self._tenant = tenant
        self._copied = copied
        self._arena = reading.tiers.arena
        self._promotions = promotions
        self._descriptor = descriptor
        self._client = descriptor.target.worker_address
        self._targets = places(descriptor, ranges)
        self._blocks: set[int] = set()
        self._verifying: list[asyncio.Task[None]] = []
        self._joined: list[tuple[int, Promotion]] = []
        self._loads: list[ObjectLoad] = []
        self._may_fail = not all(isinstance(chunk, Copy) for chunk in chunks)
        copies = [chunk for chunk in chunks if isinstance(chunk, Copy)]
        are_here = len(copies) == len(chunks)
        plan = reading.prepared.find(copies, self._targets, descriptor.stride) if are_here else None
        self.is_prepared = plan is not None
        if plan is not None and (place := copies[0].memory) is not None:
            self.batches = [Batch(plan, copies, place.layer_stride)]
            return
        if any(copy.memory is None and copy.disk is None for copy in copies):
            raise ChunkMissing("a drive has just failed, and chunks with it", field="chunk_keys")
        self._checksums = checksums_of(chunks, descriptor.num_layers)
        try:
            self._make(chunks, needed_s)
        except BaseException:
            self._promotions.keep(asyncio.create_task(self._close()))
            raise
        if all(copy.memory is not None for copy in copies) and are_here:
            reading.prepared.keep(copies, self._targets, descriptor.stride, self.batches[0].plan)

    def _make(self, chunks: Sequence[Source], needed_s: Callable[[int], float] | None) -> None:
        """Join loads and promotions, and cut the chunks into batches."""
        loads = self._join_loads([chunk for chunk in chunks if isinstance(chunk, ObjectChunk)], needed_s)
        self.batches = [
            batch for start, stop in self._cuts(chunks) for batch in self._batch(chunks, start, stop, loads)
        ]

    @property
    def staged(self) -> bool:
        """Whether some of it passes through staging blocks."""
        return any(batch.is_staged for batch in self.batches)

    def failed(self) -> dict[int, QuireError]:
        """Return the chunks that the object tier or a store did not deliver, by position in the delivery."""
        failed, start = dict[int, QuireError](), 0
        if not self._may_fail:
            return failed
        for batch in self.batches:
            failed |= {start + at: error for at, error in batch.failed().items()}
            start += len(batch.plan.bases)
        return failed

    def carry(self, ready: ReadyBatch, memory: Bytes, bytes_max: int) -> Iterator[tuple[Callable[[], None], int]]:
        """Copies of a ready batch to a client's memory on this host, and their bytes; verified on the way."""
        batch, layer, shift = ready.batch, ready.layer, ready.shift
        loop, arena = asyncio.get_running_loop(), self._arena.view

        def heal(bad: list[int]) -> None:
            healing = self._reading.heal_slices(batch.copies, batch.plan.bases + shift, layer, bad)
            wait_in_thread(healing, loop)

        verify = heal if not batch.is_verified else None
        for parts in _grouped(batch.plan.carried(), bytes_max):
            size = sum(part.bytes for part in parts)
            yield partial(batch.plan.carry, arena, memory, layer, shift, parts, verify), size

    @property
    def ahead(self) -> int:
        """Number of batches to prepare while one is sent: drives need several reads, checksums only a core.

        Of small ones several, too: they take less time than the thread's answer.
        """
        if any(batch.is_staged or batch.is_verified for batch in self.batches):
            return _AHEAD_OF_DRIVES
        return max(1, min(_AHEAD_OF_WIRE, _AHEAD_BYTES // max(batch.plan.bytes for batch in self.batches)))

    async def prepare(self, batch: Batch, layer: int, due_s: float) -> ReadyBatch:
        """Bring a layer of a batch into the arena and verify it. Raises `CorruptData` for chunks that cannot be healed.

        Chunks in memory of the first layer are verified while they are sent; of a later layer there is time before.
        Copies to this host's memory verify on the way.
        """
        shift = layer * batch.stride
        if batch.promotion is not None:
            await batch.promotion.layer(layer, due_s)
            return ReadyBatch(batch, layer, shift, None)
        if batch.load is not None:
            return await self._prepare_load(batch, batch.load, layer, shift)
        if batch.arrival is not None:
            return await self._prepare_arrival(batch, batch.arrival, layer, shift)
        block = None
        if batch.staged is not None:
            shift = block = await self._arena.take_block(self._client)
            self._blocks.add(block)
            await self._read(batch.staged, layer, block, due_s)
        if self._copied:
            return ReadyBatch(batch, layer, shift, block)
        if batch.staged is None and layer == 0:
            verifying = Verifying(batch.plan.checks, self._arena.view, layer, shift)
            self._verifying.append(verifying.begin(self._verify_sent(batch, layer, shift, verifying)))
            return ReadyBatch(batch, layer, shift, None, verifying)
        await self._verify(batch, layer, shift)
        return ReadyBatch(batch, layer, shift, block)

    async def _prepare_load(self, batch: Batch, place: tuple[ObjectLoad, int], layer: int, shift: int) -> ReadyBatch:
        load, first = place
        if load.slots is not None:
            await load.layer(layer)
            return ReadyBatch(batch, layer, shift, None)
        block = await self._arena.take_block(self._client)  # in the order of the batches: the first never waits for it
        self._blocks.add(block)
        await load.layer(layer)
        count = len(batch.plan.bases)
        await load.take(layer, first, count, block, Shape(1, batch.plan.slice_bytes).slice_room)
        return ReadyBatch(batch, layer, block, block)

    async def _prepare_arrival(self, batch: Batch, arrival: Arrival, layer: int, shift: int) -> ReadyBatch:
        """Wait for the layer of a running store. One that fails costs only its own chunks."""
        try:
            await arrival.layer(layer)
        except QuireError:
            return ReadyBatch(batch, layer, shift, None, is_void=True)
        return ReadyBatch(batch, layer, shift, None)

    async def _verify_sent(self, batch: Batch, layer: int, shift: int, verifying: Verifying) -> None:
        await asyncio.wrap_future(self._reading.threads.submit(self._tenant, verifying.work))
        if verifying.found_corrupt:
            await self._verify(batch, layer, shift)

    async def _verify(self, batch: Batch, layer: int, shift: int) -> None:
        find = partial(batch.plan.checks.corrupt, self._arena.view, layer, shift)
        is_small = batch.plan.bytes <= _INLINE_BYTES
        bad = find() if is_small else await asyncio.wrap_future(self._reading.threads.submit(self._tenant, find))
        if bad:
            await self._reading.heal_slices(batch.copies, batch.plan.bases + shift, layer, bad)

    def release(self, ready: ReadyBatch) -> None:
        """The bytes of a ready batch have left."""
        if ready.block is not None and ready.block in self._blocks:
            self._blocks.discard(ready.block)
            self._arena.free_block(ready.block, self._client)

    async def close(self) -> None:
        """Give memory back. Goes on to its end when its caller is cancelled."""
        closing = asyncio.create_task(self._close())
        self._promotions.keep(closing)
        await asyncio.shield(closing)

    async def _close(self) -> None:
        for task in self._verifying:
            task.cancel()
        await asyncio.gather(*self._verifying, return_exceptions=True)
        loads, self._loads = self._loads, []
        if self._reading.loads is not None:
            for load in loads:
                await self._reading.loads.leave(load)
        for block in self._blocks:
            self._arena.free_block(block, self._client)
        self._blocks.clear()
        promotions, self._joined = self._joined, []
        for ticket, promotion in promotions:
            await self._promotions.leave(self._reading.tiers, ticket, promotion)

    # ----

    def _cuts(self, chunks: Sequence[Source]) -> list[tuple[int, int]]:
        """[start, stop) of runs of chunks of one tier; those on drives fit a block."""
        limit = max(1, self._arena.block_bytes // Shape(1, self._descriptor.slice_bytes).slice_room)
        tiers = [_tier(chunk) for chunk in chunks]
        cuts, start = [], 0
        for at in range(1, len(chunks) + 1):
            full = tiers[start] == "drives" and at - start >= limit
            if at == len(chunks) or tiers[at] != tiers[start] or full:
                cuts.append((start, at))
                start = at
        return cuts

    def _join_loads(
        self, chunks: Sequence[ObjectChunk], needed_s: Callable[[int], float] | None
    ) -> dict[bytes, tuple[ObjectLoad, int]]:
        """Return, by key, which load brings a chunk of the object tier, and its position there."""
        if not chunks:
            return {}
        assert self._reading.loads is not None, "what is elsewhere is in the object tier"
        places = self._reading.loads.join(chunks, self._tenant, needed_s)
        self._loads = joined(places)
        return {chunk.key: place for chunk, place in zip(chunks, places, strict=True)}

    def _batch(
        self,
        chunks: Sequence[Source],
        start: int,
        stop: int,
        loads: Mapping[bytes, tuple[ObjectLoad, int]],
    ) -> list[Batch]:
        if isinstance(chunks[start], ObjectChunk):
            keys = [chunk.key for chunk in chunks[start:stop] if isinstance(chunk, ObjectChunk)]
            return self._loaded(start, [loads[key] for key in keys])
        if isinstance(chunks[start], ArrivingChunk):
            return self._arriving(start, [chunk for chunk in chunks[start:stop] if isinstance(chunk, ArrivingChunk)])
        return self._here([chunk for chunk in chunks[start:stop] if isinstance(chunk, Copy)], start)

    def _loaded(self, start: int, places: Sequence[tuple[ObjectLoad, int]]) -> list[Batch]:
        """Batches of chunks that loads bring: neighbours in a load make up a batch."""
        batches, first = [], 0
        for at in range(1, len(places) + 1):
            load, position = places[at - 1]
            if at < len(places) and places[at] == (load, position + 1):
                continue
            position = places[first][1]
            part = slice(position, position + at - first)
            if load.slots is not None:
                bases, stride = load.slots.offsets[part], load.slots.layer_stride
            else:
                room = Shape(1, self._descriptor.slice_bytes).slice_room
                bases, stride = np.arange(at - first, dtype=np.int64) * room, 0
            plan = self._plan(start + first, start + at, bases)
            batches.append(Batch(plan, (), stride, load=(load, position)))
            first = at
        return batches

    def _arriving(self, start: int, chunks: Sequence[ArrivingChunk]) -> list[Batch]:
        """Batches of chunks whose store is running: those of one arrival make up a batch."""
        batches, first = [], 0
        for at in range(1, len(chunks) + 1):
            arrival = chunks[first].arrival
            if at < len(chunks) and chunks[at].arrival is arrival:
                continue
            bases = arrival.slots.offsets[[chunk.at for chunk in chunks[first:at]]]
            plan = self._plan(start + first, start + at, bases)
            batches.append(Batch(plan, (), arrival.slots.layer_stride, arrival=arrival))
            first = at
        return batches

    def _here(self, copies: Sequence[Copy], start: int) -> list[Batch]:
        """Batches of chunks from `start` on that are all in memory, or all on drives."""
        if copies[0].memory is not None:
            places = [copy.memory for copy in copies if copy.memory is not None]
            return [self._placed(copies, start, places, None)]
        ticket, promoted = self._promotions.join(self._reading, copies, self._tenant)
        self._joined += [
            (ticket, promotion)
            for promotion in {id(promotion_): promotion_ for promotion_, _ in promoted.values()}.values()
        ]
        batches, first = [], 0
        for at in range(1, len(copies) + 1):
            previous, current = (promoted.get(copies[i].number) if i < len(copies) else None for i in (at - 1, at))
            if at < len(copies) and (previous[0] if previous else None) is (current[0] if current else None):
                continue
            batch = copies[first:at]
            if previous is None:
                batches.append(self._staged(batch, start + first))
            else:
                places = [promoted[copy.number][1] for copy in batch]
                batches.append(self._placed(batch, start + first, places, previous[0]))
            first = at
        return batches

    def _placed(
        self, copies: Sequence[Copy], start: int, places: Sequence[MemoryPlace], promotion: Promotion | None
    ) -> Batch:
        bases = np.array([place.offset for place in places], dtype=np.int64)
        plan = self._plan(start, start + len(copies), bases)
        return Batch(plan, copies, places[0].layer_stride, promotion=promotion)

    def _staged(self, copies: Sequence[Copy], start: int) -> Batch:
        """Addresses count from the block that is taken for the layer."""
        pool = self._reading.tiers.pool
        assert pool is not None, "what is on a drive is in the pool"
        bases = np.arange(len(copies), dtype=np.int64) * copies[0].chunk.shape.slice_room
        source = pool.striped(copies, bases, np.zeros(len(copies), dtype=np.int64))
        return Batch(self._plan(start, start + len(copies), bases), copies, 0, staged=source)

    def _plan(self, start: int, stop: int, bases: npt.NDArray[np.int64]) -> BatchPlan:
        return BatchPlan(self._descriptor, self._checksums[:, start:stop], bases, self._targets[start:stop])

    async def _read(self, source: Striped, layer: int, block: int, due_s: float) -> None:
        assert self._reading.ring is not None, "what is on a drive is read through the ring"
        with tracer().start_as_current_span(names.STORAGE_READ, attributes={"quire.layer": layer}):
            await self._reading.ring.read(source.layer(layer).moved(self._arena.address + block), due_s)


def _grouped(parts: Sequence[Carried], bytes_max: int) -> Iterator[Sequence[Carried]]:
    start = size = 0
    for index, part in enumerate(parts):
        if size and size + part.bytes > bytes_max:
            yield parts[start:index]
            start, size = index, 0
        size += part.bytes
    yield parts[start:]


def _tier(chunk: Source) -> str:
    if isinstance(chunk, ObjectChunk):
        return "objects"
    if isinstance(chunk, ArrivingChunk):
        return "a store"
    return "memory" if chunk.memory is not None else "drives"
