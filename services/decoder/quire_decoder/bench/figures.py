"""Figures of `quire bench images` and `quire plan images`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.bench.report import Report
from quire_decoder.bench.simulator import Result


def sizes(report: Report, path: Path) -> None:
    """Mean latency over cache size, a line per cache."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    names = [row.params["cache"] for row in report.rows]
    for column in report.rows[0].measured:
        if column.endswith(", ms") and not column.startswith("P99"):
            style = ":" if column.startswith("Belady") else "-"
            axes.plot(
                names, [row.measured[column] for row in report.rows], f"o{style}", label=column.removesuffix(", ms")
            )
    axes.set(xlabel="cache, share of the working set", ylabel="mean latency, ms", title="one budget, three caches")
    axes.legend(fontsize=8)
    _save(figure, path)


def alphas(results: dict[str, Result], path: Path) -> None:
    """α and mean latency over time."""
    pyplot = _pyplot()
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True)
    for name, result in results.items():
        requests = [at for at, _, _ in result.windows]
        upper.plot(requests, [alpha for _, alpha, _ in result.windows], label=name)
        lower.plot(requests, [latency * 1e3 for _, _, latency in result.windows], label=name)
    upper.set(ylabel="α", title="the split, as it tunes itself")
    lower.set(xlabel="requests", ylabel="mean latency of a window, ms")
    upper.legend(fontsize=8)
    _save(figure, path)


def costs(report: Report, path: Path) -> None:
    """Cumulative cost by set-up and horizon, relative to the first (LatentBox, Figure 8)."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    groups = list(dict.fromkeys(row.params["prices"] for row in report.rows))
    width = 0.8 / len(report.rows[0].measured)
    rows = report.rows
    for index, name in enumerate(rows[0].measured):
        places = [at + (index - len(rows[0].measured) / 2) * width for at in range(len(rows))]
        axes.bar(places, [row.measured[name] for row in rows], width, label=name)
    axes.set_xticks(range(len(rows)), [f"{row.params['year']}\n{row.params['prices']}" for row in rows], fontsize=7)
    axes.set(yscale="log", ylabel="cumulative cost, first year's image store = 1", title=f"prices: {', '.join(groups)}")
    axes.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
