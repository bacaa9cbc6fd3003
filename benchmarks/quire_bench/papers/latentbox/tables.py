"""LatentBox's Table 4, Figures 7 and 10 again, and the decoder's own cache beside them: `quire bench images --sim`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from quire_bench.papers.latentbox.serving import (
    TABLE_4,
    Found,
    Served,
    Serving,
    SetUp,
    as_long_as,
    dual_setup,
    floor_ms,
    generation,
    loaded,
    look_ups,
    paper_setups,
    quire_setup,
    serve,
    sized,
    timed,
)
from quire_decoder.core.dual_cache import Tuning
from quire_tools.plan.image_trace import ImageTrace, generate
from quire_tools.report import Report, Row

CACHE_SHARES: Final = (0.01, 0.02, 0.05)
STATIC_ALPHAS: Final = (0.3, 0.4, 0.5, 0.6, 0.7)
_COLD: Final = "Quire, new images not kept"
_SPILLOVER: Final = Serving(nodes=6, window_s=172.8, theta=4)  # 48 hours at 1000 times the speed (§6.5.3)
_PUBLISHED_ALONE_MS: Final = 94.5
Step = Callable[[int], object]


def run_table(trace: ImageTrace, step: Step) -> Report:
    """The six rows of Table 4 beside the published ones, Figure 7's shares, and the decoder's own cache."""
    report = Report("images: Table 4", {"name": "the paper's mean", "unit": "ms"}, tall=True)
    trace = sized(trace)
    serving = loaded(trace, Serving())
    rows = {"Generation": generation(trace, serving)}
    rows |= {name: serve(trace, setup, serving, step) for name, setup in paper_setups().items()}
    rows["Quire"] = serve(trace, quire_setup(), serving, step)
    rows[_COLD] = serve(trace, quire_setup(warm=False), serving, step)
    for name, served in rows.items():
        published = TABLE_4.get(name)
        figures = _latencies(served)
        if published is not None:
            off = max(abs(mine / theirs - 1) for mine, theirs in zip(figures.values(), published, strict=True))
            figures["paper's mean"], figures["furthest off, %"] = published[0], 100 * off
        figures |= _shares(served)
        base = published[0] if published is not None else rows["ImgStore"].mean_ms
        report.rows.append(Row({"set-up": name}, figures, base, base / served.mean_ms))
    report.notes += [
        f"3 nodes of 2 GB; {len(rows['ImgStore'].found)} requests of {_images(trace, serving)} images after "
        f"{min(serving.warmup, len(trace) - serving.window)} that warm up; they take {serving.window_s:.0f} s, so that "
        "LB-LatentCache queues for 15.2 ms in mean; generation's rate makes its mean; all else follows",
        "furthest off: of mean, P50, P95 and P99 against the published ones; Quire's baseline is ImgStore",
    ]
    return report


def run_policies(trace: ImageTrace, step: Step) -> Report:
    """Mean and P99 by the cache's share of all images: an image store, LatentBox, the decoder's; and the floor."""
    report = Report("images: policies", {"name": "ImgStore, same trace and bytes", "unit": "mean, ms"}, tall=True)
    trace = sized(trace)
    serving = loaded(trace, Serving())
    for share in CACHE_SHARES:
        capacity = int(trace.working_set_bytes * share)
        sized_so = replace(serving, node_bytes=capacity // serving.nodes)
        wanted = {"ImgStore": paper_setups()["ImgStore"], "LB-Adaptive": paper_setups()["LB-Adaptive"]}
        rows = {name: serve(trace, setup, sized_so, step) for name, setup in wanted.items()}
        rows["Quire"] = serve(trace, quire_setup(), sized_so, step)
        base = rows["ImgStore"]
        for name, served in rows.items():
            figures = _latencies(served)
            figures["mean lower by, %"] = 100 * (1 - served.mean_ms / base.mean_ms)
            figures["P99 lower by, %"] = 100 * (1 - served.percentile_ms(99) / base.percentile_ms(99))
            figures["floor of the mean"] = floor_ms(trace, sized_so, capacity)
            figures |= _shares(served)
            params = {"cache": f"{share:.0%}", "set-up": name}
            report.rows.append(Row(params, figures, base.mean_ms, base.mean_ms / served.mean_ms))
    report.notes.append(
        "cache: share of all images as PNGs, over three nodes; floor: both forms, the future known, idle devices"
    )
    return report


def run_changing(trace: ImageTrace, seed: int, step: Step) -> Report:
    """The best static split of LatentBox's cache, its tuned one, and the decoder's, while the workload changes."""
    report = Report("images: a trace that changes", {"name": "the best static split", "unit": "mean, ms"}, tall=True)
    changed = changing(trace, seed)
    measured = len(changed) // 2
    serving = replace(Serving(), window=measured, warmup=len(changed) - measured, window_s=measured / _RATE)
    serving = replace(serving, node_bytes=int(0.02 * changed.working_set_bytes / serving.nodes))
    tuning = Tuning(window=10_000, step=0.02)
    setups = {f"α = {alpha}": dual_setup(alpha, replace(tuning, adaptive=False)) for alpha in STATIC_ALPHAS}
    setups |= {"LB-Adaptive": dual_setup(0.5, tuning), "Quire": quire_setup(), _COLD: quire_setup(warm=False)}
    rows = {name: serve(changed, setup, serving, step) for name, setup in setups.items()}
    best = min(rows[f"α = {alpha}"].mean_ms for alpha in STATIC_ALPHAS)
    for name, served in rows.items():
        figures = _latencies(served) | {"mean lower by, %": 100 * (1 - served.mean_ms / best)} | _shares(served)
        report.rows.append(Row({"set-up": name}, figures, best, best / served.mean_ms))
    report.notes.append(
        f"{measured} requests after as many: load by the hour of the day, an image with a tenth of a day's requests, "
        "and a new model, whose images are half as large again, for half of the requests of the last third; cache 2%"
    )
    return report


_RATE: Final = 46.0  # requests a second, as in Table 4's replay
_DAYS: Final = 4
_NEW_SHARE: Final = 0.5
_VIRAL_SHARE: Final = 0.1


def changing(trace: ImageTrace, seed: int) -> ImageTrace:
    """The end of a trace with a day's rhythm, an image that goes viral for one of four days, and a model's release."""
    trace, rng = sized(trace), np.random.default_rng(seed)
    count = min(len(trace), 400_000)
    old = replace(trace, times=trace.times[-count:], objects=trace.objects[-count:])
    released = sized(generate(max(1000, len(trace.image_bytes) // 4), seed + 1))
    objects = old.objects.copy()
    day = np.arange(count) * _DAYS // count
    viral = (day == _DAYS - 2) & (rng.random(count) < _VIRAL_SHARE)
    objects[viral] = objects[np.flatnonzero(day == _DAYS - 2)[0]]
    new = (np.arange(count) >= 2 * count // 3) & (rng.random(count) < _NEW_SHARE)
    objects[new] = len(trace.image_bytes) + released.objects[: int(new.sum())]
    phase = np.linspace(0, 2 * math.pi * _DAYS, count)
    pace = 1 + 0.6 * np.sin(phase)  # seconds between requests: at night three times as long as in the evening
    return ImageTrace(
        np.cumsum(pace),
        objects,
        np.concatenate((trace.image_bytes, released.image_bytes * 3 // 2)),
        np.concatenate((trace.latent_bytes, released.latent_bytes * 3 // 2)),
    )


def run_spillover(trace: ImageTrace, step: Step) -> Report:
    """Six nodes, a thousand times the speed, θ 4 (Figure 10): with spillover and without."""
    report = Report("images: spillover", {"name": "every decode at its owner", "unit": "mean, ms"}, tall=True)
    trace = sized(trace)
    setup: SetUp = paper_setups()["LB-Adaptive"]
    found = look_ups(trace, setup, _SPILLOVER, step)
    crowded = as_long_as(
        replace(_SPILLOVER, theta=math.inf),
        lambda tried: timed(trace, setup, tried, found).mean_ms < _PUBLISHED_ALONE_MS,
    )
    for load, serving in (("1000 × real time", _SPILLOVER), ("as busy as the paper's", crowded)):
        alone = timed(trace, setup, replace(serving, theta=math.inf), found)
        spilling = timed(trace, setup, replace(serving, theta=_SPILLOVER.theta), found)
        figures: dict[str, float] = {}
        for name, served in (("without", alone), ("with", spilling)):
            figures |= {f"{name}: {kind}": each for kind, each in _latencies(served).items() if kind in ("mean", "P99")}
        queues = [float(np.percentile(each.queued_s, 99)) for each in (alone, spilling)]
        figures["mean lower by, %"] = 100 * (1 - spilling.mean_ms / alone.mean_ms)
        figures["P99 lower by, %"] = 100 * (1 - spilling.percentile_ms(99) / alone.percentile_ms(99))
        figures["queue's P99 lower by, %"] = 100 * (1 - queues[1] / queues[0]) if queues[0] else math.nan
        figures["moved, %"] = 100 * spilling.spilled / len(found)
        params = {"load": load, "window, s": f"{serving.window_s:.0f}"}
        report.rows.append(Row(params, figures, alone.mean_ms, alone.mean_ms / spilling.mean_ms))
    report.notes.append(
        "six nodes, θ 4; published: mean lower by 16.5% (94.5 to 78.9 ms), P99 by 23.9% (472.5 to 359.5), "
        "the queue's by 49%"
    )
    return report


def _latencies(served: Served) -> dict[str, float]:
    return {"mean": served.mean_ms} | {f"P{each}": served.percentile_ms(each) for each in (50, 95, 99)}


def _shares(served: Served) -> dict[str, float]:
    """Figure 7."""
    return {f"{found.value}, %": 100 * served.share(found) for found in Found}


def _images(trace: ImageTrace, serving: Serving) -> int:
    return len(np.unique(trace.objects[-serving.window :]))
