"""Loads of chunks that only the object tier has, by runs of layers.

A load is a group of chunks. Its layers arrive in order, each of all its chunks at once, verified. It reads into slots
that the chunks keep, if there is memory for them: then deliveries that want the same chunks share the load, and whoever
comes later joins at the layer that it has reached. Otherwise a run of layers is read when the first of them is
waited for, and its bytes stay where the answers left them until the delivery copies them to its staging block.

A chunk that fails costs only itself: its bytes are zeros from that layer on, and outcomes of deliveries name it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from quire.model.errors import CorruptData, QuireError
from quire.model.records import ChunkRecord
from quire.telemetry import logger, names, tracer
from quire.transport.fair_threads import FairThreads
from quire_storage.core.chunks import Chunk
from quire_storage.core.object_reads import layer_ranges
from quire_storage.core.pool.slots import Shape
from quire_storage.ports import Clock
from quire_storage.tiers.object_tier import ChunkObjects, ChunkStart
from quire_storage.tiers.tiers import Slots, Tiers

Bytes = npt.NDArray[np.uint8]
Healer = Callable[[Chunk], Awaitable[Bytes | None]]
_GROUP_MAX: Final = 64
_RUNS_AHEAD: Final = 2
"""Of one that has ended, where its bytes have slots."""
_SHARE_MAX: Final = 0.5
"""Of memory, for one delivery: more would push out what it has just brought."""


@dataclass(frozen=True, slots=True)
class ObjectChunk:
    """A chunk of the object tier. `generation`: of the index entry that lists its object; 0 if unknown."""

    key: bytes
    generation: int
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadParts:
    """Parts that all loads of a node share. `heal`: returns a chunk's sound (L, S) bytes from elsewhere, or None."""

    tiers: Tiers
    objects: ChunkObjects
    threads: FairThreads
    clock: Clock
    heal: Healer


