"""A store: chunks out of a client's memory, layer by layer as it produces them, into slots.

Each layer is read straight into its slots; a thread takes the checksums while the next one is read. A slot counts only
once its bytes are where the asked durability wants them and its key is indexed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from quire.model.errors import DeadlineExceeded
from quire.model.transfers import IngestOrder
from quire.telemetry import names, tracer
from quire.transport import Peer, Region, Remote, Transport
from quire.transport.fair_threads import FairThreads
from quire_storage.core.checksums import Checksums, slice_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.core.pool.extents import Extent, extents
from quire_storage.errors import SlotsUnsettled
from quire_storage.ingest.announced_layers import AnnouncedLayers
from quire_storage.ingest.arrivals import Arrival
from quire_storage.tiers.tiers import Slots

_READ_BYTES_MAX = 4 << 20
_READS_MAX = 8
_COPY_BYTES = 512 << 10
_SETTLE_TIMEOUT_S = 2.0
Bytes = npt.NDArray[np.uint8]


async def pull(
    call: IngestOrder,
    slots: Slots,
    arena: Bytes,
    region: Region,
    transport: Transport,
    produced: AnnouncedLayers,
    threads: FairThreads,
    arrival: Arrival,
    timeout_s: float,
    now_ms: int,
) -> list[Chunk]:
    """Read every layer straight into its slots. Returns the chunks with their checksums, not yet readable.

    `arrival` receives each layer whose bytes are in the slots and whose checksums are taken.
    """
    peer = transport.connect(call.source.worker_address)
    remote = await peer.remote(call.source)
    unwatch = peer.on_failure(lambda error: produced.fail(call.store_id, error))
    source = _Source(peer, remote, peer.memory(remote), timeout_s)
    pulling = _Pulling(call, slots, arena, region, source, threads, arrival)
    layers = call.layout.num_layers
    at_once = pulling.layers_at_once if call.source_complete else 1
    try:
        for first in range(0, layers, at_once):
            if not call.source_complete:
                await produced.wait(call.store_id, first, timeout_s)
            with tracer().start_as_current_span(names.STORAGE_PULL, attributes={"quire.layer": first}):
                await pulling.layers(first, min(layers, first + at_once))
        await pulling.end()
    finally:
        await pulling.settle()
        unwatch()
        remote.close()
        produced.forget(call.store_id)
    return [
        Chunk(record, layers, call.layout.slice_bytes, pulling.checksums[:, index].copy(), now_ms)
        for index, record in enumerate(call.records)
    ]


@dataclass(frozen=True, slots=True)
class _Source:
    """The client's memory. `memory`: its bytes, where they are of this host."""

    peer: Peer
    remote: Remote
    memory: Bytes | None
    timeout_s: float


