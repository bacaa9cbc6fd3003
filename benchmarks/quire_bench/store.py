"""Storing through the real services, against a bare pyucx stream of the same bytes, or the drive's writing of them.

Level `memory` is measured against the stream, `local` against one file in the same folder: written past the page cache,
16 MiB at a time, and synced. Rounds of both are in turns. What was stored is evicted between rounds.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from quire.client import AsyncClient, Buffer
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.layout import Dtype, KvLayout
from quire.transport import OFF, data_plane
from quire_bench.processor import ProcessorTime
from quire_bench.stream_peer import BareStream
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median, spread

_HEADS, _HEAD_DIM, _TOKENS = 8, 128, 1
_WRITE_BYTES = 16 << 20
_WARM_ROUNDS = 2


@dataclass(slots=True)
class _Times:
    """Seconds by round, and of all rounds the services' processor time."""

    store: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    services_s: float = 0.0


def run(levels: list[str], transport: str, chunk_kib: list[int], mib: int, layers: int, rounds: int) -> Report:
    """Stores of `mib` MiB in chunks of `chunk_kib`, all layers at once. Raises `InvalidRequest`."""
    if transport not in ("ucx", "shm"):
        raise InvalidRequest(f"{transport!r}; there are ucx and shm", field="transport")
    name = "memory: a bare pyucx stream of the same bytes; local: one file, written directly and synced"
    report = Report("store", {"name": name, "unit": "GB/s"}, tall=True)
    for level, size in product(levels, chunk_kib):
        durability = {each.name.lower(): each for each in Durability}.get(level)
        if durability not in (Durability.MEMORY, Durability.LOCAL):
            raise InvalidRequest(f"{level!r}; there are memory and local", field="level")
        tokens = (size << 10) // (layers * KvLayout(1, _TOKENS, _HEADS, _HEAD_DIM, Dtype.BF16).slice_bytes)
        layout = KvLayout(layers, max(1, tokens), _HEADS, _HEAD_DIM, Dtype.BF16)
        with Console().status(f"{level}, chunks of {size} KiB"):
            report.rows.append(
                _measure(durability, layout, transport, max(1, (mib << 20) // layout.chunk_bytes), rounds)
            )
    report.notes.append("one call of `store` for all chunks, placement and index included; client on the same machine")
    report.notes.append("CPU s/GB: of gateway, orchestrator and storage node together, per GB stored")
    return report


def label(params: dict[str, Any]) -> str:
    """Of a row, in a figure."""
    return f"{params['level']}, chunks of {params['chunk KiB']} KiB"


def _measure(level: Durability, layout: KvLayout, transport: str, chunks: int, rounds: int) -> Row:
    payload = layout.payload_bytes(chunks)
    slab = max(64 << 20, layout.chunk_bytes)
    settings = {"QUIRE_STORAGE_SLAB_BYTES": str(slab), "QUIRE_STORAGE_OBJECT_URL": ""}
    if level is Durability.MEMORY:
        settings["QUIRE_STORAGE_DRIVES"] = ""
    with tempfile.TemporaryDirectory() as name:
        settings["QUIRE_SHARED_MEMORY"] = shared = f"{name}/sockets" if transport == "shm" else OFF
        arena, drive = (2 * payload // slab + 3) * slab, (4 * payload // slab + 8) * slab
        with LocalCluster(Path(name) / "cluster", arena_bytes=arena, drive_bytes=drive, settings=settings) as cluster:
            times = uvloop.run(_rounds(cluster, level, layout, shared, chunks, rounds))
    rates, bare = ([payload / each / 1e9 for each in seconds] for seconds in (times.store, times.bare))
    measured = {
        "GB/s": median(rates),
        "spread": spread(rates),
        "ms": median(times.store) * 1e3,
        "baseline's spread": spread(bare),
        "CPU s/GB": times.services_s / (payload * rounds) * 1e9,
    }
    params = {"level": level.name.lower(), "chunk KiB": layout.chunk_bytes >> 10, "chunks": chunks}
    return Row(params, measured, median(bare), median(rates) / median(bare))


async def _rounds(
    cluster: LocalCluster, level: Durability, layout: KvLayout, shared: str, chunks: int, rounds: int
) -> _Times:
    times, payload = _Times(), layout.payload_bytes(chunks)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(cluster.gateway_address, transport=data_plane(shared)))
        source = client.allocate(payload)
        assert source.view is not None
        source.view[:] = np.random.default_rng(3).integers(0, 256, payload, dtype=np.uint8)
        bare = await stack.enter_async_context(BareStream(payload // layout.num_layers, layout.num_layers, source))
        for number in range(rounds + _WARM_ROUNDS):
            processor = ProcessorTime(cluster)
            seconds = await _store(client, level, Namespace("bench", str(number), layout), source, chunks)
            used = processor.read()
            on_drive = level is Durability.LOCAL
            plain = _written(cluster.folder, source.view) if on_drive else (await bare.round())[0]
            if number >= _WARM_ROUNDS:
                times.store.append(seconds)
                times.bare.append(plain)
                times.services_s += used["gateway"] + used["orchestrator"] + used["storage"]
    return times


async def _store(client: AsyncClient, level: Durability, namespace: Namespace, source: Buffer, chunks: int) -> float:
    """Seconds of one store, which is evicted afterwards."""
    layout = namespace.layout
    keys = block_keys(namespace, list(range(chunks * layout.chunk_tokens)), HashAlgorithm.BLAKE3)
    started = time.perf_counter()
    session = await client.store(namespace, keys, 0, source, durability=level, complete=True)
    summary = await session.commit()
    seconds = time.perf_counter() - started
    assert summary.stored_chunks == chunks, "the store lost chunks"
    await client.evict(namespace, keys)
    return seconds


def _written(folder: Path, payload: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    """Seconds to write the bytes to a preallocated file and sync it."""
    path = folder / "baseline"
    block = mmap.mmap(-1, _WRITE_BYTES)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(file, 0, -(-payload.nbytes // _WRITE_BYTES) * _WRITE_BYTES)
        seconds = 0.0
        for start in range(0, payload.nbytes, _WRITE_BYTES):
            part = payload[start : start + _WRITE_BYTES]
            block[: part.nbytes] = part.tobytes()
            started = time.perf_counter()
            os.pwrite(file, block, start)
            seconds += time.perf_counter() - started
        started = time.perf_counter()
        os.fsync(file)
        return seconds + time.perf_counter() - started
    finally:
        os.close(file)
        path.unlink()
