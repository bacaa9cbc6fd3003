"""What every benchmark produces: one JSON shape that tools read, one table, one figure."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire import __version__


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: `params`, medians in `measured` (with their spread), the baseline's figure and the ratio."""

    params: dict[str, Any]
    measured: dict[str, float]
    baseline: float
    ratio: float


@dataclass(slots=True)
class Report:
    """`baseline`: at least its name and unit. `notes` are printed below the table and kept in the JSON."""

    bench: str
    baseline: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    version: str = __version__
    machine: str = field(default_factory=lambda: f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}")

    def show(self, json_file: Path | None, plot_file: Path | None) -> None:
        """Print; write the files that are asked for."""
        self._print()
        if json_file is not None:
            json_file.write_text(json.dumps(asdict(self), indent=2))
        if plot_file is not None:
            self._plot(plot_file)

    def _print(self) -> None:
        console = Console()
        table = Table(title=f"quire bench {self.bench}")
        table.add_column("")
        for row in self.rows:
            table.add_column("\n".join(f"{name} = {value}" for name, value in row.params.items()), justify="right")
        for name in self.rows[0].measured:
            table.add_row(name, *(f"{row.measured[name]:.4g}" for row in self.rows))
        table.add_section()
        table.add_row(f"baseline, {self.baseline['unit']}", *(f"{row.baseline:.4g}" for row in self.rows))
        table.add_row("ratio", *(f"[bold]{row.ratio:.2f}[/]" for row in self.rows))
        console.print(table)
        console.print(f"baseline: {self.baseline['name']}; machine: {self.machine}", highlight=False)
        for note in self.notes:
            console.print(note, highlight=False)

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


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: how noisy the machine was."""
    return (max(values) - min(values)) / statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
