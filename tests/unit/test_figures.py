"""What a benchmark draws: a reader trusts its axes, so each panel is of one group of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire_bench.storage import pool
from quire_bench.ttft import figures as ttft_figures
from quire_tools.report import Report, Row

NAN = float("nan")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The figures that were written, open still."""
    from matplotlib import pyplot

    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    yield kept
    monkeypatch.undo()
    pyplot.close("all")


def _draw(draw: Callable[[Report, Path], None], rows: list[Row], path: Path, drawn: list[Any]) -> Any:
    draw(Report("any", {"name": "the limit", "unit": "ms"}, rows), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return drawn[-1]


def test_a_bar_for_each_path(tmp_path: Path, drawn: list[Any]) -> None:
    paths = ("Local-DRAM-CW", "Local-DRAM-LW", "S3Batch-CW", "S3Agg-LW", "cold S3Agg-LW")
    rows = [
        Row(
            {"context": 4096, "hit": hit, "G": 64, "Gbps": gbps},
            {f"{path}, ms": 10 + at * 100 / gbps for at, path in enumerate(paths, 1)},
            10,
            1,
        )
        for gbps in (100.0, 50.0)
        for hit in (0.5, 0.875)
    ]
    upper, lower = _draw(ttft_figures.overheads, rows, tmp_path / "figure.png", drawn).axes
    assert [label.get_text() for label in upper.get_xticklabels()] == ["4K\n50%\nG 64", "4K\n87.5%\nG 64"]
    added = {bars.get_label(): [round(bar.get_height()) for bar in bars] for bars in upper.containers}
    assert added == {path: [10 * at, 10 * at] for at, path in enumerate(paths, 1)}
    slower = {bars.get_label(): round(bars[0].get_height(), 1) for bars in lower.containers}
    assert slower == {"S3Batch-CW": 23.1, "S3Agg-LW": 28.6}


def test_a_panel_for_each_shape_over_the_rate(tmp_path: Path, drawn: list[Any]) -> None:
    names = ("added TTFT, %", "Eq. 4, %", "perfect overlap")
    rows = [
        Row({"shape": shape, "Gbps": gbps}, dict(zip(names, (9.0 / gbps, 6.0 / gbps, 4.0), strict=True)), 1, 1)
        for shape in ("4K 50.0%", "4K 87.5%", "64K 50.0%", "64K 87.5%")
        for gbps in (10.0, 3.0)
    ]
    figure = _draw(ttft_figures.over_rate, rows, tmp_path / "figure.png", drawn)
    assert [axes.get_title().split(" cached")[0] for axes in figure.axes] == [
        "4K 50%",
        "4K 87.5%",
        "64K 50%",
        "64K 87.5%",
    ]
    measured, predicted, overlap = figure.axes[0].lines
    assert list(measured.get_xdata()) == [10.0, 3.0] and list(measured.get_ydata()) == [0.9, 3.0]
    assert list(predicted.get_ydata()) == [0.6, 2.0] and list(overlap.get_xdata()) == [4.0, 4.0]


def test_a_star_where_stall_and_compute_cross(tmp_path: Path, drawn: list[Any]) -> None:
    rows = [
        Row({"tier": tier, "hit": hit}, {"stall, ms": stall, "compute, ms": 20.0, "crossover": crossing}, 1, 1)
        for tier, crossing in (("memory", NAN), ("pool", 0.625), ("object", NAN))
        for hit, stall in ((0.5, 10.0), (0.75, 30.0))
    ]
    figure = _draw(ttft_figures.over_hits, rows, tmp_path / "figure.png", drawn)
    assert [len(axes.lines) for axes in figure.axes] == [2, 3, 2], "no star where there is no crossing"
    star = figure.axes[1].lines[2]
    assert list(star.get_xdata()) == [62.5] and list(star.get_ydata()) == [20.0]


def test_drives_beside_the_bare_device(tmp_path: Path, drawn: list[Any]) -> None:
    measured = {"retrieve GB/s": 2.0, "store GB/s": 5.0, "bare store GB/s": 4.0}
    rows = [Row({"context": context}, measured, 2.5, 0.8) for context in (1024, 131_072)]
    figure = _draw(pool.draw, rows, tmp_path / "figure.png", drawn)
    assert [[line.get_ydata()[0] for line in axes.lines] for axes in figure.axes] == [[2.0, 2.5], [5.0, 4.0]]
    assert figure.axes[1].get_ylim()[0] == 0 and figure.axes[1].get_ylim()[1] > 5.0, "all of it is seen"
