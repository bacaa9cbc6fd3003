"""The chunk batches of a delivery: the place of each in the arena; its bytes are brought there and verified.

Chunks in memory are used where they are. Chunks on a drive pass through a staging block, or, if they are wanted in
memory from now on, are read straight into the slots that they will keep: either way the drive writes each slice where
the network reads it, and nothing is copied in between. Several deliveries of one prefix share its promotion: one reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import Descriptor
from quire.model.errors import ChunkMissing, CorruptData
from quire.model.ranges import ChunkRange
from quire.telemetry import names, tracer
from quire.transport.copying import wait_in_thread
from quire.transport.fair_threads import FairThreads
from quire_storage.core.checksums import Checksums
from quire_storage.core.chunks import Copy, MemoryPlace
from quire_storage.core.plan import BatchPlan, Carried, places, unheard, verification
from quire_storage.core.pool.slots import Shape
from quire_storage.core.pool.striped import Striped
from quire_storage.core.prepared import PreparedRuns
from quire_storage.tiers.ring import Ring
from quire_storage.tiers.tiers import Tiers

Bytes = npt.NDArray[np.uint8]
_AHEAD_OF_DRIVES = 3
_AHEAD_OF_WIRE, _AHEAD_BYTES = 6, 8 << 20
Healer = Callable[[Copy], Awaitable[Bytes | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Shared parts with which every delivery of a node reads."""

    tiers: Tiers
    ring: Ring | None
    threads: FairThreads
    heal: Healer
    prepared: PreparedRuns = field(default_factory=PreparedRuns)

    async def heal_slices(
        self, copies: Sequence[Copy], starts: npt.NDArray[np.int64], layer: int, bad: Sequence[int]
    ) -> None:
        """Put slices right that do not match, from another copy. Raises `CorruptData` where there is none.

        `starts`: where in the arena the slices of `layer` lie.
        """
        unsound = 0
        for index in bad:
            payload = await self.heal(copies[index])
            if payload is None:
                unsound += 1
                continue
            at = int(starts[index])
            self.tiers.arena.view[at : at + copies[index].chunk.slice_bytes] = payload[layer]
        if unsound:
            raise CorruptData(f"{unsound} chunks have no sound bytes in layer {layer}, here or elsewhere")


