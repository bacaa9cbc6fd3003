"""`quire bench images --public`: images over HTTP as a public site has them, beside what makes them slow.

A small image that the decoder's cache has, alone and while other clients ask for large ones and hang up; and how many
answers a second a gateway gives, against the most that its HTTP server gives (`/healthz`), and nginx with a file.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
from rich.progress import Progress

from quire.client import AsyncClient, ImageClient
from quire.model.errors import NodeUnavailable
from quire_bench.processor import seconds_of
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import encode, pictures
from quire_tools.report import Report, Row

SMALL: Final = {"width": "64", "format": "jpeg"}
LARGE: Final = {"width": "8000", "height": "8000", "enlarge": "1", "format": "webp"}
_PATIENCE_S: Final = 2.0
_CLIENTS: Final = 16
_HITS_BEFORE: Final = 40  # all that can be cached is by then
_NOTHING_KEPT: Final = {"QUIRE_GATEWAY_IMAGES_KEPT_BYTES": "0"}
WAYS: Final[dict[str, dict[str, str]]] = {
    "sent again by the gateway": {},
    "from the decoder's cache": _NOTHING_KEPT,
    "encoded each time": _NOTHING_KEPT | {"QUIRE_DECODER_CACHE_FORMS": "images,latents"},
}
"""By which a small image that was asked for before is answered."""


@dataclass(slots=True)
class _Site:
    """What clients saw: seconds of one after the other; answers a second, with the services' CPU seconds for each."""

    alone: list[float]
    beside: list[float]
    hot: tuple[float, float]
    unchanged: tuple[float, float]
    bare: tuple[float, float]
    small: bytes


def run(samples: int, large: int, seconds: float, show_progress: bool = True) -> Report:
    """`samples` of latency each, `large` clients that hang up, `seconds` for each rate."""
    sites = {}
    with Progress(transient=True, disable=not show_progress) as progress:
        task = progress.add_task("measure", total=5 * len(WAYS))
        for way, settings in WAYS.items():
            with (
                tempfile.TemporaryDirectory(prefix="quire-public-") as folder,
                LocalCluster(
                    Path(folder),
                    decoders=1,
                    arena_bytes=128 << 20,
                    settings={"QUIRE_GATEWAY_IMAGES_ENLARGE": "true"} | settings,
                ) as cluster,
            ):
                measuring = _measure(cluster, samples, large, seconds, lambda: progress.advance(task))
                sites[way] = asyncio.run(measuring)
        nginx = _nginx(next(iter(sites.values())).small, seconds)
    return _report(sites, nginx, samples, large, seconds)


async def _measure(cluster: LocalCluster, samples: int, large: int, seconds: float, step: Callable[[], None]) -> _Site:
    async with AsyncClient(cluster.gateway_address) as client:
        ((latent, info),) = encode(pictures(1, 256))
        await ImageClient(client).put("cat", latent, info)
    services = [cluster.pid(name) for name in cluster.names]
    async with aiohttp.ClientSession(f"http://{cluster.http_address}") as http:
        for _ in range(_HITS_BEFORE):
            etag, small = await _get(http, SMALL)
        alone = await _latencies(http, samples)
        step()
        crowd = [asyncio.create_task(_ask_and_leave(http)) for _ in range(large)]
        await asyncio.sleep(_PATIENCE_S)
        beside = await _latencies(http, samples)
        for each in crowd:
            each.cancel()
        await asyncio.wait(crowd)
        step()
        bare = await _rate(seconds, services, lambda: _answered(http, "/healthz", {}, 200))
        step()
        known = {"If-None-Match": etag}
        unchanged = await _rate(seconds, services, lambda: _answered(http, "/v1/images/cat", known, 304))
        step()
        hot = await _rate(seconds, services, lambda: _answered(http, "/v1/images/cat", {}, 200))
        step()
    return _Site(alone, beside, hot, unchanged, bare, small)