class _Pulling:
    """Layers into slots; their checksums are taken in a thread, while the next ones are read."""

    def __init__(
        self,
        call: IngestOrder,
        slots: Slots,
        arena: Bytes,
        region: Region,
        source: _Source,
        threads: FairThreads,
        arrival: Arrival,
    ) -> None:
        self._arrival = arrival
        self._call = call
        self._slots = slots
        self._arena = arena
        self._region = region
        self._source = source
        self._threads = threads
        self._size = call.layout.slice_bytes
        self._parts: list[tuple[int, Extent]] = []  # where in a layer of the source each part of the slots' layer is
        at = 0
        for run in call.source_ranges:
            for part in extents(slots.offsets[at : at + run.count], self._size, _READ_BYTES_MAX):
                self._parts.append((run.first + part.first, replace(part, first=at + part.first)))
            at += run.count
        self.checksums: Checksums = np.empty((call.layout.num_layers, len(slots.offsets)), dtype=np.uint32)
        self._working: deque[asyncio.Future[None]] = deque()

    @property
    def layers_at_once(self) -> int:
        """Number of layers to read at a time: of small layers several, so that reads overlap."""
        return max(1, _READ_BYTES_MAX * _READS_MAX // 2 // (self._size * len(self._slots.offsets)))

    async def layers(self, first: int, stop: int) -> None:
        """Read them, and let the thread begin with them; it is at most one call behind."""
        if self._source.memory is not None:
            work = partial(self._copy, self._source.memory, first, stop)
        else:
            await self._read(first, stop)
            work = partial(self._sum, first, stop)
        working = asyncio.wrap_future(self._threads.submit(self._call.tenant, work))
        working.add_done_callback(partial(self._summed, range(first, stop)))
        self._working.append(working)
        if len(self._working) > 1:
            await self._take()

    async def end(self) -> None:
        """Wait for the thread."""
        while self._working:
            await self._take()

    async def settle(self) -> None:
        """However it ended: a slot must not be given back under a thread."""
        await _ended(self._working)

    def _summed(self, layers: range, work: asyncio.Future[None]) -> None:
        if not work.cancelled() and work.exception() is None:
            self._arrival.reached(layers)

    async def _take(self) -> None:
        await asyncio.shield(self._working[0])
        self._working.popleft()

    async def _read(self, first: int, stop: int) -> None:
        source, size = self._source, self._size
        reads = [
            (part.offset + layer * self._slots.layer_stride, part.count * size, self._place(layer, chunk))
            for layer in range(first, stop)
            for chunk, part in self._parts
        ]
        for start in range(0, len(reads), _READS_MAX):
            getting = [
                asyncio.ensure_future(
                    source.peer.get(self._region, at, length, source.remote, place, timeout_s=source.timeout_s)
                )
                for at, length, place in reads[start : start + _READS_MAX]
            ]
            if errors := await _ended(getting):
                if any(isinstance(error, DeadlineExceeded) for error in errors):
                    await _cut_off(source.peer)
                raise errors[0]

    def _sum(self, first: int, stop: int) -> None:
        for layer in range(first, stop):
            places = self._slots.offsets + layer * self._slots.layer_stride
            self.checksums[layer] = slice_checksums(self._arena, places, self._size)

    def _copy(self, memory: Bytes, first: int, stop: int) -> None:
        """Copy out of memory of this host: the checksums are of the bytes in the arena, while they are in the cache."""
        size, step = self._size, max(1, _COPY_BYTES // self._size)
        for layer in range(first, stop):
            for chunk, part in self._parts:
                at, source = part.offset + layer * self._slots.layer_stride, self._place(layer, chunk)
                for index in range(0, part.count, step):
                    count = min(step, part.count - index)
                    start, length = at + index * size, count * size
                    first_byte = source + index * size
                    self._arena[start : start + length] = memory[first_byte : first_byte + length]
                    offsets = start + np.arange(count, dtype=np.int64) * size
                    into = slice(part.first + index, part.first + index + count)
                    self.checksums[layer, into] = slice_checksums(self._arena, offsets, size)

    def _place(self, layer: int, chunk: int) -> int:
        """Return the place of a chunk's slice in the source."""
        return (layer * self._call.source_chunks + chunk) * self._size


async def _ended(futures: Sequence[asyncio.Future[None]]) -> list[BaseException]:
    """Wait for them, and return their errors; first the cancellations of this task.

    A cancellation ends nothing: no slot is given back under a read.
    """
    cancelled: list[BaseException] = []
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as cancellation:
            cancelled.append(cancellation)
    return cancelled + [error for future in futures if (error := future.exception()) is not None]


async def _cut_off(peer: Peer) -> None:
    """The client is frozen: end transfers in flight by force. Raises `SlotsUnsettled` if even that does not help."""
    peer.abort()
    try:
        await peer.settle(_SETTLE_TIMEOUT_S)
    except DeadlineExceeded as error:
        raise SlotsUnsettled(str(error)) from None
    except asyncio.CancelledError:
        raise SlotsUnsettled("cancelled before the reads had ended") from None
