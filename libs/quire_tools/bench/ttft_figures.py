"""Figures of `quire bench ttft`: overhead by path and what a tenth of the link costs, and lines over rate or hit."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any, Final

from quire_tools.bench.report import Report, Row

_PATHS: Final = ("Local-DRAM-CW", "Local-DRAM-LW", "S3Batch-CW", "S3Agg-LW", "cold S3Agg-LW")


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
    upper.set(ylabel="TTFT over opt-local-LW, %", title=f"time to first token by path, {fastest:g} Gbps")
    upper.legend(fontsize=8)
    for at, name in enumerate(("S3Batch-CW", "S3Agg-LW")):
        places = [index + (at - 0.5) * 0.35 for index in range(len(rows))]
        values = [
            (slow[_name(row)].measured[f"{name}, ms"] / row.measured[f"{name}, ms"] - 1) * 100
            if _name(row) in slow
            else 0
            for row in rows
        ]
        lower.bar(places, values, 0.35, label=name)
    lower.set(ylabel="TTFT against the full link, %", title="what a tenth of the link costs")
    lower.legend(fontsize=8)
    for axes in (upper, lower):
        axes.set_xticks(range(len(rows)), [_name(row) for row in rows], fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def lines(report: Report, path: Path) -> None:
    """One line per value of the first parameter, over the second; dashed verticals where the rows name them."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    names = list(report.rows[0].params)
    shown = list(report.rows[0].measured)[:2]
    for index, (value, group) in enumerate(groupby(report.rows, key=lambda row: row.params[names[0]])):
        rows = list(group)
        x = [row.params[names[1]] for row in rows]
        colour = f"C{index}"
        axes.plot(x, [row.measured[shown[0]] for row in rows], "o-", color=colour, label=f"{value}: {shown[0]}")
        if not any(row.measured[shown[1]] != row.measured[shown[1]] for row in rows):
            axes.plot(x, [row.measured[shown[1]] for row in rows], "--", color=colour, label=f"{value}: {shown[1]}")
        for name, style in (("perfect overlap", ":"), ("crossover", "-.")):
            if (at := rows[0].measured.get(name)) is not None and at == at:
                axes.axvline(at, linestyle=style, color=colour, label=f"{value}: {name} {at:.4g}")
    axes.set(xlabel=names[1], yscale="symlog", title=f"quire bench {report.bench}")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _name(row: Row) -> str:
    return f"{row.params['context'] // 1024}K\n{row.params['hit']:.1%}\nG {row.params['G']}"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