class Promotion:
    """Copies on a drive, read into slots of their own, each layer once, for every delivery that wants them."""

    def __init__(
        self, reading: Reading, number: int, copies: Sequence[Copy], places: Sequence[MemoryPlace], tenant: str
    ) -> None:
        self.number = number
        self._tenant = tenant
        self._reading = reading
        self._copies = copies
        self._bases = np.array([place.offset for place in places], dtype=np.int64)
        self._stride = places[0].layer_stride
        pool, arena = reading.tiers.pool, reading.tiers.arena
        assert pool is not None, "what is on a drive is in the pool"
        strides = np.full(len(copies), self._stride)
        self._source = pool.striped(copies, self._bases + arena.address, strides)
        self._verify = verification(_checksums(copies), self._bases, copies[0].chunk.slice_bytes)
        self._layers: dict[int, asyncio.Task[None]] = {}
        self._sound: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every byte of it was read and verified."""
        return len(self._sound) == self._copies[0].chunk.num_layers

    async def layer(self, layer: int, due_s: float) -> None:
        """Return when the layer is in memory, verified. Raises `CorruptData`."""
        if layer not in self._layers:
            self._layers[layer] = asyncio.create_task(self._read(layer, due_s))
            self._layers[layer].add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._layers[layer])

    async def settle(self) -> None:
        """Stop; return when no read is under way. The ring holds a cancelled read until the drives let go."""
        for task in self._layers.values():
            task.cancel()
        await asyncio.gather(*self._layers.values(), return_exceptions=True)

    async def _read(self, layer: int, due_s: float) -> None:
        reading, shift = self._reading, layer * self._stride
        assert reading.ring is not None, "what is on a drive is read through the ring"
        with tracer().start_as_current_span(names.STORAGE_READ, attributes={"quire.layer": layer}):
            await reading.ring.read(self._source.layer(layer), due_s)
        verify = partial(self._verify, reading.tiers.arena.view, layer, shift, unheard)
        bad = await asyncio.wrap_future(reading.threads.submit(self._tenant, verify))
        if bad:
            await reading.heal_slices(self._copies, self._bases + shift, layer, bad)
        self._sound.add(layer)


class Promotions:
    """Promotions under way at this node."""

    def __init__(self) -> None:
        self._running: dict[int, Promotion] = {}
        self._users: dict[int, int] = {}
        self._settling: set[int] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    def join(
        self, reading: Reading, copies: Sequence[Copy], tenant: str = "", *, prefetch: bool = False
    ) -> tuple[int, dict[int, tuple[Promotion, MemoryPlace]]]:
        """Join or begin promotions of copies that are read from a drive.

        Returns a ticket, and the promoted ones with their places, by number.

        `tenant`: takes the turns at the threads that verify. `prefetch`: a client wants them in memory.
        """
        ticket, slots = reading.tiers.promote(copies, prefetch=prefetch)
        groups: dict[int, list[Copy]] = {}
        for copy in copies:
            if copy.number in slots:
                groups.setdefault(slots[copy.number][0], []).append(copy)
        for number, group in groups.items():
            if number in self._settling:
                # Its last user has left, and its reads are being stopped: these copies are read separately.
                reading.tiers.end_promotion(ticket, number, complete=False)
                for copy in group:
                    del slots[copy.number]
                continue
            if number not in self._running:
                places = [slots[copy.number][1] for copy in group]
                self._running[number] = Promotion(reading, number, group, places, tenant)
            self._users[number] = self._users.get(number, 0) + 1
        return ticket, {copy: (self._running[number], place) for copy, (number, place) in slots.items()}

    async def leave(self, tiers: Tiers, ticket: int, promotion: Promotion) -> None:
        """A delivery needs a promotion no more. It ends, and its slots are freed, also when the caller is cancelled."""
        self._users[promotion.number] -= 1
        last = not self._users[promotion.number]
        if last:
            del self._users[promotion.number], self._running[promotion.number]
            self._settling.add(promotion.number)
        leaving = asyncio.create_task(self._leave(tiers, ticket, promotion, last=last))
        self.keep(leaving)
        await asyncio.shield(leaving)

    def keep(self, cleanup: asyncio.Task[None]) -> None:
        """Hold a task that has to end even if no caller waits for it."""
        self._leaving.add(cleanup)
        cleanup.add_done_callback(self._leaving.discard)

    async def _leave(self, tiers: Tiers, ticket: int, promotion: Promotion, *, last: bool) -> None:
        if last:
            try:
                await promotion.settle()
            finally:
                self._settling.discard(promotion.number)
        tiers.end_promotion(ticket, promotion.number, complete=promotion.complete)


@dataclass(slots=True)
class Batch:
    """Consecutive chunks of a delivery. `stride`: between layers in the arena; 0 for one that is staged."""

    plan: BatchPlan
    copies: Sequence[Copy]
    stride: int
    staged: Striped | None = None
    promotion: Promotion | None = None


class Verifying:
    """A layer of a batch that is verified chunk after chunk, in a thread, while those before are sent."""

    def __init__(self) -> None:
        self._sound = 0
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None

    def told(self, sound: int) -> None:
        """Note that the first `sound` chunks match. Called by the thread."""
        self._loop.call_soon_threadsafe(self._hear, sound)

    def end(self, _: asyncio.Task[None]) -> None:
        """All of them match, or `until` raises why not."""
        self._news.set()

    async def until(self, chunks: int) -> None:
        """Wait until the first `chunks` match. Raises `CorruptData` for chunks that cannot be healed."""
        assert self.task is not None, "it has begun"
        while self._sound < chunks:
            if self.task.done():
                self.task.result()
                break
            self._news.clear()
            await self._news.wait()

    def _hear(self, sound: int) -> None:
        self._sound = max(self._sound, sound)
        self._news.set()


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A layer of a batch, at `shift` of its bases, verified, or being `verified`.

    `block` is given back when it has left.
    """

    batch: Batch
    layer: int
    shift: int
    block: int | None
    verified: Verifying | None = None

    async def until(self, chunks: int) -> None:
        """Wait until its first `chunks` may be sent. Raises `CorruptData`."""
        if self.verified is not None:
            await self.verified.until(chunks)


