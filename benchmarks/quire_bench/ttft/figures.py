"""Figures of `quire bench ttft`: overhead by path and what a tenth of the link costs, over rates, over hit rates."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from quire_tools.report import Report, Row

_PATHS: Final = ("Local-DRAM-CW", "Local-DRAM-LW", "S3Batch-CW", "S3Agg-LW", "cold S3Agg-LW")
_OURS: Final = "#4878a8"
_TICKS_GBPS: Final = (3, 5, 10, 20, 50, 100)
_CROSSING: Final = ("stall, ms", "compute, ms")


def overheads(report: Report, path: Path) -> None:
    """TTFT over the floor by path (ObjectCache, Figure 13); below, capped against uncapped (Figure 14)."""
    pyplot = _pyplot()
    fastest = max(row.params["Gbps"] for row in report.rows)
    rows = [row for row in report.rows if row.params["Gbps"] == fastest]
    slow = {_name(row): row for row in report.rows if row.params["Gbps"] != fastest}
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(max(7, 0.75 * len(rows)), 8))
    width = 0.8 / len(_PATHS)
    for at, name in enumerate(_PATHS):
        places = [index + (at - 2) * width for index in range(len(rows))]
        values = [(row.measured[f"{name}, ms"] / row.baseline - 1) * 100 for row in rows]
        upper.bar(places, values, width, label=name)
    upper.set_yscale("symlog", linthresh=1)
    upper.set_ylabel("TTFT over opt-local-LW, %")
    upper.set_title(f"time to first token by path, {fastest:g} Gbps", loc="left")
    for at, name in enumerate(("S3Batch-CW", "S3Agg-LW")):
        places = [index + (at - 0.5) * 0.35 for index in range(len(rows))]
        values = [
            (slow[_name(row)].measured[f"{name}, ms"] / row.measured[f"{name}, ms"] - 1) * 100
            if _name(row) in slow
            else 0
            for row in rows
        ]
        lower.bar(places, values, 0.35, label=name)
    lower.set_ylabel("TTFT against the full link, %")
    lower.set_title("what a slower link costs", loc="left")
    for axes in (upper, lower):
        axes.set_xticks(range(len(rows)), [_name(row) for row in rows], fontsize=8)
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.legend(fontsize=9, ncols=len(_PATHS), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def over_rate(report: Report, path: Path) -> None:
    """Added TTFT over the link's rate, a panel for each shape (ObjectCache, Figure 15), beside what Eq. 4 gives."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(2, 2, figsize=(9.5, 6), sharex=True)
    shapes = groupby(report.rows, key=lambda row: str(row.params["shape"]).replace(".0%", "%"))
    for axes, (shape, group) in zip(panels.flat, shapes, strict=True):
        rows = list(group)
        rates = [row.params["Gbps"] for row in rows]
        axes.plot(rates, [row.measured["added TTFT, %"] for row in rows], "o-", color=_OURS, label="measured")
        axes.plot(rates, [row.measured["Eq. 4, %"] for row in rows], "--", color="#d08030", label="Eq. 4")
        needed = rows[0].measured["perfect overlap"]
        axes.axvline(needed, linestyle=":", color="#888888", label="perfect overlap")
        axes.set(xscale="log", yscale="symlog", title=f"{shape} cached, perfect overlap at {needed:.1f} Gbps")
        axes.set_xticks(_TICKS_GBPS, [f"{each:g}" for each in _TICKS_GBPS], minor=False)
        axes.minorticks_off()
        axes.set_ylim(0, 3 * max(row.measured["added TTFT, %"] for row in rows))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[1]:
        axes.set_xlabel("link, Gbps")
    for axes in panels[:, 0]:
        axes.set_ylabel("added TTFT, %")
    panels[0, 0].legend(frameon=False, fontsize=9)
    _save(figure, path)


def over_hits(report: Report, path: Path) -> None:
    """Compute and stall over the cached share, a panel for each tier (Tutti, Figure 13), a star where they cross."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    for axes, (tier, group) in zip(panels, groupby(report.rows, key=lambda row: row.params["tier"]), strict=True):
        rows = list(group)
        hits = [100 * row.params["hit"] for row in rows]
        axes.plot(hits, [row.measured["compute, ms"] for row in rows], "s-", color="#c05050", label="compute")
        axes.plot(hits, [row.measured["stall, ms"] for row in rows], "o--", color=_OURS, label="stall")
        crossing = 100 * rows[0].measured["crossover"]
        at_ms = [float(np.interp(crossing, hits, [row.measured[name] for row in rows])) for name in _CROSSING]
        if not math.isnan(crossing):
            axes.plot([crossing], [sum(at_ms) / 2], "*", color="black", markersize=13, label="stall = compute")
        where = "" if math.isnan(crossing) else f": they cross at {crossing:.1f}%"
        axes.set(yscale="log", xlabel="cached, %", title=tier + where)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms")
    panels[0].legend(frameon=False, fontsize=9, loc="center left")
    _save(figure, path)


def cold_prefixes(report: Report, path: Path) -> None:
    """Draw compute and stalls of each cold prefix, those of whole objects, and Eq. 3."""
    pyplot = _pyplot()
    rows = report.rows
    figure, axes = pyplot.subplots(figsize=(max(7, 0.9 * len(rows) + 2), 4.2))
    places = np.arange(len(rows))
    shares = {name: np.array([row.measured[f"{name}, ms"] for row in rows]) for name in ("compute", "TTFT", "Eq. 3")}
    objects = np.array([row.baseline for row in rows])
    axes.bar(places - 0.2, shares["compute"] / objects, 0.36, color=_OURS, label="layer by layer: compute")
    waits = (shares["TTFT"] - shares["compute"]) / objects
    axes.bar(places - 0.2, waits, 0.36, bottom=shares["compute"] / objects, color="#a8c4e0", label="waits for layers")
    axes.bar(places + 0.2, shares["compute"] / objects, 0.36, color="#d08030", label="whole objects: compute")
    waits = 1 - shares["compute"] / objects
    axes.bar(
        places + 0.2, waits, 0.36, bottom=shares["compute"] / objects, color="#ecc9a4", label="waits for all of it"
    )
    axes.plot(places - 0.2, shares["Eq. 3"] / objects, "_", color="black", markersize=18, label="Eq. 3")
    axes.set_xticks(places, [f"{_name(row)}\n+{row.params['latency ms']} ms" for row in rows], fontsize=8)
    axes.set_ylabel("time to first token\nover that by whole objects")
    axes.legend(fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)


def _name(row: Row) -> str:
    return f"{row.params['context'] // 1024}K\n{100 * row.params['hit']:g}%\nG {row.params['G']}"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