class ObjectLoad:
    """Reads a group of chunks of one shape. `layer` waits for a layer; `failed` has the chunks without sound bytes.

    `slots`: where the chunks go; None for a load whose layers are taken by `take`. `runs`: of layers, as they are read.
    `is_prefetched`: a client wants the chunks in memory, and look-ups are to find them there.
    """

    def __init__(
        self,
        parts: LoadParts,
        chunks: Sequence[ObjectChunk],
        slots: Slots | None,
        tenant: str,
        needed_s: Callable[[int], float] | None,
        runs: Sequence[range],
    ) -> None:
        self._parts = parts
        self._chunks = chunks
        self.slots = slots
        self._tenant = tenant
        self._needed_s = needed_s
        self._began_s = parts.clock.monotonic_s()
        self.shape = chunks[0].shape
        self._runs = runs
        self._run_of = [number for number, run in enumerate(self._runs) for _ in run]
        loop = asyncio.get_running_loop()
        self._opened: list[asyncio.Future[ChunkStart | None]] = [loop.create_future() for _ in chunks]
        self._reading: list[asyncio.Task[None]] = []
        self._held: dict[int, list[memoryview | None]] = {}
        self._taken: Counter[int] = Counter()
        self._jobs: set[Future[Any]] = set()
        self.failed: dict[int, QuireError] = {}
        self.users = 0
        self.is_prefetched = False
        if slots is not None:
            self._extend(1)

    @property
    def staged_bytes(self) -> int:
        """The most bytes that wait to be taken, of a load without slots."""
        return len(self._chunks) * self.shape.slice_room * max(map(len, self._runs)) if self.slots is None else 0

    @property
    def complete(self) -> bool:
        """Whether every layer of it was read."""
        return len(self._reading) == len(self._runs) > 0 and all(
            task.done() and not task.cancelled() and task.exception() is None for task in self._reading
        )

    def complete_chunks(self) -> list[tuple[int, Chunk]]:
        """Return the chunks that were read whole, with their positions, once it is complete."""
        starts = enumerate(opened.result() for opened in self._opened)
        return [(at, start.chunk) for at, start in starts if start is not None and at not in self.failed]

    def generations(self) -> dict[bytes, int]:
        """Return the generations of the index entries that list its chunks, by key, where the look-up named them."""
        return {chunk.key: chunk.generation for chunk in self._chunks if chunk.generation}

    def is_sound(self, at: int) -> bool:
        """Whether nothing has failed so far that a chunk depends on."""
        return at not in self.failed and not any(
            task.done() and (task.cancelled() or task.exception() is not None) for task in self._reading
        )

    async def layer(self, layer: int) -> None:
        """Wait until a layer of all chunks that have not failed is here, verified."""
        run = self._run_of[layer]
        self._extend(run)
        await asyncio.shield(self._reading[run])

    async def whole(self) -> None:
        """Wait until all layers are here, verified, of the chunks that have not failed."""
        self._extend(len(self._runs) - 1)
        await asyncio.gather(*map(asyncio.shield, self._reading))

    async def take(self, layer: int, first: int, count: int, base: int, stride: int) -> None:
        """Copy a layer of `count` chunks from `first` on to `base` of the arena, `stride` apart. Once for each."""
        pieces = self._held[layer]
        await self._job(partial(self._copy_out, pieces, first, count, base, stride))
        pieces[first : first + count] = [None] * count
        self._taken[layer] += count
        if self._taken[layer] == len(pieces):
            del self._held[layer]

    async def settle(self) -> None:
        """Stop; return when nothing writes to its slots."""
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        await asyncio.gather(*map(asyncio.wrap_future, self._jobs), return_exceptions=True)
        self._jobs.clear()
        self._held.clear()

    # ----

    def _extend(self, run: int) -> None:
        """Begin the runs of layers up to one, if they have not begun."""
        for number in range(len(self._reading), min(len(self._runs), run + 1)):
            task = asyncio.create_task(self._read(number))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._reading.append(task)

    async def _read(self, number: int) -> None:
        run = self._runs[number]
        due_s = self._began_s + (self._needed_s(run.start) if self._needed_s is not None else 1e-3 * run.start)
        attributes = {"quire.layer": run.start, "quire.layers": len(run)}
        with tracer().start_as_current_span(names.STORAGE_OBJECT_READ, attributes=attributes):
            parts = await self._read_chunks(run, due_s)
        if self.slots is None:
            for offset, layer in enumerate(run):
                self._held[layer] = [self._slice(part, offset) for part in parts]
        else:
            self._extend(number + _RUNS_AHEAD)

    async def _read_chunks(self, run: range, due_s: float) -> list[memoryview | None]:
        """Read layers of all chunks, verify them, and place them in their slots, all that have arrived at a time."""
        parts: list[memoryview | None] = [None] * len(self._chunks)
        arrived, news = list[int](), asyncio.Event()

        async def read(at: int) -> None:
            parts[at] = await (self._start(at, run, due_s) if run.start == 0 else self._more(at, run, due_s))
            arrived.append(at)
            news.set()

        reads = asyncio.gather(*map(read, range(len(self._chunks))))
        reads.add_done_callback(lambda _: news.set())
        try:
            remaining = len(self._chunks)
            while remaining:
                await news.wait()
                news.clear()
                group = arrived.copy()
                arrived.clear()
                remaining -= len(group)
                if reads.done():
                    reads.result()  # raises what no chunk's failure explains
                unsound = await self._job(partial(self._place, group, run, parts))
                await asyncio.gather(*(self._replace(at, run, parts) for at in unsound))
        finally:
            reads.cancel()
            await asyncio.gather(reads, return_exceptions=True)
        return parts

    async def _replace(self, at: int, run: range, parts: list[memoryview | None]) -> None:
        """Take unsound layers of a chunk from elsewhere; zeros, where they are nowhere."""
        if parts[at] is not None:
            parts[at] = await self._heal(at, run, self._opened[at].result())
            if not await self._job(partial(self._place, [at], run, parts)):
                return
        parts[at] = None
        await self._job(partial(self._blank, at, run))

    async def _start(self, at: int, run: range, due_s: float) -> memoryview | None:
        chunk, opened = self._chunks[at], self._opened[at]
        name = (chunk.key, chunk.generation)
        try:
            start = await self._parts.objects.begin(name, chunk.shape, run.stop, self._tenant, due_s)
            opened.set_result(start)
            return start.data
        except QuireError as error:
            self._fail(at, error)
            return None
        finally:
            if not opened.done():
                opened.set_result(None)

    async def _more(self, at: int, run: range, due_s: float) -> memoryview | None:
        """Read later layers of a chunk; concurrently with its first ones, if the name of its object is known."""
        chunk, read = self._chunks[at], partial(self._parts.objects.layers, run=run, tenant=self._tenant, due_s=due_s)
        early, name, opened = None, (chunk.key, chunk.generation), self._opened[at]
        try:
            if not opened.done() and chunk.generation:
                with contextlib.suppress(QuireError):  # the start may come from another object
                    early = await read(name, chunk.shape)
            start = await asyncio.shield(opened)
            if start is None or at in self.failed:
                return None
            return early if early is not None and start.name == name else await read(start.name, chunk.shape)
        except QuireError as error:
            logger().warning("the object tier lost a chunk while it was read", error=str(error))
            self._fail(at, error)
            return None

    def _fail(self, at: int, error: QuireError) -> None:
        self.failed.setdefault(at, error)

    def _place(self, group: Sequence[int], run: range, parts: Sequence[memoryview | None]) -> list[int]:
        """Verify layers of chunks and copy them to their slots, if they have any; the unsound ones. For a thread."""
        return [at for at in group if not self._place_one(at, run, parts[at])]

    def _place_one(self, at: int, run: range, part: memoryview | None) -> bool:
        start = self._opened[at].result()
        if start is None or part is None:
            return False
        for offset, layer in enumerate(run):
            piece = self._slice(part, offset)
            if piece is None or crc32(piece) != start.chunk.checksums[layer]:
                return False
            if self.slots is not None:
                self._row(at, layer)[:] = np.frombuffer(piece, dtype=np.uint8)
        return True

    def _blank(self, at: int, run: range) -> None:
        """Write zeros for layers that failed: another tenant's bytes may be in the slot. For a thread."""
        for layer in run if self.slots is not None else ():
            self._row(at, layer)[:] = 0

    def _row(self, at: int, layer: int) -> Bytes:
        assert self.slots is not None, "chunks have slots"
        offset = int(self.slots.offsets[at]) + layer * self.slots.layer_stride
        row: Bytes = self._parts.tiers.arena.view[offset : offset + self.shape.slice_bytes]
        return row

    async def _heal(self, at: int, run: range, start: ChunkStart | None) -> memoryview | None:
        """Read layers of a chunk from another node, or another object; it fails where there is none."""
        assert start is not None, "it has a header"
        payload = await self._parts.heal(start.chunk)
        if payload is not None:
            return memoryview(payload[run.start : run.stop].tobytes())
        layers = f"layers {run.start} to {run.stop - 1} of {start.chunk.key.hex()}"
        self._fail(at, CorruptData(f"{layers} have no sound bytes anywhere"))
        return None

    def _copy_out(self, pieces: Sequence[memoryview | None], first: int, count: int, base: int, stride: int) -> None:
        size, arena = self.shape.slice_bytes, self._parts.tiers.arena.view
        for offset, piece in enumerate(pieces[first : first + count]):
            to = base + offset * stride
            arena[to : to + size] = np.frombuffer(piece, dtype=np.uint8) if piece is not None else 0

    def _slice(self, part: memoryview | None, offset: int) -> memoryview | None:
        size = self.shape.slice_bytes
        return part[offset * size : (offset + 1) * size] if part is not None else None

    async def _job(self, work: Callable[[], Any]) -> Any:
        """Run work in a thread; `settle` waits for it, whatever becomes of the caller."""
        job = self._parts.threads.submit(self._tenant, work)
        self._jobs.add(job)
        try:
            return await asyncio.wrap_future(job)
        finally:
            if job.done():
                self._jobs.discard(job)


