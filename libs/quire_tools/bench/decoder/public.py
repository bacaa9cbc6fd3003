"""`quire bench images --public`: images over HTTP as a public site has them, beside what makes them slow.

A small image that the decoder's cache has, alone and while other clients ask for large ones and hang up; and how many
answers a second a gateway gives, against the most that its HTTP server gives (`/healthz`).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
from rich.progress import Progress

from quire.client import ImageClient, QuireClient
from quire.model.errors import NodeUnavailable
from quire_tools.bench.report import Report, Row
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import encode, pictures

SMALL: Final = {"width": "64", "format": "jpeg"}
LARGE: Final = {"width": "8000", "height": "8000", "enlarge": "1", "format": "webp"}
_PATIENCE_S: Final = 2.0
_CLIENTS: Final = 16
_HITS_BEFORE: Final = 40  # it is kept as an image by then


def run(samples: int, large: int, seconds: float, show_progress: bool = True) -> Report:
    """`samples` of latency each, `large` clients that hang up, `seconds` for each rate."""
    settings = {"QUIRE_GATEWAY_IMAGES_ENLARGE": "true"}
    with (
        tempfile.TemporaryDirectory(prefix="quire-public-") as folder,
        Progress(transient=True, disable=not show_progress) as progress,
        LocalCluster(Path(folder), arena_bytes=128 << 20, settings=settings) as cluster,
    ):
        task = progress.add_task("measure", total=6)
        return asyncio.run(_measure(cluster, samples, large, seconds, lambda: progress.advance(task)))


async def _measure(cluster: LocalCluster, samples: int, large: int, seconds: float, step: Callable[[], None]) -> Report:
    async with QuireClient(cluster.gateway_address) as client:
        ((latent, info),) = encode(pictures(1, 256))
        await ImageClient(client).put("cat", latent, info)
    async with aiohttp.ClientSession(f"http://{cluster.http_address}") as http:
        for _ in range(_HITS_BEFORE):
            etag = await _get(http, SMALL)
        step()
        alone = await _latencies(http, samples)
        step()
        crowd = [asyncio.create_task(_ask_and_leave(http)) for _ in range(large)]
        await asyncio.sleep(_PATIENCE_S)
        beside = await _latencies(http, samples)
        for each in crowd:
            each.cancel()
        await asyncio.wait(crowd)
        step()
        bare = await _rate(seconds, lambda: _answered(http, "/healthz", {}, 200))
        step()
        known = {"If-None-Match": etag}
        unchanged = await _rate(seconds, lambda: _answered(http, "/v1/images/cat", known, 304))
        step()
        made = await _rate(seconds, lambda: _answered(http, "/v1/images/cat", {}, 200))
        step()
    report = Report("images --public", {"name": "the row's own", "unit": "ms, or answers a second"}, tall=True)
    p99_ms = float(np.quantile(alone, 0.99)) * 1e3
    for name, times in (("small image, alone", alone), (f"small image, beside {large} large", beside)):
        figures = {"p50, ms": statistics.median(times) * 1e3, "p99, ms": float(np.quantile(times, 0.99)) * 1e3}
        report.rows.append(Row({"what": name}, figures, p99_ms, figures["p99, ms"] / p99_ms))
    for name, rate in (("304 of an image", unchanged), ("small image", made)):
        report.rows.append(Row({"what": name}, {"answers/s": rate}, bare, rate / bare))
    report.notes += [
        f"latencies one after the other, {samples} each; baseline: p99 alone",
        f"large: {large} clients ask for 8,000 × 8,000 WebP, hang up after {_PATIENCE_S:g} s and ask again",
        f"answers a second: {_CLIENTS} clients, {seconds:g} s each; baseline: /healthz of the same gateway",
        "clients, gateway, orchestrator, Redis, storage node and decoder share this machine's cores",
    ]
    return report


async def _get(http: aiohttp.ClientSession, params: dict[str, str]) -> str:
    """Its ETag."""
    async with http.get("/v1/images/cat", params=params) as answer:
        await answer.read()
        if answer.status != 200:
            raise NodeUnavailable(f"status {answer.status}")
        return answer.headers["ETag"]


async def _answered(http: aiohttp.ClientSession, path: str, headers: dict[str, str], status: int) -> None:
    async with http.get(path, params=SMALL if path != "/healthz" else {}, headers=headers) as answer:
        await answer.read()
        if answer.status != status:
            raise NodeUnavailable(f"status {answer.status}, not {status}")


async def _latencies(http: aiohttp.ClientSession, samples: int) -> list[float]:
    times = []
    for _ in range(samples):
        started = time.perf_counter()
        await _get(http, SMALL)
        times.append(time.perf_counter() - started)
    return times


async def _ask_and_leave(http: aiohttp.ClientSession) -> None:
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    while True:
        try:
            async with http.get("/v1/images/cat", params=LARGE, timeout=timeout) as answer:
                await answer.read()
        except TimeoutError:
            continue


async def _rate(seconds: float, ask: Callable[[], Awaitable[None]]) -> float:
    """Answers a second to all clients."""
    until, count = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await ask()
            count += 1

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    return count / (time.perf_counter() - started)
