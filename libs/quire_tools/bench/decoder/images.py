"""`quire bench images`: what keeping images as latents costs in latency, and what the tuned split is worth."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from quire.model.errors import InvalidRequest
from quire_tools.bench.decoder import figures
from quire_tools.bench.decoder.latentbox.dual_cache import Tuning
from quire_tools.bench.decoder.latentbox.tiers import LruTier, SieveTier
from quire_tools.bench.decoder.simulator import (
    DECODE_S,
    FETCH_S,
    ClusterSettings,
    MakeTier,
    Result,
    belady_miss_ratio,
    simulate,
    simulate_cluster,
    simulate_image_store,
)
from quire_tools.bench.decoder.trace import PUBLISHED, Trace, generate, read_trace, statistics
from quire_tools.bench.report import Report, Row

SIZES: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.10)
_PARTS: Final = ("trace", "alphas", "sensitivity", "spillover", "sizes")
_STATIC_ALPHAS: Final = (0.3, 0.4, 0.5, 0.6, 0.7)
_WINDOWS: Final = 100
_DRIFT: Final = ((0.12, 0.05), (0.01, 0.3), (0.12, 0.05))
_SWEEPS: Final = {
    "step Δ": (0.001, 0.005, 0.01, 0.02, 0.05),
    "window W": (0.1, 0.3, 1.0, 3.0),
    "tail share τ": (0.01, 0.05, 0.1, 0.2, 0.3),
    "promotion h": (1, 2, 4, 8, 16, 32),
}


def _tuning(trace: Trace) -> Tuning:
    """The paper's, with its window scaled: it has 2,070 windows of a million requests, we have a hundred."""
    return Tuning(window=max(1000, len(trace) // _WINDOWS), step=0.02)


def _fixed(tuning: Tuning) -> Tuning:
    return replace(tuning, adaptive=False)


def run_sizes(trace: Trace, show_progress: bool = True) -> Report:
    """Mean latency over cache size, by cache (Table 6), LRU as in the paper and SIEVE."""
    report = Report(
        "images", {"name": "the better single-format cache, same trace", "unit": "mean latency, ms"}, tall=True
    )
    tuning, working_set = _tuning(trace), trace.working_set_bytes
    with Progress(transient=True, disable=not show_progress) as progress:
        task = progress.add_task("caches", total=len(SIZES) * 6 * len(trace))

        def step(requests: int) -> None:
            progress.advance(task, requests)

        for share in SIZES:
            capacity = int(working_set * share)

            def run(alpha: float, tune: Tuning, make: MakeTier = LruTier, capacity: int = capacity) -> Result:
                return simulate(trace, capacity, alpha, tune, make_tier=make, progress=step)

            images, latents = run(1.0, _fixed(tuning)), run(0.0, _fixed(tuning))
            ours, sieve = run(0.5, tuning), run(0.5, tuning, SieveTier)
            store = simulate_image_store(trace, capacity)
            floor_images = belady_miss_ratio(trace, capacity, trace.image_bytes) * (FETCH_S + DECODE_S) * 1e3
            floor_latents = (belady_miss_ratio(trace, capacity, trace.latent_bytes) * FETCH_S + DECODE_S) * 1e3
            total = ours.total
            measured = {
                "ImgCache, ms": images.mean_ms,
                "LatentCache, ms": latents.mean_ms,
                "Adaptive, ms": ours.mean_ms,
                "Adaptive on SIEVE, ms": sieve.mean_ms,
                "ImgStore, ms": float(store.mean(dtype=np.float64)) * 1e3,
                "Belady, one format, ms": min(floor_images, floor_latents),
                "image hits, %": 100 * total.image_hits / total.requests,
                "latent hits, %": 100 * total.latent_hits / total.requests,
                "P99, ms": ours.percentile_ms(99),
                "alpha": ours.windows[-1][1] if ours.windows else 0.5,
            }
            better = min(images.mean_ms, latents.mean_ms)
            report.rows.append(Row({"cache": f"{share:.1%}"}, measured, better, better / ours.mean_ms))
    report.notes += [
        f"{len(trace)} requests of {len(np.unique(trace.objects))} images; T_decode {DECODE_S * 1e3:g} ms and T_fetch "
        f"{FETCH_S * 1e3:g} ms are the paper's (§6.5), injected; image hits cost nothing",
        f"Δ {tuning.step}, W {tuning.window}, τ {tuning.tail_share}, h {tuning.promote_hits}; LRU tiers but for SIEVE",
    ]
    return report


def run_alphas(trace: Trace, cache_share: float) -> tuple[Report, dict[str, Result]]:
    """Adaptive against fixed splits, on the trace and on one whose costs and popularity shift (Figure 9)."""
    report = Report("images", {"name": "the best fixed α, same trace", "unit": "mean latency, ms"}, tall=True)
    tuning, results = _tuning(trace), {}
    capacity = int(trace.working_set_bytes * cache_share)
    for name, costs in (
        ("as it is", ((DECODE_S, FETCH_S),)),
        ("costs drift", ((0.12, 0.05), (0.01, 0.3), (0.12, 0.05))),
    ):
        means = {alpha: _in_phases(trace, capacity, alpha, _fixed(tuning), costs)[0] for alpha in _STATIC_ALPHAS}
        ours, last = _in_phases(trace, capacity, 0.5, tuning, costs)
        results[name] = last
        best = min(means.values())
        measured = {
            **{f"α = {alpha}": value for alpha, value in means.items()},
            "Adaptive, ms": ours,
            "Adaptive is lower by, %": (1 - ours / best) * 100,
        }
        report.rows.append(Row({"trace": name}, measured, best, best / ours))
    report.notes.append(
        f"cache {cache_share:.0%} of the working set; costs drift: T_decode and T_fetch are 120 and 50 ms, then 10 and "
        "300, then 120 and 50, for a third of the trace each; the cache is empty at the beginning of each"
    )
    return report, results


def _in_phases(
    trace: Trace, capacity: int, alpha: float, tuning: Tuning, costs: tuple[tuple[float, float], ...]
) -> tuple[float, Result]:
    """Mean latency over phases with costs of their own; Adaptive takes its α along."""
    bounds = np.linspace(0, len(trace), len(costs) + 1).astype(int)
    total, last = 0.0, None
    for (decode_s, fetch_s), start, stop in zip(costs, bounds, bounds[1:], strict=False):
        part = Trace(trace.times[start:stop], trace.objects[start:stop], trace.image_bytes, trace.latent_bytes)
        last = simulate(part, capacity, alpha, tuning, decode_s=decode_s, fetch_s=fetch_s)
        total += last.mean_ms * len(part)
        if last.windows:
            alpha = last.windows[-1][1] if tuning.adaptive else alpha
    assert last is not None, "there is a phase"
    return total / len(trace), last


def run_sensitivity(trace: Trace, cache_share: float) -> Report:
    """Δ, W, τ and h, each alone (Figure 11)."""
    report = Report("images", {"name": "the best value of that parameter", "unit": "mean latency, ms"}, tall=True)
    base, capacity = _tuning(trace), int(trace.working_set_bytes * cache_share)
    for name, values in _SWEEPS.items():
        rows = []
        for value in values:
            changes = {
                "step Δ": {"step": value},
                "window W": {"window": max(100, int(base.window * value))},
                "tail share τ": {"tail_share": value},
                "promotion h": {"promote_hits": int(value)},
            }[name]
            tuning = replace(base, **changes)  # type: ignore[arg-type]
            rows.append((value, simulate(trace, capacity, 0.5, tuning).mean_ms))
        best = min(mean for _, mean in rows)
        for value, mean in rows:
            shown = f"{value:g} × {base.window}" if name == "window W" else f"{value:g}"
            measured = {"mean, ms": mean, "over the best, %": (mean / best - 1) * 100}
            report.rows.append(Row({"parameter": name, "value": shown}, measured, best, best / mean))
    return report


def run_spillover(trace: Trace, speed: float) -> Report:
    """Six nodes, with and without spillover (Figure 10): an event simulation with queues at the devices.

    `speed` 0: so that the devices are busy for about 60% of the time, if half of the requests need one.
    """
    report = Report(
        "images", {"name": "no spillover: every decode at its owner", "unit": "mean latency, ms"}, tall=True
    )
    nodes, span_s = ClusterSettings().nodes, float(trace.times[-1] - trace.times[0])
    speed = speed or max(1.0, 0.6 * nodes / DECODE_S * span_s / (0.5 * len(trace)))
    settings = ClusterSettings(
        cache_bytes=max(1, int(trace.working_set_bytes * 0.01 / 6)),
        speed=speed,
        tuning=Tuning(window=max(500, len(trace) // 600), step=0.02),
    )
    alone, _ = simulate_cluster(trace, replace(settings, theta=math.inf))
    spilling, moved = simulate_cluster(trace, settings)
    measured: dict[str, float] = {}
    for name, each in (("without", alone), ("with", spilling)):
        measured |= {
            f"{name}: mean, ms": float(each.mean()) * 1e3,
            f"{name}: P99, ms": float(np.percentile(each, 99)) * 1e3,
        }
    measured["mean lower by, %"] = (1 - measured["with: mean, ms"] / measured["without: mean, ms"]) * 100
    measured["P99 lower by, %"] = (1 - measured["with: P99, ms"] / measured["without: P99, ms"]) * 100
    measured["moved, %"] = 100 * moved / len(trace)
    base = measured["without: mean, ms"]
    report.rows.append(
        Row({"nodes": nodes, "θ": 4, "speed": f"{speed:.3g}"}, measured, base, base / measured["with: mean, ms"])
    )
    return report


def show_trace(trace: Trace) -> None:
    """How close a trace is to LatentBox's published statistics."""
    from rich.table import Table

    table = Table("statistic", "published", "this trace", title=f"{len(trace)} requests")
    for name, value in statistics(trace).items():
        table.add_row(name, f"{PUBLISHED[name]:g}", f"{value:.3g}")
    Console().print(table)


def command(
    live: Annotated[bool, typer.Option("--live", help="a trace through the real services, by what is cached")] = False,
    public: Annotated[bool, typer.Option("--public", help="small images over HTTP, beside large ones")] = False,
    storage: Annotated[bool, typer.Option("--storage", help="bytes by format, and what comes back")] = False,
    sim: Annotated[bool, typer.Option("--sim", help="the decoder's cache over a long trace; if nothing else")] = False,
    part: Annotated[str, typer.Option(help="of --sim: sizes, alphas, sensitivity, spillover, trace or all")] = "all",
    trace: Annotated[
        Path | None, typer.Option(help="CSV: time_s, object_id, optionally image_bytes, latent_bytes")
    ] = None,
    images: Annotated[int, typer.Option(help="how many images the generated trace has")] = 100_000,
    seed: int = 1,
    cache_share: Annotated[float, typer.Option(help="of the working set: --live, alphas, sensitivity")] = 0.0,
    speed: Annotated[float, typer.Option(help="of the spillover replay against real time; 0: devices 60% busy")] = 0.0,
    requests: Annotated[int, typer.Option(help="of --live and --public, counted ones")] = 600,
    warmup: Annotated[int, typer.Option(help="requests of --live before these")] = 2000,
    rate: Annotated[float, typer.Option(help="requests per second of --live")] = 8.0,
    size: Annotated[int, typer.Option(help="pixels of a side, --live and --storage")] = 128,
    setups: Annotated[str, typer.Option(help="of --live, the first is the baseline; empty: all five")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the last report there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw it there (PNG)")] = None,
) -> None:
    """Images as latents: the decoder's cache simulated or live, and what formats cost."""
    if part not in (*_PARTS, "all"):
        raise InvalidRequest(f"{part!r}; there are {', '.join(_PARTS)}, all", field="part")
    if not 0 <= cache_share <= 1 or not 0 <= speed < math.inf:
        raise InvalidRequest(f"cache share {cache_share}, speed {speed}", field="cache_share")
    if min(requests, size, images) < 1 or warmup < 0 or not 0 < rate < 1e6 or size % 8 or size > 1024:
        raise InvalidRequest(f"{requests} requests, {warmup} before, {rate} per second, size {size}", field="requests")
    if storage:
        from quire_tools.bench.decoder import fidelity

        report = fidelity.run(12, size)
        report.show(json_file, plot, draw=lambda path: figures.fidelity(report, path))
    if public:
        from quire_tools.bench.decoder import public as site

        site.run(requests, 6, 4.0).show(json_file, plot)
    if live:
        from quire_tools.bench.decoder import live as replay

        accesses = read_trace(trace) if trace is not None else generate(3000, seed)
        chosen = tuple(setups.split(",")) if setups else tuple(replay.SETUPS)
        if unknown := set(chosen) - set(replay.SETUPS):
            raise InvalidRequest(f"{', '.join(unknown)}; there are {', '.join(replay.SETUPS)}", field="setups")
        settings = replay.LiveSettings(requests, warmup, rate, cache_share or 0.1, size, seed=seed, setups=chosen)
        report = replay.run(accesses, settings)
        report.show(json_file, plot, draw=lambda path: figures.live(report, path))
    if sim or not (live or storage or public):
        accesses = read_trace(trace) if trace is not None else generate(images, seed)
        if trace is None and part in ("trace", "all"):
            show_trace(accesses)
        _simulated(accesses, part, cache_share or 0.01, speed, json_file, plot)


def _simulated(
    accesses: Trace, part: str, cache_share: float, speed: float, json_file: Path | None, plot: Path | None
) -> None:
    """With `all` the files get the table of sizes: the one that says most."""

    def files(name: str) -> tuple[Path | None, Path | None]:
        return (json_file, plot) if part == name or (part == "all" and name == "sizes") else (None, None)

    wanted = _PARTS if part == "all" else (part,)
    if "alphas" in wanted:
        report, results = run_alphas(accesses, cache_share)
        report.show(*files("alphas"), draw=lambda path: figures.alphas(results, path))
    if "sensitivity" in wanted:
        run_sensitivity(accesses, cache_share).show(*files("sensitivity"))
    if "spillover" in wanted:
        run_spillover(accesses, speed).show(*files("spillover"))
    if "sizes" in wanted:
        sizes = run_sizes(accesses)
        sizes.show(*files("sizes"), draw=lambda path: figures.sizes(sizes, path))
