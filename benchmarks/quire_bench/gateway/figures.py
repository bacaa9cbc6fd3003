"""Figures of `quire bench s3`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from quire_tools.report import Report


def write(both: Report, paths: Report, aggregated: Report, json_file: Path | None, plot: Path | None) -> None:
    """JSON of all rows; a figure with throughput by block size (Figure 9) and by chunk size (Figures 11, A8)."""
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(both), indent=2))
    if plot is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8))
    most = max(row.params["at once"] for row in paths.rows)
    rows = [row for row in paths.rows if row.params["at once"] == most]
    blocks = [row.params["block, KiB"] for row in rows]
    for name in ("S3TCP", "Buffer", "Direct"):
        for operation, style in (("GET", "o-"), ("PUT", "s--")):
            left.plot(
                blocks, [row.measured[f"{name} {operation}, MB/s"] for row in rows], style, label=f"{name} {operation}"
            )
    left.plot(blocks, [row.baseline for row in rows], "k:", label="raw UCX")
    left.set(
        xscale="log", yscale="log", xlabel="block, KiB", ylabel="MB/s", title=f"one object a request, {most} at once"
    )
    left.legend(fontsize=7)
    sizes = sorted({row.params["MiB"] for row in aggregated.rows})
    for size in sizes:
        rows = [row for row in aggregated.rows if row.params["MiB"] == size]
        for column, style in (("per object, GB/s", "^:"), ("Batch, GB/s", "s--"), ("Agg, GB/s", "o-")):
            right.plot([row.params["G"] for row in rows], [row.measured[column] for row in rows], style,
                       label=f"{column.split(',')[0]}, {size} MiB")  # fmt: skip
    right.set(xscale="log", yscale="log", xlabel="tokens per chunk, G", ylabel="GB/s", title="many chunks, one request")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(plot, dpi=120)
    pyplot.close(figure)