class Batches:
    """The batches of one delivery of held chunks. `close` when nothing reads the arena for it.

    `copied`: to memory of this host, by `carry`, which verifies. `is_prepared`: a delivery before had the same plan.
    """

    def __init__(
        self,
        reading: Reading,
        promotions: Promotions,
        descriptor: Descriptor,
        ranges: Sequence[ChunkRange],
        copies: Sequence[Copy],
        *,
        copied: bool = False,
        tenant: str = "",
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
        plan = reading.prepared.find(copies, self._targets, descriptor.stride)
        self.is_prepared = plan is not None
        if plan is not None and (place := copies[0].memory) is not None:
            self.batches = [Batch(plan, copies, place.layer_stride)]
            return
        if any(copy.memory is None and copy.disk is None for copy in copies):
            raise ChunkMissing("a drive has just failed, and chunks with it", field="chunk_keys")
        self._checksums = _checksums(copies)
        self.batches = [batch for start, stop in self._cuts(copies) for batch in self._batch(copies, start, stop)]
        if all(copy.memory is not None for copy in copies):
            reading.prepared.keep(copies, self._targets, descriptor.stride, self.batches[0].plan)

    @property
    def staged(self) -> bool:
        """Whether some of it passes through staging blocks."""
        return any(batch.staged is not None for batch in self.batches)

    def carry(self, ready: ReadyBatch, memory: Bytes, bytes_max: int) -> Iterator[tuple[Callable[[], None], int]]:
        """Copies of a ready batch to a client's memory on this host, and their bytes; verified on the way."""
        batch, layer, shift = ready.batch, ready.layer, ready.shift
        loop, arena = asyncio.get_running_loop(), self._arena.view

        def heal(bad: list[int]) -> None:
            healing = self._reading.heal_slices(batch.copies, batch.plan.bases + shift, layer, bad)
            wait_in_thread(healing, loop)

        verify = heal if batch.promotion is None else None
        for parts in _grouped(batch.plan.carried(), bytes_max):
            size = sum(part.bytes for part in parts)
            yield partial(batch.plan.carry, arena, memory, layer, shift, parts, verify), size

    @property
    def ahead(self) -> int:
        """Number of batches to prepare while one is sent: drives need several reads, checksums only a core.

        Of small ones several, too: they take less time than the thread's answer.
        """
        if any(batch.staged is not None or batch.promotion is not None for batch in self.batches):
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
        block = None
        if batch.staged is not None:
            shift = block = await self._arena.take_block(self._client)
            self._blocks.add(block)
            await self._read(batch.staged, layer, block, due_s)
        if self._copied:
            return ReadyBatch(batch, layer, shift, block)
        if batch.staged is None and layer == 0:
            verifying = Verifying()
            verifying.task = asyncio.create_task(self._verify(batch, layer, shift, verifying.told))
            verifying.task.add_done_callback(verifying.end)
            self._verifying.append(verifying.task)
            return ReadyBatch(batch, layer, shift, None, verifying)
        await self._verify(batch, layer, shift, unheard)
        return ReadyBatch(batch, layer, shift, block)

    async def _verify(self, batch: Batch, layer: int, shift: int, sound: Callable[[int], None]) -> None:
        verify = partial(batch.plan.corrupt, self._arena.view, layer, shift, sound)
        bad = await asyncio.wrap_future(self._reading.threads.submit(self._tenant, verify))
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
        for block in self._blocks:
            self._arena.free_block(block, self._client)
        self._blocks.clear()
        promotions, self._joined = self._joined, []
        for ticket, promotion in promotions:
            await self._promotions.leave(self._reading.tiers, ticket, promotion)

    # ----

    def _cuts(self, copies: Sequence[Copy]) -> list[tuple[int, int]]:
        """[start, stop) of runs of chunks that are all in memory, or all on drives; the latter fit a block."""
        limit = max(1, self._arena.block_bytes // Shape(1, copies[0].chunk.slice_bytes).slice_room)
        cuts, start = [], 0
        for at in range(1, len(copies) + 1):
            full = copies[start].memory is None and at - start >= limit
            if at == len(copies) or (copies[at].memory is None) != (copies[start].memory is None) or full:
                cuts.append((start, at))
                start = at
        return cuts

    def _batch(self, copies: Sequence[Copy], start: int, stop: int) -> list[Batch]:
        batch = copies[start:stop]
        if batch[0].memory is not None:
            places = [copy.memory for copy in batch if copy.memory is not None]
            return [self._placed(copies, start, stop, places, None)]
        ticket, promoted = self._promotions.join(self._reading, batch, self._tenant)
        self._joined += [
            (ticket, promotion)
            for promotion in {id(promotion_): promotion_ for promotion_, _ in promoted.values()}.values()
        ]
        batches, first = [], start
        for at in range(start + 1, stop + 1):
            previous, current = (promoted.get(copies[i].number) if i < stop else None for i in (at - 1, at))
            if at < stop and (previous[0] if previous else None) is (current[0] if current else None):
                continue
            if previous is None:
                batches.append(self._staged(copies, first, at))
            else:
                places = [promoted[copy.number][1] for copy in copies[first:at]]
                batches.append(self._placed(copies, first, at, places, previous[0]))
            first = at
        return batches

    def _placed(
        self, copies: Sequence[Copy], start: int, stop: int, places: Sequence[MemoryPlace], promotion: Promotion | None
    ) -> Batch:
        bases = np.array([place.offset for place in places], dtype=np.int64)
        plan = self._plan(start, stop, bases)
        return Batch(plan, copies[start:stop], places[0].layer_stride, promotion=promotion)

    def _staged(self, copies: Sequence[Copy], start: int, stop: int) -> Batch:
        """Addresses count from the block that is taken for the layer."""
        pool, batch = self._reading.tiers.pool, copies[start:stop]
        assert pool is not None, "what is on a drive is in the pool"
        bases = np.arange(len(batch), dtype=np.int64) * batch[0].chunk.shape.slice_room
        source = pool.striped(batch, bases, np.zeros(len(batch), dtype=np.int64))
        return Batch(self._plan(start, stop, bases), batch, 0, staged=source)

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


def _checksums(copies: Sequence[Copy]) -> Checksums:
    """(layers, copies)."""
    return np.stack([copy.chunk.checksums for copy in copies], axis=1)
