"""A figure of what was measured beside its baseline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_tools.report import Report


def draw(report: Report, column: str, label: Callable[[dict[str, Any]], str], path: Path) -> None:
    """Two bars for each row: `column`, which has the baseline's unit, and the baseline; the ratio stands behind them.

    `label`: of a row, by its parameters.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [label(row.params) for row in report.rows]
    places = range(len(names))
    measured = [row.measured[column] for row in report.rows]
    baseline = [row.baseline for row in report.rows]
    figure, axes = pyplot.subplots(figsize=(8.0, 1.4 + 0.55 * len(names)))
    axes.barh([place - 0.19 for place in places], measured, 0.36, color="#4878a8", label="Quire")
    axes.barh([place + 0.19 for place in places], baseline, 0.36, color="#c8c8c8", label=report.baseline["name"])
    for place, row in enumerate(report.rows):
        axes.annotate(f" {row.ratio:.2f}", (max(measured[place], baseline[place]), place), va="center", fontsize=9)
    axes.set(yticks=list(places), yticklabels=names, xlabel=report.baseline["unit"])
    axes.set_xlim(0, 1.12 * max(*measured, *baseline))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="lower center", frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
