"""`quire bench pool`: retrieve and store through the ring against the bare device, alone and mixed (Tutti, Fig. 6, 9).

The bare device is asked for the same bytes in blocks of the same size, at the same depth, with the same flag, by a
bare `BlockIO` and by fio, where it is installed, on an ordinary file beside the pool's: the quickest counts. Rounds of
them and of the engine take turns, so that a drift of the device meets both.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
import uvloop
from rich.console import Console

from quire.model.layout import Dtype, KvLayout
from quire.model.records import ChunkRecord
from quire_bench.storage.bare_device import BATCH_BYTES, BATCHES, BareDevice, best
from quire_server.clock import SystemClock
from quire_storage.adapters.block_io import choose_block_io
from quire_storage.adapters.drives import FileDrives
from quire_storage.core.chunks import Chunk, Copy, Header, Placed
from quire_storage.core.pool.slots import Shape
from quire_storage.core.slack import SlackLimits
from quire_storage.tiers.pool import Pool, PoolSettings
from quire_storage.tiers.ring import Ring
from quire_tools.report import Report, Row, median, spread

Bytes = npt.NDArray[np.uint8]
_CLIENTS = 4
_WARM_UP_S = 1.0
_MIXED_S = 4.0


@dataclass(slots=True)
class _Rates:
    """Bytes per second, by round; of the bare device by way of I/O."""

    bare: list[dict[str, float]] = field(default_factory=list)
    retrieve: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    bare_store: list[dict[str, float]] = field(default_factory=list)


class _Bench:
    """A pool on the drives with chunks of one layout, and memory to read into and to write from."""

    def __init__(self, folders: Sequence[str], layout: KvLayout, chunks: int, depth: int) -> None:
        self.shape = Shape(layout.num_layers, layout.slice_bytes)
        self.chunks_max = chunks
        self._folders = list(folders)
        self._depth = depth
        self._number = 0
        self.memory: Bytes = np.frombuffer(mmap.mmap(-1, (BATCHES + 1) * BATCH_BYTES), dtype=np.uint8)
        self.memory[:] = np.random.default_rng(1).integers(0, 256, self.memory.nbytes, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.batch = max(1, BATCH_BYTES // self.shape.slot_bytes)

    async def start(self) -> None:
        slab = max(64 << 20, self.shape.slot_bytes)
        wanted = 2 * self.chunks_max * self.shape.slot_bytes
        each = (wanted // len(self._folders) // slab + 3) * slab + (64 << 20)
        settings = PoolSettings(
            node_id="bench", drive_bytes=each, slab_bytes=slab, chunk_bytes_min=64 << 10, stripe_bytes=256 << 10
        )
        self.drives = FileDrives()
        self.pool = Pool(settings, self._folders, self.drives)
        self._files = self.pool.open()
        self.ring = await self._ring(slack=True)
        await self.pool.recover(self.ring)
        self.naive = await self._ring(slack=False)
        self.chunks: list[Copy] = []
        while len(self.chunks) < self.chunks_max:
            placed = await self._store_batch(min(self.batch, self.chunks_max - len(self.chunks)))
            self.chunks += [Copy(0, each.header.chunk, None, each.place) for each in placed]

    async def _ring(self, *, slack: bool) -> Ring:
        io = choose_block_io("auto", self._depth, direct=self.drives.direct)
        ring = Ring(io, SystemClock(), SlackLimits(), slack=slack)
        await ring.start(self._files, [self.memory])
        return ring

    async def close(self) -> None:
        await self.naive.close()
        await self.pool.close()

    async def retrieve(self, ring: Ring, chunks: Sequence[Copy]) -> int:
        """Layer after layer, in batches, three of them on their way at a time, as deliveries do it; bytes."""
        room = self.shape.slice_room
        count = max(1, BATCH_BYTES // room)
        batches = [chunks[first : first + count] for first in range(0, len(chunks), count)]
        sources = [
            self.pool.striped(batch, np.arange(len(batch)) * room, np.zeros(len(batch), dtype=np.int64))
            for batch in batches
        ]
        ahead: deque[asyncio.Task[object]] = deque()
        order = [source for _ in range(self.shape.num_layers) for source in sources]
        for at, source in enumerate(order):
            layer = at // len(sources)
            place = self.address + at % BATCHES * BATCH_BYTES
            ahead.append(asyncio.create_task(ring.read(source.layer(layer).moved(place))))
            if len(ahead) >= BATCHES - 1:
                await ahead.popleft()
        while ahead:
            await ahead.popleft()
        return len(chunks) * self.shape.bytes

    async def store(self, ring: Ring, chunks: int, done: Callable[[int], None] = lambda size: None) -> None:
        """Store that many, synced and committed, some batches at a time as several clients would, and forget them.

        `done` hears of the bytes of each batch when they are durable.
        """
        self.pool.use(ring)
        left = list(range(0, chunks, self.batch))

        async def client() -> None:
            while left:
                count = min(self.batch, chunks - left.pop())
                fresh = await self._store_batch(count)
                done(count * self.shape.bytes)
                await self.pool.forget(fresh)
                self.pool.map.release([placed.place for placed in fresh])

        await asyncio.gather(*(client() for _ in range(_CLIENTS)))

    async def _store_batch(self, count: int) -> list[Placed]:
        sums = np.zeros(self.shape.num_layers, dtype=np.uint32)
        chunks = []
        for _ in range(count):
            self._number += 1
            key = self._number.to_bytes(32, "big")
            chunks.append(Chunk(ChunkRecord(key, b"", key, b""), self.shape.num_layers, self.shape.slice_bytes, sums))
        base = self.address + BATCHES * BATCH_BYTES
        addresses = base + np.arange(count, dtype=np.int64) * self.shape.slice_room
        # The same batch of memory for every layer: what is written is of no matter here, only how fast.
        stride = count * self.shape.slice_room if count * self.shape.slot_bytes <= BATCH_BYTES else 0
        places = self.pool.map.take(self.shape, count)
        placed = [Placed(Header(chunk), place) for chunk, place in zip(chunks, places, strict=True)]
        await self.pool.write(placed, addresses, np.full(count, stride))
        return placed


async def _timed(work: Callable[[], Awaitable[int]], seconds: float) -> float:
    """Bytes per second of `work`, again and again for that long."""
    started, moved = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        moved += await work()
    return moved / elapsed


async def _alone(bench: _Bench, bare: BareDevice, chunks: int, rounds: int) -> _Rates:
    rates, size = _Rates(), chunks * bench.shape.bytes
    for _ in range(rounds):
        rates.bare.append(await bare.rates(size))
        started = time.perf_counter()
        await bench.retrieve(bench.ring, bench.chunks[:chunks])
        rates.retrieve.append(size / (time.perf_counter() - started))
        rates.bare_store.append(await bare.rates(size, write=True))
        started = time.perf_counter()
        await bench.store(bench.ring, chunks)
        rates.store.append(size / (time.perf_counter() - started))
    return rates


async def _mixed(bench: _Bench, ring: Ring, seconds: float) -> tuple[float, float]:
    """Retrieve and store at the same time, each as fast as it can; bytes per second of both."""
    stored, stop = 0, False

    def done(size: int) -> None:
        nonlocal stored
        stored += size

    async def store() -> None:
        while not stop:
            await bench.store(ring, _CLIENTS * bench.batch, done)

    writer = asyncio.create_task(store())
    await asyncio.sleep(_WARM_UP_S)
    before, started = stored, time.perf_counter()
    rate = await _timed(lambda: bench.retrieve(ring, bench.chunks), seconds)
    store_rate = (stored - before) / (time.perf_counter() - started)
    stop = True
    await writer
    return rate, store_rate


async def _run(folders: list[str], layout: KvLayout, contexts: list[int], depth: int, rounds: int) -> Report:
    report = Report("pool", {"name": "the bare device: same block size, depth, O_DIRECT, same run", "unit": "GB/s"})
    most = max(contexts) // layout.chunk_tokens
    with Console().status("filling the drives") as status:
        bench = _Bench(folders, layout, most, depth)
        await bench.start()
        bare = BareDevice(folders, min(most * bench.shape.bytes, 2 << 30), depth, bench.memory)
        await bare.start()
        for context in contexts:
            status.update(f"context of {context} tokens")
            rates = await _alone(bench, bare, max(1, context // layout.chunk_tokens), rounds)
            measured = {
                "retrieve GB/s": median(rates.retrieve) / 1e9,
                "spread": spread(rates.retrieve),
                "bare spread": spread(best(rates.bare)),
                "store GB/s": median(rates.store) / 1e9,
                "bare store GB/s": median(best(rates.bare_store)) / 1e9,
            }
            bare_rate = median(best(rates.bare)) / 1e9
            report.rows.append(Row({"context": context}, measured, bare_rate, measured["retrieve GB/s"] / bare_rate))
        status.update("retrieve and store at the same time")
        report.notes += await _mixed_notes(bench, rounds)
        report.notes.append(f"bare device: the quickest of {', '.join(bare.ways)}")
        report.notes.append(f"ring: {bench.ring.description}; {len(folders)} folders as drives; depth {depth}")
        await bare.close()
        await bench.close()
    return report


async def _mixed_notes(bench: _Bench, rounds: int) -> list[str]:
    alone, naive, slack = [], [], []
    for _ in range(rounds):
        alone.append(await _timed(lambda: bench.retrieve(bench.ring, bench.chunks), _MIXED_S))
        naive.append(await _mixed(bench, bench.naive, _MIXED_S))
        slack.append(await _mixed(bench, bench.ring, _MIXED_S))
    base = median(alone)
    lines = [f"retrieve alone {base / 1e9:.2f} GB/s"]
    for name, pairs in (("naively mixed", naive), ("mixed with slack scheduling", slack)):
        reads, writes = median([pair[0] for pair in pairs]), median([pair[1] for pair in pairs])
        lines.append(
            f"{name}: retrieve {reads / 1e9:.2f} GB/s ({reads / base:.2f} of alone), store {writes / 1e9:.3f} GB/s"
        )
    return lines


def draw(report: Report, path: Path) -> None:
    """Bandwidth of retrieving and of storing over the context length, beside the bare device (Tutti, Figure 9)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
    contexts = [f"{row.params['context'] // 1024}K" for row in report.rows]
    bare = {"retrieve": [row.baseline for row in report.rows]}
    bare["store"] = [row.measured["bare store GB/s"] for row in report.rows]
    for axes, (name, device) in zip(panels, bare.items(), strict=True):
        axes.plot(contexts, [row.measured[f"{name} GB/s"] for row in report.rows], "o-", color="#4878a8", label="Quire")
        axes.plot(contexts, device, "s--", color="#888888", label="the bare device")
        axes.set(title=name, xlabel="context, tokens")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("GB/s")
    panels[0].set_ylim(0, 1.08 * panels[0].get_ylim()[1])
    panels[0].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def command(
    folders: Annotated[str, typer.Option(help="one on each drive, separated by commas; empty: temporary")] = "",
    contexts: Annotated[str, typer.Option(help="context lengths in tokens")] = "1024,4096,16384,65536,131072",
    chunk_tokens: Annotated[int, typer.Option(help="tokens of a chunk")] = 64,
    layers: Annotated[int, typer.Option(help="of the Llama 3.1 8B layout; 32 in the model")] = 4,
    depth: Annotated[int, typer.Option(help="reads and writes at a time")] = 128,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Retrieve and store over context lengths against the bare device; then both at once, naively and with slack."""
    layout = KvLayout(layers, chunk_tokens, 8, 128, Dtype.BF16)
    sizes = [int(text) for text in contexts.split(",")]
    with tempfile.TemporaryDirectory(dir=".", prefix="quire-bench-") as place:
        names = [name for name in folders.split(",") if name] or [f"{place}/d0", f"{place}/d1"]
        for name in names:
            Path(name).mkdir(parents=True, exist_ok=True)
        report = uvloop.run(_run(names, layout, sizes, depth, rounds))
        for name in names:
            (Path(name) / "pool.quire").unlink(missing_ok=True)
    report.show(json_file, plot, draw=lambda path: draw(report, path))
