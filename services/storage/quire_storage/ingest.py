"""One store: chunks out of a client's memory, layer by layer as it produces them, into slots.

Each layer is read in one piece into a staging buffer and scattered from there to the slots, with the checksums taken
on the way, in a thread. A slot counts only once its bytes are where the asked durability wants them and its key is
indexed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import DeadlineExceeded, InvalidRequest, TargetInvalid
from quire.model.index import ChunkRecord
from quire.model.keys import KEY_BYTES, ChunkKeys
from quire.model.layout import KvLayout
from quire.model.ranges import ChunkRange
from quire.telemetry import names, tracer
from quire.transport import Peer, Region, Remote, Transport
from quire_storage.core.checksums import Checksums, slice_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.core.extents import extents
from quire_storage.errors import SlotsUnsettled
from quire_storage.produced import ProducedLayers
from quire_storage.tiers import Slots

_READ_BYTES_MAX = 4 << 20
_READS_MAX = 8
_COPY_BYTES = 512 << 10
_SETTLE_TIMEOUT_S = 2.0
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestCall:
    """A store as it was asked for. `source_ranges` say where `records` lie among the `source_chunks` of `source`.

    Raises `InvalidRequest` or `TargetInvalid`.
    """

    layout: KvLayout
    records: Sequence[ChunkRecord]
    store_id: bytes
    source: RdmaTarget
    source_ranges: tuple[ChunkRange, ...]
    source_chunks: int
    node_index: int
    durability: Durability
    on_existing: OnExisting
    namespace: bytes = bytes(16)
    source_complete: bool = False

    def __post_init__(self) -> None:
        if not self.records or sum(run.count for run in self.source_ranges) != len(self.records):
            raise InvalidRequest(f"{len(self.records)} chunks do not fill the ranges", field="source_ranges")
        if any(run.first + run.count > self.source_chunks for run in self.source_ranges):
            raise InvalidRequest("a range leaves the source", field="source_ranges")
        if any(len(record.key) != KEY_BYTES or len(record.bucket) != KEY_BYTES for record in self.records):
            raise InvalidRequest(f"a key is not of {KEY_BYTES} bytes", field="chunks")
        ChunkKeys(b"".join(record.key for record in self.records)).distinct()
        needed = self.layout.payload_bytes(self.source_chunks)
        if self.source.length < needed:
            raise TargetInvalid(f"{self.source.length} bytes, but the chunks have {needed}", field="source.length")


async def pull(
    call: IngestCall,
    slots: Slots,
    arena: Bytes,
    region: Region,
    transport: Transport,
    produced: ProducedLayers,
    threads: Executor,
    timeout_s: float,
    now_ms: int,
) -> list[Chunk]:
    """Read every layer straight into its slots. Returns the chunks with their checksums, not yet readable."""
    peer = transport.connect(call.source.worker_address)
    remote = await peer.remote(call.source)
    memory = peer.memory(remote)
    unwatch = peer.on_failure(lambda error: produced.fail(call.store_id, error))
    size, layers = call.layout.slice_bytes, call.layout.num_layers
    checksums = np.empty((layers, len(slots.offsets)), dtype=np.uint32)
    loop = asyncio.get_running_loop()
    summing: deque[tuple[int, asyncio.Future[Checksums]]] = deque()
    try:
        for layer in range(layers):
            if not call.source_complete:
                await produced.wait(call.store_id, layer, timeout_s)
            with tracer().start_as_current_span(names.STORAGE_PULL, attributes={"quire.layer": layer}):
                places = slots.offsets + layer * slots.layer_stride
                if memory is not None:
                    work = partial(_copy_layer, call, memory, arena, places, layer)
                else:
                    await _pull_layer(call, slots, region, layer, peer, remote, timeout_s)
                    work = partial(slice_checksums, arena, places, size)
                summing.append((layer, loop.run_in_executor(threads, work)))
                if len(summing) > 1:  # of the layer before, while this one was read
                    await _take(summing, checksums)
        while summing:
            await _take(summing, checksums)
    finally:
        if summing:  # a slot must not be given back under a thread
            await asyncio.wait([each for _, each in summing])
        unwatch()
        remote.close()
        produced.forget(call.store_id)
    return [
        Chunk(
            record,
            layers,
            size,
            checksums[:, index].copy(),
            call.namespace,
            now_ms,
        )
        for index, record in enumerate(call.records)
    ]


async def _take(summing: deque[tuple[int, asyncio.Future[Checksums]]], checksums: Checksums) -> None:
    """The checksums of the oldest layer; it stays in the list until its thread has let go of it."""
    layer, work = summing[0]
    checksums[layer] = await asyncio.shield(work)
    summing.popleft()


def _copy_layer(call: IngestCall, memory: Bytes, arena: Bytes, places: npt.NDArray[np.int64], layer: int) -> Checksums:
    """Out of memory of this host, in a thread: the checksums are of what lies in the arena, taken from the cache."""
    size, at = call.layout.slice_bytes, 0
    checksums = np.empty(len(places), dtype=np.uint32)
    for run in call.source_ranges:
        source = (layer * call.source_chunks + run.first) * size
        for part in extents(places[at : at + run.count], size, _COPY_BYTES):
            first, start = at + part.first, source + part.first * size
            there = arena[part.offset : part.offset + part.count * size]
            there[:] = memory[start : start + part.count * size]
            offsets = places[first : first + part.count]
            checksums[first : first + part.count] = slice_checksums(arena, offsets, size)
        at += run.count
    return checksums


async def _pull_layer(
    call: IngestCall, slots: Slots, region: Region, layer: int, peer: Peer, remote: Remote, timeout_s: float
) -> None:
    size, shift, at = call.layout.slice_bytes, layer * slots.layer_stride, 0
    for run in call.source_ranges:
        source = (layer * call.source_chunks + run.first) * size
        parts = extents(slots.offsets[at : at + run.count], size, _READ_BYTES_MAX)
        for start in range(0, len(parts), _READS_MAX):
            reads = [
                peer.get(
                    region,
                    part.offset + shift,
                    part.count * size,
                    remote,
                    source + part.first * size,
                    timeout_s=timeout_s,
                )
                for part in parts[start : start + _READS_MAX]
            ]
            # All of them to their end, whatever one of them says: a slot must not be given back under a read.
            errors = [error for error in await asyncio.gather(*reads, return_exceptions=True) if error is not None]
            if any(isinstance(error, DeadlineExceeded) for error in errors):
                await _cut_off(peer)
            if errors:
                raise errors[0]
        at += run.count


async def _cut_off(peer: Peer) -> None:
    """The client is frozen: end what is in flight by force. Raises `SlotsUnsettled` if even that does not help."""
    peer.abort()
    try:
        await peer.settle(_SETTLE_TIMEOUT_S)
    except DeadlineExceeded as error:
        raise SlotsUnsettled(str(error)) from None
