"""`quire bench images`: what keeping images as latents costs in latency, and what the tuned split is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from quire.model.errors import InvalidRequest
from quire_bench.decoder import figures
from quire_bench.papers.latentbox import tables
from quire_bench.papers.latentbox.serving import IMAGES
from quire_bench.papers.latentbox.simulator import (
    DECODE_S,
    FETCH_S,
    MakeTier,
    Result,
    belady_miss_ratio,
    simulate,
    simulate_image_store,
)
from quire_decoder.core.cache_tiers import LruTier, SieveTier
from quire_decoder.core.dual_cache import Tuning
from quire_tools.plan.image_trace import PUBLISHED, ImageTrace, generate, read_trace, statistics
from quire_tools.report import Report, Row

SIZES: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.10)
_SERVING: Final = ("table", "policies", "changing", "spillover")
_CACHE: Final = ("trace", "alphas", "sensitivity", "sizes")
_PARTS: Final = (*_SERVING, *_CACHE)
_IMAGES: Final = 100_000
_STATIC_ALPHAS: Final = (0.3, 0.4, 0.5, 0.6, 0.7)
_WINDOWS: Final = 100
_DRIFT: Final = ((0.12, 0.05), (0.01, 0.3), (0.12, 0.05))
_SWEEPS: Final = {
    "step Δ": (0.001, 0.005, 0.01, 0.02, 0.05),
    "window W": (0.1, 0.3, 1.0, 3.0),
    "tail share τ": (0.01, 0.05, 0.1, 0.2, 0.3),
    "promotion h": (1, 2, 4, 8, 16, 32),
}


def _tuning(trace: ImageTrace) -> Tuning:
    """The paper's, with its window scaled: it has 2,070 windows of a million requests, we have a hundred."""
    return Tuning(window=max(1000, len(trace) // _WINDOWS), step=0.02)


def _fixed(tuning: Tuning) -> Tuning:
    return replace(tuning, adaptive=False)


def run_sizes(trace: ImageTrace, show_progress: bool = True) -> Report:
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


def run_alphas(trace: ImageTrace, cache_share: float) -> tuple[Report, dict[str, Result]]:
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
    trace: ImageTrace, capacity: int, alpha: float, tuning: Tuning, costs: tuple[tuple[float, float], ...]
) -> tuple[float, Result]:
    """Mean latency over phases with costs of their own; Adaptive takes its α along."""
    bounds = np.linspace(0, len(trace), len(costs) + 1).astype(int)
    total, last = 0.0, None
    for (decode_s, fetch_s), start, stop in zip(costs, bounds, bounds[1:], strict=False):
        part = ImageTrace(trace.times[start:stop], trace.objects[start:stop], trace.image_bytes, trace.latent_bytes)
        last = simulate(part, capacity, alpha, tuning, decode_s=decode_s, fetch_s=fetch_s)
        total += last.mean_ms * len(part)
        if last.windows:
            alpha = last.windows[-1][1] if tuning.adaptive else alpha
    assert last is not None, "there is a phase"
    return total / len(trace), last


def run_sensitivity(trace: ImageTrace, cache_share: float) -> Report:
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


def show_trace(trace: ImageTrace) -> None:
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
    part: Annotated[
        str,
        typer.Option(
            help="of --sim: table, policies, changing, spillover, trace, alphas, sensitivity, sizes or all; "
            "of --live: spillover or all"
        ),
    ] = "all",
    trace: Annotated[
        Path | None, typer.Option(help="CSV: time_s, object_id, optionally image_bytes, latent_bytes")
    ] = None,
    images: Annotated[int, typer.Option(help="how many images the generated trace has; 0: as the part wants")] = 0,
    seed: Annotated[int, typer.Option(help="seed of what is drawn at random")] = 1,
    cache_share: Annotated[float, typer.Option(help="of the working set: --live, alphas, sensitivity")] = 0.0,
    requests: Annotated[int, typer.Option(help="of --live and --public, counted ones")] = 600,
    seconds: Annotated[float, typer.Option(help="of --public, for each rate")] = 4.0,
    warmup: Annotated[int, typer.Option(help="requests of --live before these")] = 2000,
    rate: Annotated[float, typer.Option(help="requests per second of --live")] = 8.0,
    size: Annotated[int, typer.Option(help="pixels of a side, --live and --storage")] = 128,
    setups: Annotated[str, typer.Option(help="of --live, the first is the baseline; empty: all")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the last report there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw it there (PNG)")] = None,
) -> None:
    """Images as latents: the decoder's cache simulated or live, and what formats cost."""
    if part not in (*_PARTS, "all"):
        raise InvalidRequest(f"{part!r}; there are {', '.join(_PARTS)}, all", field="part")
    if not 0 <= cache_share <= 1:
        raise InvalidRequest(f"{cache_share} is not within 0 and 1", field="cache_share")
    if (
        min(requests, size) < 1
        or images < 0
        or warmup < 0
        or not 0 < rate < 1e6
        or size % 8
        or size > 1024
        or seconds <= 0
    ):
        raise InvalidRequest(f"{requests} requests, {warmup} before, {rate} per second, size {size}", field="requests")
    if storage:
        from quire_bench.decoder import fidelity

        report = fidelity.run(12, size)
        report.show(json_file, plot, draw=lambda path: figures.fidelity(report, path))
    if public:
        from quire_bench.decoder import public as site

        site.run(requests, 6, seconds).show(json_file, plot)
    if live:
        accesses = _accesses(trace, 3000, seed)
        if part == "spillover":
            from quire_bench.decoder import spilling

            spilling.run(accesses, requests, seed).show(json_file, plot)
        else:
            from quire_bench.decoder import live as replay

            chosen = tuple(setups.split(",")) if setups else ()
            settings = replay.LiveSettings(requests, warmup, rate, cache_share or 0.1, size, seed=seed, setups=chosen)
            report = replay.run(accesses, settings)
            report.show(json_file, plot, draw=lambda path: figures.live(report, path))
    if sim or not (live or storage or public):
        wanted = _PARTS if part == "all" else (part,)
        for parts, count in ((_SERVING, IMAGES), (_CACHE, _IMAGES)):
            if chosen_parts := [each for each in wanted if each in parts]:
                accesses, files = _accesses(trace, images or count, seed), (json_file, plot)
                _simulated(accesses, chosen_parts, cache_share or 0.01, seed, files, alone=part != "all")


def _accesses(trace: Path | None, images: int, seed: int) -> ImageTrace:
    return read_trace(trace) if trace is not None else generate(images, seed)


def _simulated(
    accesses: ImageTrace,
    parts: list[str],
    cache_share: float,
    seed: int,
    files: tuple[Path | None, Path | None],
    *,
    alone: bool,
) -> None:
    """With `all` the files get the table of policies: the one that says most."""
    with Progress(transient=True) as progress:
        task = progress.add_task("requests", total=None)

        def step(requests: int) -> None:
            progress.advance(task, requests)

        reports = {part: _run(accesses, part, cache_share, seed, step) for part in parts}
    for part, (report, draw) in reports.items():
        if report is None:
            show_trace(accesses)
        else:
            report.show(*(files if alone or part == "policies" else (None, None)), draw=draw)


def _run(
    accesses: ImageTrace, part: str, cache_share: float, seed: int, step: Callable[[int], object]
) -> tuple[Report | None, Callable[[Path], None] | None]:
    """A part's report, and what draws it."""
    if part == "alphas":
        report, results = run_alphas(accesses, cache_share)
        return report, partial(figures.alphas, results)
    if part == "sizes":
        report = run_sizes(accesses)
        return report, partial(figures.sizes, report)
    if part in ("table", "policies", "changing", "spillover"):
        made = {
            "table": partial(tables.run_table, accesses, step),
            "policies": partial(tables.run_policies, accesses, step),
            "changing": partial(tables.run_changing, accesses, seed, step),
            "spillover": partial(tables.run_spillover, accesses, step),
        }[part]()
        return made, partial(figures.serving, made) if part != "spillover" else None
    return (run_sensitivity(accesses, cache_share), None) if part == "sensitivity" else (None, None)
