"""`quire bench node`: what a node with millions of chunks makes others wait for, by its own measure of its event loop.

A pool is made of headers for so many chunks; its data are a hole, so that every slice reads as zeros and is sound. Then
a real cluster runs on it, and clients fetch and store, while the node tells the empty index what it has, restarts,
compares itself with the index, scrubs, is scraped, and evicts.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console

from quire.client import AdminClient, Client
from quire.model.errors import QuireError
from quire.model.hashing import Namespace, block_keys
from quire_bench.storage.filled_pool import LAYOUT, NODE, SETTINGS, SHAPE, listed, until, write_pool
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row

_LOADED: Final = 50
_FETCHES: Final = 10
_LIMIT_S: Final = 0.02
_EVICTED: Final = 20_000
_REST_S: Final = 15.0


def run(chunks: int, folder: Path) -> Report:
    """A node that starts with so many chunks on its drive in `folder`, is killed, scrubbed and told to evict."""
    report = Report("node", {"name": "the loop's lag that was asked for at most, p99.9", "unit": "ms"}, tall=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="quire-node-") as place:
        space = Namespace("bench-node", "1", LAYOUT)
        with Console().status(f"writing {chunks} headers"):
            drive_bytes = write_pool(Path(place) / NODE, chunks, space)
        cluster = LocalCluster(
            Path(place),
            arena_bytes=128 << 20,
            drive_bytes=drive_bytes,
            settings={**SETTINGS, "QUIRE_STORAGE_POLICY_CHECK_S": "2"},
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
            until(lambda: cluster_log(cluster).count("compared with the index") >= 1, 900)
            until(lambda: listed(cluster) >= chunks, 1800)
        yield "the index is told all that is here", watch.measured()
        with Console().status("at rest, scrubbing"):
            time.sleep(_REST_S)
        yield "it scrubs and is scraped", watch.measured()
    before = cluster_log(cluster).count("compared with the index")
    cluster.kill(NODE)
    began = time.monotonic()
    cluster.restart(NODE, timeout_s=300)
    ready_s = time.monotonic() - began
    with _load(cluster, space) as fetched:
        watch = _Watch(cluster, fetched)
        with Console().status("comparing with the index"):
            until(lambda: cluster_log(cluster).count("compared with the index") > before, 900)
        yield "after kill -9 it compares itself with the index", watch.measured() | {"serving after, s": ready_s}
        with Console().status("evicting"):
            _evict(cluster, space, chunks)
        yield f"{_EVICTED} chunks are evicted by a quota", watch.measured()


class _Watch:
    """Counts of the node's metrics since the last call."""

    def __init__(self, cluster: LocalCluster, fetched: list[float]) -> None:
        self._address = cluster.metrics[NODE]
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
    return (cluster.folder / "logs" / f"{NODE}.log").read_text(errors="replace")


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
        own = Namespace("bench-load", "1", LAYOUT)
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
    count = listed(cluster)

    async def bound() -> None:
        async with AdminClient(cluster.admin_address, cluster.secret) as operator:
            await operator.set_policy(space, quota_bytes=(chunks - _EVICTED) * SHAPE.slot_bytes)

    asyncio.run(bound())
    until(lambda: listed(cluster) <= count - 0.9 * _EVICTED, 600)


def command(
    chunks: Annotated[int, typer.Option(help="chunks that the node holds")] = 4_000_000,
    folder: Annotated[Path, typer.Option(help="a folder on the drive to use")] = Path(),
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Stalls of the event loop of a node with millions of chunks, as it starts, restarts, scrubs and evicts."""
    run(chunks, folder).show(json_file, plot)
