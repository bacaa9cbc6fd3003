"""`quire bench images --live --part spillover`: two decoders, with spillover and without, through the real services.

Their devices' time is injected, so that both are busy though they share this machine's cores. The simulator has the
same requests at the same times with the same owners.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.progress import Progress

from quire.client import AsyncClient, ImageClient
from quire_bench.papers.latentbox.serving import Found, Serving, paper_setups, timed
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import encode, pictures
from quire_tools.plan.image_trace import ImageTrace
from quire_tools.report import Report, Row

DECODE_MS: Final = 120.0
_THETA: Final = 1
_MODULES = {"decoder": "quire_bench.decoder.delayed"}
_NEVER: Final = 1_000_000
_BUSY: Final = 0.8
"""Of the busier device's time, by the requests for its own images."""
_IMAGES: Final = 100
_SIZE: Final = 64


@dataclass(slots=True)
class _Run:
    """Seconds of each request, which decoder answered, when they came, each image's owner, and what a decode took."""

    seconds: list[float]
    decoders: list[str]
    times: list[float]
    owners: list[int]
    decode_s: float


def run(trace: ImageTrace, requests: int, seed: int, show_progress: bool = True) -> Report:
    """Images as popular as the trace's most popular ones, in any order; no cache has images or renditions."""
    views, rng = np.sort(np.bincount(trace.objects))[::-1][:_IMAGES], np.random.default_rng(seed)
    wanted = rng.choice(len(views), requests, p=views / views.sum()).tolist()
    report = Report("images --live: spillover", {"name": "every decode at its owner", "unit": "mean, ms"}, tall=True)
    runs: dict[int, _Run] = {}
    gaps = rng.exponential(1.0, len(wanted))
    with Progress(disable=not show_progress, transient=True) as progress:
        task = progress.add_task("requests", total=2 * len(wanted))
        for theta in (_NEVER, _THETA):
            settings = {
                "QUIRE_ORCHESTRATOR_DECODER_THETA": str(theta),
                "BENCH_DECODE_DELAY_MS": str(DECODE_MS),
                "QUIRE_DECODER_CACHE_FORMS": "latents",
                "QUIRE_DECODER_BATCH_MAX": "1",
                "QUIRE_GATEWAY_IMAGES_KEPT_BYTES": "0",
            }
            with (
                tempfile.TemporaryDirectory(prefix="quire-spill-") as folder,
                LocalCluster(
                    Path(folder), decoders=2, arena_bytes=64 << 20, settings=settings, modules=_MODULES
                ) as cluster,
            ):
                times = runs[_NEVER].times if runs else []
                replaying = _replay(cluster.gateway_address, wanted, gaps, times, lambda: progress.advance(task))
                runs[theta] = asyncio.run(replaying)
    _add_rows(report, runs, {theta: _simulated(each, wanted, theta) for theta, each in runs.items()}, wanted)
    report.notes += [
        f"{len(wanted)} requests of {_IMAGES} images, as latents in the caches of two decoders, whose devices take "
        f"{DECODE_MS:g} ms longer than they do (injected); θ {_THETA}; the busier is busy for {_BUSY:.0%} of the time",
        "simulated: the same requests, times and owners, devices alone",
    ]
    return report


async def _replay(gateway: str, wanted: list[int], gaps: Any, times: list[float], step: Callable[[], object]) -> _Run:
    """An open loop at those times; if there are none, so fast that the busier owner is as busy as was asked for."""
    async with AsyncClient(gateway) as client:
        images, owner_of, decode_us = ImageClient(client), dict[int, str](), list[int]()
        for at, (latent, info) in enumerate(encode(pictures(_IMAGES, _SIZE))):
            await images.put(f"i{at}", latent, info)
            image = await images.get(f"i{at}")
            owner_of[at] = image.decoder
            decode_us.append(image.stages_us["decode"])
        names = sorted(set(owner_of.values()))
        owners = [names.index(owner_of[at]) for at in range(_IMAGES)]
        decode_s = statistics.median(decode_us) / 1e6
        busier = max(np.bincount([owners[each] for each in wanted])) / len(wanted)
        times = times or np.cumsum(gaps * busier * decode_s / _BUSY).tolist()
        run = _Run([0.0] * len(wanted), [""] * len(wanted), times, owners, decode_s)
        begun = time.perf_counter()

        async def one(at: int) -> None:
            started = time.perf_counter()
            image = await images.get(f"i{wanted[at]}")
            run.seconds[at], run.decoders[at] = time.perf_counter() - started, image.decoder
            step()

        tasks = []
        for at in range(len(wanted)):
            await asyncio.sleep(max(0.0, begun + times[at] - time.perf_counter()))
            tasks.append(asyncio.create_task(one(at)))
        await asyncio.gather(*tasks)
        return run


def _simulated(run: _Run, wanted: list[int], theta: float) -> list[float]:
    """Seconds of each request."""
    one = np.ones(_IMAGES, np.int64)
    trace = ImageTrace(np.array(run.times), np.array(wanted), one, one)
    serving = Serving(
        nodes=2,
        window=len(wanted),
        warmup=0,
        window_s=run.times[-1] - run.times[0],
        theta=theta,
        decode_s=run.decode_s,
        transfer_s=0.0,
        around_s=0.0,
    )
    found = [Found.LATENT] * len(wanted)
    return list(timed(trace, paper_setups()["LB-LatentCache"], serving, found, run.owners).seconds)


def _add_rows(report: Report, runs: dict[int, _Run], simulated: dict[int, list[float]], wanted: list[int]) -> None:
    names, owners = sorted(set(runs[_NEVER].decoders)), runs[_NEVER].owners
    homes = [names[owners[number]] for number in wanted]
    real = {theta: each.seconds for theta, each in runs.items()}
    for kind, seconds in (("real services", real), ("simulated", simulated)):
        base = float(np.mean(seconds[_NEVER])) * 1e3
        for theta, each in seconds.items():
            figures = {"mean": float(np.mean(each)) * 1e3, "P99": float(np.percentile(each, 99)) * 1e3}
            figures["mean lower by, %"] = 100 * (1 - figures["mean"] / base)
            figures["decode, ms"] = runs[theta].decode_s * 1e3
            moved = sum(mine != home for mine, home in zip(runs[theta].decoders, homes, strict=True))
            figures["moved, %"] = 100 * moved / len(wanted) if kind == "real services" else math.nan
            params = {"what": kind, "θ": "never" if theta == _NEVER else str(theta)}
            report.rows.append(Row(params, figures, base, base / figures["mean"]))
