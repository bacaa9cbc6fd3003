"""Results of every benchmark: one JSON shape that tools read, one table, one figure."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire import __version__

_TALL_WIDTH = 170


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one configuration: `params`, medians with spread in `measured`, the baseline and the ratio."""

    params: dict[str, Any]
    measured: dict[str, float]
    baseline: float
    ratio: float


@dataclass(slots=True)
class Report:
    """`baseline`: at least its name and unit. `notes` are printed below the table and kept in the JSON.

    `tall`: a line for each row, not a column; rows that measure the same share a table.
    """

    bench: str
    baseline: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tall: bool = False
    version: str = __version__
    machine: str = field(default_factory=lambda: f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}")

    def show(
        self, json_file: Path | None, plot_file: Path | None, *, draw: Callable[[Path], None] | None = None
    ) -> None:
        """Print; write the files that are asked for. `draw`: a figure of its own instead of bars of ratios."""
        self._print()
        if json_file is not None:
            json_file.write_text(json.dumps(_without_nan(asdict(self)), indent=2))
        if plot_file is not None:
            (draw or self._plot)(plot_file)

    def _print(self) -> None:
        console = Console()
        if self.tall:
            # A table that is cut is of no use, one that wraps is.
            console = Console(width=max(console.width, _TALL_WIDTH))
            for _, rows in groupby(self.rows, key=lambda row: tuple(row.measured)):
                console.print(self._lines(list(rows)))
        else:
            console.print(self._columns())
        console.print(f"baseline: {self.baseline['name']}; machine: {self.machine}", highlight=False)
        for note in self.notes:
            console.print(note, highlight=False)

    def _lines(self, rows: list[Row]) -> Table:
        table = Table(title=f"quire bench {self.bench}")
        for name in rows[0].params:
            table.add_column(name)
        for name in (*rows[0].measured, f"baseline, {self.baseline['unit']}", "ratio"):
            table.add_column(name, justify="right")
        for row in rows:
            figures = ["–" if math.isnan(value) else f"{value:.4g}" for value in row.measured.values()]
            table.add_row(*map(str, row.params.values()), *figures, f"{row.baseline:.4g}", f"[bold]{row.ratio:.2f}[/]")
        return table

    def _columns(self) -> Table:
        table = Table(title=f"quire bench {self.bench}")
        table.add_column("")
        for row in self.rows:
            table.add_column("\n".join(f"{name} = {value}" for name, value in row.params.items()), justify="right")
        for name in self.rows[0].measured:
            table.add_row(name, *(f"{row.measured[name]:.4g}" for row in self.rows))
        table.add_section()
        table.add_row(f"baseline, {self.baseline['unit']}", *(f"{row.baseline:.4g}" for row in self.rows))
        table.add_row("ratio", *(f"[bold]{row.ratio:.2f}[/]" for row in self.rows))
        return table

    def _plot(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        names = ["\n".join(f"{name} {value}" for name, value in row.params.items()) for row in self.rows]
        figure, axes = pyplot.subplots(figsize=(2.0 + 1.6 * len(names), 4.0))
        axes.bar(names, [row.ratio for row in self.rows], color="#4878a8")
        axes.axhline(1.0, color="#888888", linewidth=1)
        axes.set(ylabel="ratio to the baseline")
        axes.set_title(f"quire bench {self.bench}, against\n{self.baseline['name']}", fontsize=9)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _without_nan(value: Any) -> Any:
    """Replace NaN by null, for JSON."""
    match value:
        case float() if math.isnan(value):
            return None
        case dict():
            return {name: _without_nan(item) for name, item in value.items()}
        case list():
            return [_without_nan(item) for item in value]
    return value


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / |median|: how noisy the machine was."""
    return (max(values) - min(values)) / abs(statistics.median(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
