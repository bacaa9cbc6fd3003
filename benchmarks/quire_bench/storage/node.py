"""`quire bench node`: what a node with millions of chunks makes others wait for, by its own measure of its event loop.

A pool is made of headers for so many chunks; its data are a hole, so that every slice reads as zeros and is sound. Then
a real cluster runs on it, and clients fetch and store, while the node tells the empty index what it has, restarts,
compares itself with the index, scrubs, is scraped, and evicts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from isal import isal_zlib
from rich.console import Console

from quire.client import AdminClient, Client
from quire.model.errors import QuireError
from quire.model.hashing import Namespace, block_keys
from quire.model.index import records
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_storage.core.chunks import Chunk, Header, Placed
from quire_storage.core.pool.format import HEADERS_OFFSET, PAGE_BYTES, DriveGeometry, Superblock, pack_superblock
from quire_storage.core.pool.map import PoolMap
from quire_storage.core.pool.slots import Shape
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row

_LAYOUT: Final = KvLayout(16, 1, 8, 128, Dtype.BF16)  # 64 KiB a chunk
_SHAPE: Final = Shape(_LAYOUT.num_layers, _LAYOUT.slice_bytes)
_SLAB_BYTES: Final = 64 << 20
_PREFIX: Final = 200
_LOADED: Final = 50
_FETCHES: Final = 10
_LIMIT_S: Final = 0.02
_NODE: Final = "storage-0"
_EVICTED: Final = 20_000
_REST_S: Final = 15.0


def run(chunks: int, folder: Path) -> Report:
    """A node that starts with so many chunks on its drive in `folder`, is killed, scrubbed and told to evict."""
    report = Report("node", {"name": "the loop's lag that was asked for at most, p99.9", "unit": "ms"}, tall=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="quire-node-") as place:
        space = Namespace("bench-node", "1", _LAYOUT)
        with Console().status(f"writing {chunks} headers"):
            drive_bytes = _write_pool(Path(place) / _NODE, chunks, space)
        cluster = LocalCluster(
            Path(place),
            arena_bytes=128 << 20,
            drive_bytes=drive_bytes,
            settings={
                "QUIRE_STORAGE_OBJECT_URL": "",
                "QUIRE_STORAGE_SLAB_BYTES": str(_SLAB_BYTES),
                "QUIRE_STORAGE_CHUNK_BYTES_MIN": str(_LAYOUT.chunk_bytes),
                "QUIRE_STORAGE_POLICY_CHECK_S": "2",
            },
        )
        try:
            with Console().status("starting"):
                cluster.start(timeout_s=300)
            for name, measured in _phases(cluster, chunks, space):
                ratio = measured["lag p99.9, ms"] / (_LIMIT_S * 1e3)
                report.rows.append(Row({"chunks": chunks, "while": name}, measured, _LIMIT_S * 1e3, ratio))
        finally:
            cluster.stop()
    report.notes += [
        "a prefix of 50 chunks is stored, and fetched ten times, again and again all the while, one after the other",
        "lag: upper bound of the histogram's bucket; what a long stall holds up counts for each tick",
    ]
    return report


def _phases(cluster: LocalCluster, chunks: int, space: Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    with _load(cluster, space) as fetched:
        watch = _Watch(cluster, fetched)
        with Console().status("registering"):
            _until(lambda: cluster_log(cluster).count("compared with the index") >= 1, 900)
            _until(lambda: _listed(cluster) >= chunks, 1800)
        yield "the index is told all that is here", watch.measured()
        with Console().status("at rest, scrubbing"):
            time.sleep(_REST_S)
        yield "it scrubs and is scraped", watch.measured()
    before = cluster_log(cluster).count("compared with the index")
    cluster.kill(_NODE)
    began = time.monotonic()
    cluster.restart(_NODE, timeout_s=300)
    ready_s = time.monotonic() - began
    with _load(cluster, space) as fetched:
        watch = _Watch(cluster, fetched)
        with Console().status("comparing with the index"):
            _until(lambda: cluster_log(cluster).count("compared with the index") > before, 900)
        yield "after kill -9 it compares itself with the index", watch.measured() | {"serving after, s": ready_s}
        with Console().status("evicting"):
            _evict(cluster, space, chunks)
        yield f"{_EVICTED} chunks are evicted by a quota", watch.measured()


class _Watch:
    """Counts of the node's metrics since the last call."""

    def __init__(self, cluster: LocalCluster, fetched: list[float]) -> None:
        self._address = cluster.metrics[_NODE]
        self._fetched = fetched
        self._scrapes: list[float] = []
        self._before = self._histogram()
        self._began_s = time.monotonic()
        fetched.clear()

    def measured(self) -> dict[str, float]:
        now, scrapes = self._histogram(), []
        for _ in range(5):
            began = time.perf_counter()
            _scrape(self._address)
            scrapes.append(time.perf_counter() - began)
        counts = {bound: now[bound] - self._before.get(bound, 0.0) for bound in now}
        fetches = sorted(self._fetched) or [float("nan")]
        measured = {
            "s": time.monotonic() - self._began_s,
            "lag p50, ms": 1e3 * _quantile(counts, 0.5),
            "lag p99, ms": 1e3 * _quantile(counts, 0.99),
            "lag p99.9, ms": 1e3 * _quantile(counts, 0.999),
            "longest, ms": 1e3 * _quantile(counts, 1.0),
            "scrape, ms": 1e3 * float(np.median(scrapes)),
            "fetch p99, ms": 1e3 * fetches[int(0.99 * (len(fetches) - 1))],
        }
        self._before, self._began_s = self._histogram(), time.monotonic()
        self._fetched.clear()
        return measured

    def _histogram(self) -> dict[float, float]:
        found = {}
        for line in _scrape(self._address).splitlines():
            if line.startswith("quire_loop_lag_seconds_bucket"):
                labels, _, value = line.rpartition(" ")
                found[float(labels.partition('le="')[2].partition('"')[0])] = float(value)
        return found


