"""`quire bench images --live`: a trace through the real services, by what is cached (LatentBox, Table 4, Figure 7).

Every set-up runs on the same stored bytes, the same requests in the same order, and the same cache size: ImgStore (PNGs
in the same object tier), Decode-All (no cache), images alone, latents alone, all forms, and the published cache.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.progress import Progress

from quire.client import AsyncClient, ImageClient
from quire.model.errors import InvalidRequest
from quire.wire.credentials import Caller
from quire_bench.decoder.image_store.server import put_png
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import encode, pictures
from quire_tools.plan.image_trace import ImageTrace
from quire_tools.report import Report, Row

FETCH_MS: Final = 140.0
_WARMERS: Final = 16
SETUPS: Final[dict[str, dict[str, str]]] = {
    "ImgStore": {},
    "Decode-All": {"CACHE_BYTES": "0"},
    "images alone": {"CACHE_FORMS": "images"},
    "latents alone": {"CACHE_FORMS": "latents"},
    "all forms": {},
    "LatentBox": {"CACHE": "latentbox", "CACHE_WINDOW": "500"},
}


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """`warmup` requests come sixteen at a time and are not counted, then `rate` per second, with exponential gaps.

    `size` of the images in pixels. `setups`: the first is the baseline; all of them if empty.
    """

    requests: int = 600
    warmup: int = 2000
    rate: float = 8.0
    cache_share: float = 0.10
    size: int = 128
    seed: int = 1
    setups: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """Latencies in seconds, seen by the client; where images were found; stages in microseconds, by where."""

    latencies: list[float] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    stages: dict[str, Counter[str]] = field(default_factory=dict)
    image_share: float = float("nan")

    def add(self, seconds: float, source: str, stages_us: dict[str, int]) -> None:
        self.latencies.append(seconds)
        self.sources[source] += 1
        self.stages.setdefault(source, Counter()).update(stages_us)


def run(trace: ImageTrace, settings: LiveSettings, show_progress: bool = True) -> Report:
    """Store, then replay, set-up by set-up. Raises `InvalidRequest` for a set-up that there is not."""
    setups = settings.setups or tuple(SETUPS)
    if unknown := set(setups) - set(SETUPS):
        raise InvalidRequest(f"{', '.join(unknown)}; there are {', '.join(SETUPS)}", field="setups")
    report = Report("images --live", {"name": f"{setups[0]}, same run", "unit": "mean latency, ms"}, tall=True)
    start = max(0, len(trace) // 2 - settings.warmup - settings.requests)
    order = trace.objects[start : start + settings.warmup + settings.requests]
    names = {int(key): f"i{at}" for at, key in enumerate(dict.fromkeys(order.tolist()))}
    requests = [names[int(key)] for key in order]
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="quire-live-") as folder, Progress(disable=not show_progress) as progress:
        stored = progress.add_task("store latents and PNGs", total=None)
        with _cluster(Path(folder), {}) as cluster:
            bytes_of = asyncio.run(_store(cluster, list(names.values()), settings.size))
        progress.update(stored, total=1, completed=1)
        capacity = max(1, int(settings.cache_share * sum(png for png, _ in bytes_of)))
        for name, changes in ((each, SETUPS[each]) for each in setups):
            task = progress.add_task(name, total=len(requests))
            common = {
                "CACHE_BYTES": str(capacity),
                "FETCH_DELAY_MS": str(FETCH_MS),
                "FETCHES_MAX": "64",
            }
            variables = {f"QUIRE_DECODER_{key}": value for key, value in (common | changes).items()}
            modules = {"decoder": "quire_bench.decoder.image_store.server"} if name == "ImgStore" else None
            with _cluster(Path(folder), variables, modules) as cluster:
                wanted = [f"png.{each}" for each in requests] if name == "ImgStore" else requests
                outcomes[name] = asyncio.run(
                    _replay(cluster.gateway_address, wanted, settings, lambda task=task: progress.advance(task))
                )
    base = _mean_ms(outcomes[setups[0]])
    for name, outcome in outcomes.items():
        report.rows.append(Row({"set-up": name}, _figures(outcome), base, base / _mean_ms(outcome)))
    pngs, latents = (np.array(each, dtype=float) for each in zip(*bytes_of, strict=True))
    report.notes += [
        f"{len(requests)} requests of {len(names)} images in the trace's order, the first {settings.warmup} to warm "
        f"up, then {settings.rate:g} per second with exponential gaps; cache {capacity} bytes, "
        f"{settings.cache_share:.0%} of the PNGs; {settings.size} × {settings.size}",
        f"bytes of an image: PNG {pngs.mean():.0f}, latent {latents.mean():.0f}",
        f"every fetch from the object tier is {FETCH_MS:g} ms longer (the paper's T_fetch, injected); T_decode is what "
        "the demo's VAE takes here; latencies as the client sees them, gateway and UCX included",
        "stages: mean milliseconds of the requests that were found there",
    ]
    return report


def _cluster(folder: Path, settings: dict[str, str], modules: dict[str, str] | None = None) -> LocalCluster:
    return LocalCluster(
        folder, decoders=1, settings=settings, modules=modules, arena_bytes=128 << 20, drive_bytes=256 << 20
    )


async def _store(cluster: LocalCluster, names: list[str], size: int) -> list[tuple[int, int]]:
    """Bytes of each image as a PNG and as a latent record. The PNG is of the decode: all set-ups answer alike."""
    sizes, orchestrator = [], (cluster.address("orchestrator"), Caller("gateway", cluster.secret.encode()))
    async with AsyncClient(cluster.gateway_address) as client:
        images = ImageClient(client)
        for name, (latent, info) in zip(names, encode(pictures(len(names), size)), strict=True):
            entry = await images.put(name, latent, info)
            png = (await images.get(name)).data
            await put_png(client, orchestrator, f"png.{name}", png, size)
            sizes.append((len(png), entry.record_bytes))
    return sizes


async def _replay(gateway: str, names: list[str], settings: LiveSettings, step: Any) -> Outcome:
    """First the warm-up; then an open loop: requests come at their times, whatever has been answered."""
    outcome = Outcome()
    warm, counted = names[: settings.warmup], names[settings.warmup :]
    times = np.cumsum(np.random.default_rng(settings.seed).exponential(1 / settings.rate, len(counted)))
    async with AsyncClient(gateway) as client:
        images = ImageClient(client)
        upcoming = iter(warm)

        async def warm_up() -> None:
            for name in upcoming:
                await images.get(name)
                step()

        async def one(name: str) -> None:
            started = time.perf_counter()
            image = await images.get(name)
            outcome.add(time.perf_counter() - started, image.source, image.stages_us)
            step()

        await asyncio.gather(*(warm_up() for _ in range(_WARMERS)))
        begun, tasks = time.perf_counter(), []
        for at, name in enumerate(counted):
            await asyncio.sleep(max(0.0, begun + times[at] - time.perf_counter()))
            tasks.append(asyncio.create_task(one(name)))
        await asyncio.gather(*tasks)
        await asyncio.sleep(1.2)  # stats come with heartbeats
        for node in await client.status():
            if held := node.stats.get("cache.bytes", 0.0):
                outcome.image_share = node.stats.get("cache.image_bytes", 0.0) / held
    return outcome


def _mean_ms(outcome: Outcome) -> float:
    return float(np.mean(outcome.latencies)) * 1e3


def _figures(outcome: Outcome) -> dict[str, float]:
    latencies = np.array(outcome.latencies) * 1e3
    total = len(latencies)
    figures = {"mean, ms": float(latencies.mean())}
    figures |= {f"P{p}, ms": float(np.percentile(latencies, p)) for p in (50, 95, 99)}
    for source in ("image", "latent", "miss", "joined"):
        figures[f"{source}, %"] = 100 * outcome.sources[source] / total
    for source, stage in (("latent", "decode"), ("miss", "decode"), ("miss", "fetch"), ("miss", "queue")):
        spent = outcome.stages.get(source, Counter())[stage]
        count = outcome.sources[source]
        figures[f"{source}: {stage}"] = spent / count / 1e3 if count else float("nan")
    figures["images, % of the cache"] = 100 * outcome.image_share
    return figures
