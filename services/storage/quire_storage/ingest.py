"""One store: chunks out of a client's memory, layer by layer as it produces them, into slots.

Each layer is read in one piece into a staging buffer and scattered from there to the slots, with the checksums taken
on the way, in a thread. A slot counts only once its bytes are where the asked durability wants them and its key is
indexed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from quire.descriptor import RdmaTarget
from quire.durability import Durability, OnExisting
from quire.errors import InvalidRequest, TargetInvalid
from quire.keys import KEY_BYTES
from quire.layout import KvLayout
from quire.metadata.index import ChunkRecord
from quire.outcome import ChunkRun
from quire.telemetry import names, tracer
from quire.transport import Transport

from quire_storage.core.checksums import slice_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.produced import ProducedLayers

_STAGING_BYTES_MAX = 256 << 20
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class IngestCall:
    """A store as it was asked for. `source_runs` say where `records` lie among the `source_chunks` of `source`.

    Raises `InvalidRequest` or `TargetInvalid`.
    """

    layout: KvLayout
    records: Sequence[ChunkRecord]
    store_id: bytes
    source: RdmaTarget
    source_runs: tuple[ChunkRun, ...]
    source_chunks: int
    node_index: int
    durability: Durability
    on_existing: OnExisting

    def __post_init__(self) -> None:
        if not self.records or sum(run.count for run in self.source_runs) != len(self.records):
            raise InvalidRequest(f"{len(self.records)} chunks do not fill the runs", field="source_runs")
        if any(run.first + run.count > self.source_chunks for run in self.source_runs):
            raise InvalidRequest("a run leaves the source", field="source_runs")
        if any(len(record.key) != KEY_BYTES or len(record.segment) != KEY_BYTES for record in self.records):
            raise InvalidRequest(f"a key is not of {KEY_BYTES} bytes", field="chunks")
        needed = self.layout.payload_bytes(self.source_chunks)
        if self.source.length < needed:
            raise TargetInvalid(f"{self.source.length} bytes, but the chunks have {needed}", field="source.length")


async def pull(
    call: IngestCall,
    offsets: npt.NDArray[np.int64],
    arena: Bytes,
    transport: Transport,
    produced: ProducedLayers,
    threads: Executor,
    timeout_s: float,
) -> list[Chunk]:
    """Read every layer into the slots at `offsets`. Returns the chunks with their checksums, not yet readable."""
    peer = transport.connect(call.source.worker_address)
    peer.on_failure(lambda error: produced.fail(call.store_id, error))
    size, layers = call.layout.slice_bytes, call.layout.num_layers
    rows_max = max(1, _STAGING_BYTES_MAX // size)
    staging = np.empty(min(len(offsets), rows_max) * size, dtype=np.uint8)
    region, remote = transport.register(staging), peer.remote(call.source)
    checksums = np.empty((layers, len(offsets)), dtype=np.uint64)
    loop = asyncio.get_running_loop()
    try:
        for layer in range(layers):
            await produced.wait(call.store_id, layer, timeout_s)
            with tracer().start_as_current_span(names.STORAGE_PULL, attributes={"quire.layer": layer}):
                at = 0
                for run in _bounded(call.source_runs, rows_max):
                    source = (layer * call.source_chunks + run.first) * size
                    await peer.get(region, 0, run.count * size, remote, source, timeout_s=timeout_s)
                    slots = offsets[at : at + run.count] + layer * size
                    checksums[layer, at : at + run.count] = await loop.run_in_executor(
                        threads, _scatter, staging, arena, slots, size
                    )
                    at += run.count
    finally:
        remote.close()
        region.close()
        produced.forget(call.store_id)
    return [
        Chunk(record, layers, size, int(offset), checksums[:, index].copy(), call.durability)
        for index, (record, offset) in enumerate(zip(call.records, offsets, strict=True))
    ]


def _scatter(staging: Bytes, arena: Bytes, slots: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint64]:
    for row, slot in enumerate(slots.tolist()):
        arena[slot : slot + size] = staging[row * size : (row + 1) * size]
    return slice_checksums(arena, slots, size)


def _bounded(runs: Sequence[ChunkRun], rows_max: int) -> list[ChunkRun]:
    """`runs` cut so that each fits the staging buffer."""
    return [
        ChunkRun(start, min(rows_max, run.first + run.count - start))
        for run in runs
        for start in range(run.first, run.first + run.count, rows_max)
    ]
