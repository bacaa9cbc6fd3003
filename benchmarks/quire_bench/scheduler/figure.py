"""The figure of `quire bench scheduler`: shares on the left, added TTFT on the right, like ObjectCache's Figure 16."""

from __future__ import annotations

from pathlib import Path

from quire_bench.scheduler.workloads import GBPS
from quire_scheduler.core.curves import Array
from quire_tools.report import Report


def draw(report: Report, allocations: dict[str, dict[str, Array]], path: Path) -> None:
    """One row per workload. `allocations`: rates in bytes per second by workload and policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(allocations), 2, figsize=(11, 2.9 * len(allocations)), squeeze=False, width_ratios=(3, 2)
    )
    colours = pyplot.get_cmap("viridis")
    for (shares, added), (workload, rates) in zip(grid, allocations.items(), strict=True):
        rows = [row for row in report.rows if row.params["workload"] == workload]
        requests = [
            name.removesuffix(", Gbps") for name in rows[0].measured if name.endswith("Gbps") and "A9" not in name
        ]
        policies = list(rates)
        width = 0.8 / len(policies)
        for at, (policy, each) in enumerate(rates.items()):
            places = [index + (at - (len(policies) - 1) / 2) * width for index in range(len(each))]
            shares.bar(places, each / GBPS, width, color=colours(at / len(policies)), label=policy)
        shares.set_xticks(range(len(requests)), requests, fontsize=7)
        shares.set(ylabel="Gbps", title=f"workload {workload}: rates")
        names = [row.params["policy"] for row in rows]
        bars = added.bar(
            names,
            [row.measured["added TTFT, ms"] for row in rows],
            color=[colours(index / len(rows)) for index in range(len(rows))],
        )
        added.bar_label(bars, fmt="%.0f", fontsize=7)
        added.tick_params(axis="x", labelsize=7, rotation=25)
        added.set(ylabel="ms", title="added TTFT, all requests together")
    grid[0][0].legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