class ObjectLoads:
    """Loads under way at this node."""

    def __init__(self, parts: LoadParts) -> None:
        self._parts = parts
        self._running: dict[bytes, tuple[ObjectLoad, int]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._staged_bytes = 0

    async def find(self, records: Sequence[ChunkRecord], shape: Shape) -> dict[bytes, ObjectChunk]:
        """Return the chunks that the object tier has, as far as is known, by key. Raises `LayoutInvalid`."""
        if not records:
            return {}
        self._parts.tiers.check_shape(shape)
        generations = await self._parts.tiers.object_generations(records)
        unlisted = [key for key, generation in generations.items() if not generation]
        absent = await self._parts.objects.look_for(unlisted)
        return {key: ObjectChunk(key, at, shape) for key, at in generations.items() if key not in absent}

    async def bring(self, chunks: Sequence[ObjectChunk], until_s: float) -> set[bytes]:
        """Read chunks of one shape into memory; the keys of those that are there now.

        The index lists them for this node when their loads have ended. Chunks for which there is no memory are left
        out. `until_s`: when they are wanted, on the node's monotonic clock.
        """
        left_s = max(0.0, until_s - self._parts.clock.monotonic_s())
        places = self._places(chunks, "", lambda _: left_s, staged=False)
        loads = joined(places.values())
        for load in loads:
            load.is_prefetched = True
        try:
            await asyncio.gather(*(load.whole() for load in loads))
        finally:
            await asyncio.gather(*map(self.leave, loads))
        return {key for key, (load, at) in places.items() if load.complete and at not in load.failed}

    def join(
        self, chunks: Sequence[ObjectChunk], tenant: str, needed_s: Callable[[int], float] | None
    ) -> list[tuple[ObjectLoad, int]]:
        """Join loads, or begin them; returns for each chunk its load and its position there.

        `leave` each of the loads once.
        """
        places = self._places(chunks, tenant, needed_s, staged=True)
        return [places[chunk.key] for chunk in chunks]

    def _places(
        self,
        chunks: Sequence[ObjectChunk],
        tenant: str,
        needed_s: Callable[[int], float] | None,
        *,
        staged: bool,
    ) -> dict[bytes, tuple[ObjectLoad, int]]:
        """Join loads, or begin them. `staged`: also for chunks for which there is no memory."""
        places = dict[bytes, tuple[ObjectLoad, int]]()
        for chunk in chunks:
            running = self._running.get(chunk.key)
            if running is not None and running[0].shape == chunk.shape and running[0].is_sound(running[1]):
                places[chunk.key] = running
        unread = [chunk for chunk in chunks if chunk.key not in places]
        arena, shape, speed = self._parts.tiers.arena, chunks[0].shape, self._parts.objects.reads.speed
        plan = partial(
            layer_ranges, shape.num_layers, len(unread) * shape.slice_bytes, len(unread), speed, needed_s=needed_s
        )
        runs, staged_runs = plan() if unread else [], list[range]()
        room = int(_SHARE_MAX * arena.slots.capacity_bytes)
        group_max = max(1, min(_GROUP_MAX, arena.block_bytes // chunks[0].shape.slice_room))
        for first in range(0, len(unread), group_max):
            group = unread[first : first + group_max]
            size = len(group) * group[0].shape.slot_bytes
            slots = self._parts.tiers.reserve_now(group[0].shape, len(group)) if size <= room else None
            if slots is None and not staged:
                break
            room = room - size if slots is not None else 0  # what is evicted in vain is not evicted again
            if slots is None and not staged_runs:
                layers_max = self._room_to_stage() // (len(unread) * shape.slice_room)
                staged_runs = plan(layers_max=max(1, layers_max))
            load = ObjectLoad(self._parts, group, slots, tenant, needed_s, runs if slots is not None else staged_runs)
            self._staged_bytes += load.staged_bytes
            for at, chunk in enumerate(group):
                places[chunk.key] = (load, at)
                if slots is not None:
                    self._running[chunk.key] = (load, at)
        for load in joined(places.values()):
            load.users += 1
        return places

    def _room_to_stage(self) -> int:
        """Return how many bytes another delivery may have waiting at a time: half of what the others leave."""
        return max(0, 2 * self._parts.tiers.arena.staging_bytes - self._staged_bytes) // 2

    async def leave(self, load: ObjectLoad) -> None:
        """A delivery needs a load no more. Goes on to its end when its caller is cancelled."""
        load.users -= 1
        if load.users:
            return
        for key in [key for key, (running, _) in self._running.items() if running is load]:
            del self._running[key]  # at once: whoever comes now begins another
        leaving = asyncio.create_task(self._end(load))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        await asyncio.shield(leaving)

    async def _end(self, load: ObjectLoad) -> None:
        """Keep the chunks of a load in memory if all layers were read; free its slots otherwise."""
        assert not load.users, "none joins a load that ends"
        read: list[tuple[int, Chunk]] = []
        try:
            read = load.complete_chunks() if load.complete else []
        finally:
            await load.settle()
            self._staged_bytes -= load.staged_bytes
            if load.slots is not None:
                self._parts.tiers.end_load(load.slots, read)
        if load.is_prefetched:
            listed = load.generations()
            await self.list_copies({chunk.key: listed[chunk.key] for _, chunk in read if chunk.key in listed})

    async def list_copies(self, generations: Mapping[bytes, int]) -> None:
        """Have the index list this node for copies that came from the object tier: look-ups find them here then."""
        if not generations:
            return
        try:
            await self._parts.tiers.list_brought(generations)
        except QuireError as error:
            logger().warning("prefetched chunks are not listed", chunks=len(generations), error=str(error))


def joined(places: Iterable[tuple[ObjectLoad, int]]) -> list[ObjectLoad]:
    """Return each load once, in order."""
    return list({id(load): load for load, _ in places}.values())
