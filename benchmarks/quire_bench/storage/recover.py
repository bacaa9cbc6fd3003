"""`quire bench recover`: how long a node takes to find its chunks again, by the header region alone.

And how much memory it needs for each chunk then, besides the header itself.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from quire.model.records import ChunkRecord
from quire_bench.storage.filled_pool import write_pool_file
from quire_server.clock import SystemClock
from quire_storage.adapters.block_io import choose_block_io
from quire_storage.adapters.drives import FileDrives
from quire_storage.core.chunks import Chunk, Header, Placed
from quire_storage.core.pool.format import HEADERS_OFFSET, PAGE_BYTES, DriveGeometry
from quire_storage.core.pool.map import PoolMap
from quire_storage.core.pool.slots import Shape, SlotAllocator
from quire_storage.core.residency import Residency, ResidencySettings
from quire_storage.core.slack import SlackLimits
from quire_storage.tiers.pool import Pool, PoolSettings
from quire_storage.tiers.ring import Ring
from quire_tools.report import Report, Row

_SHAPE = Shape(32, 4096)
_SLAB_BYTES = 64 << 20
_BATCH = 10_000
_SETTINGS = PoolSettings(
    node_id="bench", drive_bytes=1 << 30, slab_bytes=_SLAB_BYTES, chunk_bytes_min=64 << 10, stripe_bytes=256 << 10
)


def run(slots: int, folder: Path) -> Report:
    """Write so many headers to a pool in `folder`, and time what a restarted node does with them."""
    report = Report("recover", {"name": "reading the header region in 8 MiB reads, same run", "unit": "s"})
    with tempfile.TemporaryDirectory(dir=folder, prefix="quire-recover-") as place:
        with Console().status(f"writing {slots} headers"), ProcessPoolExecutor(1, get_context("spawn")) as writer:
            used_bytes = writer.submit(_write_headers, Path(place), slots).result()  # its memory is not in the way
        bare_s = _bare_read(Path(place) / "pool.quire", used_bytes)
        recovered, recover_s, adopt_s, grown_bytes = asyncio.run(_recover(place))
    assert recovered == slots, "every header that was written is found"
    measured = {
        "recovered": recovered,
        "headers MiB": used_bytes / 2**20,
        "s": recover_s,
        "eviction order s": adopt_s,
        "memory, bytes a chunk": (grown_bytes - used_bytes) / slots,
    }
    report.rows.append(Row({"slots": slots}, measured, bare_s, recover_s / bare_s))
    report.notes.append("every header's CRC is verified; the data region of the file is a hole")
    return report


def _write_headers(folder: Path, slots: int) -> int:
    """A pool whose data region is a hole, with a sound header for each slot; bytes of headers."""
    per_slab = _SLAB_BYTES // _SHAPE.slot_bytes
    geometry = DriveGeometry(_SLAB_BYTES, -(-slots // per_slab), -(-slots * 512 // PAGE_BYTES))
    image = np.zeros(geometry.header_pages * PAGE_BYTES, dtype=np.uint8)
    pool_map = PoolMap([geometry], [image], 1 << 40)
    sums = np.zeros(_SHAPE.num_layers, dtype=np.uint32)
    for first in range(0, slots, _BATCH):
        numbers = range(first, min(slots, first + _BATCH))
        places = pool_map.take(_SHAPE, len(numbers))
        placed = []
        for number, where in zip(numbers, places, strict=True):
            key = number.to_bytes(32, "big")
            parent = (number - 1).to_bytes(32, "big") if number % 100 else b""
            record = ChunkRecord(key, parent, key, key if parent else b"")
            placed.append(Placed(Header(Chunk(record, _SHAPE.num_layers, _SHAPE.slice_bytes, sums)), where))
        pool_map.commit(placed)
    write_pool_file(folder, "bench", geometry, image)
    return int(image.nbytes)


def _bare_read(file: Path, size: int) -> float:
    drives = FileDrives()
    number = drives.open(str(file.parent))
    assert number is not None
    buffer = np.empty(size + 4096, dtype=np.uint8)
    start = -int(buffer.ctypes.data) % 4096
    view = memoryview(buffer.data)[start : start + size]
    started = time.perf_counter()
    for at in range(0, size, 8 << 20):
        os.preadv(number, [view[at : at + (8 << 20)]], HEADERS_OFFSET + at)
    elapsed_s = time.perf_counter() - started
    drives.close()
    return elapsed_s


async def _recover(folder: str) -> tuple[int, float, float, int]:
    """Chunks, seconds until they are known, and until the order of eviction is; bytes of memory that all this takes."""
    drives = FileDrives()
    settings = replace(_SETTINGS, drive_bytes=(Path(folder) / "pool.quire").stat().st_size)
    pool = Pool(settings, [folder], drives)
    before_bytes = _resident_bytes()
    started = time.perf_counter()
    files = pool.open()
    ring = Ring(choose_block_io("auto", 128, direct=drives.direct), SystemClock(), SlackLimits())
    await ring.start(files, [])
    count = await pool.recover(ring)
    recovered = time.perf_counter()
    residency = Residency(ResidencySettings(), SlotAllocator(1 << 20, 1 << 16), pool.map, objects=False)
    adopted = time.perf_counter()
    assert len(residency) == count, "it knows them"
    grown_bytes = _resident_bytes() - before_bytes
    await pool.close()
    return count, recovered - started, adopted - recovered, grown_bytes


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def command(
    slots: Annotated[int, typer.Option(help="slots of the pool")] = 1_000_000,
    folder: Annotated[Path, typer.Option(help="a folder on the drive to measure")] = Path(),
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Seconds until a node knows its chunks again after a restart, from the header region of one drive."""
    run(slots, folder).show(json_file, plot)
