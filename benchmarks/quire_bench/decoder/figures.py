"""Figures of `quire bench images` and `quire plan images`."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

from quire_bench.papers.latentbox.simulator import Result
from quire_tools.report import Report


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


def serving(report: Report, path: Path) -> None:
    """Mean and P99 by row; below, where images were found (LatentBox, Figure 7)."""
    pyplot = _pyplot()
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 7))
    rows = [row for row in report.rows if row.params["set-up"] != "Generation"]
    names = ["\n".join(str(value) for value in row.params.values()) for row in rows]
    for offset, column in ((-0.2, "mean"), (0.2, "P99")):
        upper.bar([at + offset for at in range(len(rows))], [row.measured[column] for row in rows], 0.4, label=column)
    bottom = [0.0] * len(rows)
    for found in ("image", "latent", "miss"):
        shares = [row.measured[f"{found}, %"] for row in rows]
        lower.bar(range(len(rows)), shares, 0.6, bottom=bottom, label=found)
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    upper.set(ylabel="latency, ms", title=report.bench)
    lower.set(ylabel="requests, %")
    for axes in (upper, lower):
        axes.set_xticks(range(len(rows)), [fill(name, 12) for name in names], fontsize=7)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
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


def live(report: Report, path: Path) -> None:
    """Mean and P99 by set-up; below, where images were found (LatentBox, Figure 7)."""
    pyplot = _pyplot()
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 7))
    names = [row.params["set-up"] for row in report.rows]
    for offset, column in ((-0.2, "mean, ms"), (0.2, "P99, ms")):
        places = [at + offset for at in range(len(names))]
        upper.bar(places, [row.measured[column] for row in report.rows], 0.4, label=column)
    upper.set(yscale="log", ylabel="latency, ms", title="the same trace through the real services")
    bottom = [0.0] * len(names)
    for source in ("image", "latent", "joined", "miss"):
        shares = [row.measured[f"{source}, %"] for row in report.rows]
        lower.bar(range(len(names)), shares, 0.6, bottom=bottom, label=source)
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    lower.set(ylabel="requests, %")
    for axes in (upper, lower):
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _save(figure, path)


def fidelity(report: Report, path: Path) -> None:
    """PSNR over bytes: lossy codecs as lines, the latent's decodes as points (LatentBox, Figure 12)."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    codecs = dict.fromkeys(row.params["format"].split(" q")[0] for row in report.rows if " q" in row.params["format"])
    for codec in codecs:
        rows = [row for row in report.rows if row.params["format"].startswith(f"{codec} q")]
        axes.plot(
            [row.measured["bytes"] for row in rows], [row.measured["PSNR, dB"] for row in rows], "o-", label=codec
        )
    for row in report.rows:
        if row.params["format"].startswith(("…", "latent, pcodec")):
            axes.plot(row.measured["bytes"], row.measured["PSNR, dB"], "*", markersize=12, label=row.params["format"])
    axes.set(xlabel="bytes per image", ylabel="PSNR against the reference decode, dB", title="what comes back")
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