def _quantile(counts: dict[float, float], share: float) -> float:
    """The quantile as the upper bound of its histogram bucket."""
    whole = counts[float("inf")]
    return next(bound for bound in sorted(counts) if counts[bound] >= share * whole and whole)


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def cluster_log(cluster: LocalCluster) -> str:
    """What the node has logged so far."""
    return (cluster.folder / "logs" / f"{_NODE}.log").read_text(errors="replace")


def _listed(cluster: LocalCluster) -> int:
    """Chunks that the index lists for the node."""
    from quire_server.redis import PrefixIndex, connect

    async def ask() -> int:
        redis = connect(cluster.redis_url, timeout_s=30)
        try:
            return (await PrefixIndex(redis).listing(_NODE)).count
        finally:
            await redis.aclose()

    return asyncio.run(ask())


def _until(true: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s")
        time.sleep(0.5)


@contextmanager
def _load(cluster: LocalCluster, space: Namespace) -> Iterator[list[float]]:
    """Fetches and stores, one after the other, in a thread; seconds of each fetch."""
    fetched: list[float] = []
    over = threading.Event()
    running = threading.Thread(target=_fetch_and_store, args=(cluster, space, fetched, over))
    running.start()
    try:
        yield fetched
    finally:
        over.set()
        running.join()


def _fetch_and_store(cluster: LocalCluster, space: Namespace, fetched: list[float], over: threading.Event) -> None:
    with Client(cluster.gateway_address, timeout_s=60) as client:
        own = Namespace("bench-load", "1", _LAYOUT)
        buffer, number = client.allocate(own.layout.payload_bytes(_LOADED)), 0
        while not over.is_set():
            number += 1
            keys = block_keys(own, range(number * _LOADED, (number + 1) * _LOADED))
            with contextlib.suppress(QuireError):  # a node that has just died
                client.store(own, keys, 0, buffer, complete=True).commit()
                for _ in range(_FETCHES):
                    began = time.perf_counter()
                    found = client.lookup(own, keys)
                    client.fetch(found, buffer).summary()
                    client.release(found)
                    fetched.append(time.perf_counter() - began)
                    time.sleep(0.05)


def _evict(cluster: LocalCluster, space: Namespace, chunks: int) -> None:
    """Set a quota slightly below what is stored."""
    before = _listed(cluster)

    async def bound() -> None:
        async with AdminClient(cluster.admin_address, cluster.secret) as operator:
            await operator.set_policy(space, quota_bytes=(chunks - _EVICTED) * _SHAPE.slot_bytes)

    asyncio.run(bound())
    _until(lambda: _listed(cluster) <= before - 0.9 * _EVICTED, 600)


def _write_pool(folder: Path, chunks: int, space: Namespace) -> int:
    """A pool whose data region is a hole, with a sound header for each chunk; bytes of its file."""
    folder.mkdir(parents=True)
    per_slab = _SLAB_BYTES // _SHAPE.slot_bytes
    slabs = -(-5 * chunks // (4 * per_slab)) + 64  # far below the watermark
    geometry = DriveGeometry(_SLAB_BYTES, slabs, -(-slabs * per_slab * 512 // PAGE_BYTES))
    image = np.zeros(geometry.header_pages * PAGE_BYTES, dtype=np.uint8)
    pool_map = PoolMap([geometry], [image], 1 << 40)
    sums = np.full(_SHAPE.num_layers, isal_zlib.crc32(bytes(_SHAPE.slice_bytes)), dtype=np.uint32)
    now_ms = time.time_ns() // 1_000_000
    for first in range(0, chunks, _PREFIX):
        count = min(_PREFIX, chunks - first)
        chain = records(ChunkKeys(os.urandom(32 * count)), 0, count, namespace=space.tag)
        places = pool_map.allocate(_SHAPE, count)
        pool_map.commit(
            [
                Placed(Header(Chunk(record, _SHAPE.num_layers, _SHAPE.slice_bytes, sums, now_ms)), where)
                for record, where in zip(chain, places, strict=True)
            ]
        )
    block = pack_superblock(Superblock(_NODE, geometry, 1, geometry.header_pages))
    with (folder / "pool.quire").open("wb") as file:
        file.write(block + block)
        file.seek(HEADERS_OFFSET)
        file.write(image.data)
        file.truncate(geometry.file_bytes)
        os.fsync(file.fileno())
    return geometry.file_bytes


def command(
    chunks: Annotated[int, typer.Option(help="chunks that the node holds")] = 4_000_000,
    folder: Annotated[Path, typer.Option(help="a folder on the drive to use")] = Path(),
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Stalls of the event loop of a node with millions of chunks, as it starts, restarts, scrubs and evicts."""
    run(chunks, folder).show(json_file, plot)