def _nginx(small: bytes, seconds: float) -> float:
    """Answers a second of nginx with one worker, for the same bytes; not a number where there is none."""
    binary = shutil.which("nginx")
    if binary is None:
        return math.nan
    with tempfile.TemporaryDirectory(prefix="quire-nginx-") as folder:
        root = Path(folder)
        root.chmod(0o755)  # its worker may be another user
        (root / "small.jpeg").write_bytes(small)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {root}/{kind};" for kind in kinds)
        (root / "nginx.conf").write_text(
            f"worker_processes 1; daemon off; pid {root}/pid; error_log {root}/log; events {{}} "
            f"http {{ access_log off; keepalive_requests 1000000; {temporary} "
            f"server {{ listen 127.0.0.1:{port}; root {root}; }} }}"
        )
        process = subprocess.Popen([binary, "-c", str(root / "nginx.conf"), "-p", folder], stderr=subprocess.DEVNULL)
        try:
            return asyncio.run(_rate_of_file(port, seconds))
        finally:
            process.terminate()
            process.wait(10)


async def _rate_of_file(port: int, seconds: float) -> float:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        async with asyncio.timeout(10):
            while True:
                try:
                    await _answered(http, "/small.jpeg", {}, 200)
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)
        return (await _rate(seconds, [], lambda: _answered(http, "/small.jpeg", {}, 200)))[0]


def _report(sites: dict[str, _Site], nginx: float, samples: int, large: int, seconds: float) -> Report:
    report = Report("images --public", {"name": "the row's own", "unit": "ms, or answers a second"}, tall=True)
    for way, site in sites.items():
        p99_ms = float(np.quantile(site.alone, 0.99)) * 1e3
        for beside, times in (("nothing", site.alone), (f"{large} large", site.beside)):
            figures = {"p50, ms": statistics.median(times) * 1e3, "p99, ms": float(np.quantile(times, 0.99)) * 1e3}
            params = {"small image": way, "beside": beside}
            report.rows.append(Row(params, figures, p99_ms, figures["p99, ms"] / p99_ms))
    first = next(iter(sites.values()))
    rates = {"304": first.unchanged} | {way: site.hot for way, site in sites.items()}
    for what, (rate, cpu_s) in rates.items():
        figures = {"answers/s": rate, "services' CPU, ms": cpu_s * 1e3}
        report.rows.append(Row({"answers": what}, figures, first.bare[0], rate / first.bare[0]))
    report.rows.append(
        Row({"answers": "nginx, the same file"}, {"answers/s": nginx}, first.bare[0], nginx / first.bare[0])
    )
    report.notes += [
        f"latencies one after the other, {samples} each; baseline: p99 beside nothing",
        f"large: {large} clients ask for 8,000 × 8,000 WebP, hang up after {_PATIENCE_S:g} s and ask again",
        f"answers a second: {_CLIENTS} clients of one process, {seconds:g} s; baseline: /healthz of the same gateway",
        f"a JPEG of {len(first.small)} bytes; all services and the clients share this machine's cores",
    ]
    return report


async def _get(http: aiohttp.ClientSession, params: dict[str, str]) -> tuple[str, bytes]:
    """Its ETag, and its bytes."""
    async with http.get("/v1/images/cat", params=params) as answer:
        data = await answer.read()
        if answer.status != 200:
            raise NodeUnavailable(f"status {answer.status}")
        return answer.headers["ETag"], data


async def _answered(http: aiohttp.ClientSession, path: str, headers: dict[str, str], status: int) -> None:
    async with http.get(path, params=SMALL if path.startswith("/v1") else {}, headers=headers) as answer:
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


async def _rate(seconds: float, services: list[int], ask: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Answers a second to all clients, and seconds of the services' CPUs for each."""
    until, count = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await ask()
            count += 1

    started, before_s = time.perf_counter(), sum(map(seconds_of, services))
    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    return count / (time.perf_counter() - started), (sum(map(seconds_of, services)) - before_s) / count
