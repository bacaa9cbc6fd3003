"""`quire bench scheduler`: who gets how much of a shared link under each policy, and what it costs in TTFT."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

from quire.model.errors import InvalidRequest
from quire_bench.scheduler.figure import draw
from quire_bench.scheduler.live import LIVE_POLICIES, run_live
from quire_bench.scheduler.workloads import GBPS, PaperMeasurements, Workload, read_workload
from quire_bench.scheduler.worlds import FAMILIES, ROUNDS, SETTLED, made_up, play, readings
from quire_scheduler.core.adaptive import Adaptive, cheapest_on_grid
from quire_scheduler.core.curves import Array
from quire_scheduler.core.factory import POLICIES, make_policy
from quire_scheduler.core.policy import Observation
from quire_tools.report import Report, Row

_UNITS = 1000
_WITHIN = {0.0: 0.03, 0.1: 0.06}
_DEARER = 1.1


def learn(
    workload: Workload, margin: float, stall_s: Callable[[int, float], float], rounds: int = ROUNDS
) -> list[Array]:
    """Return Adaptive's allocation in each round, if it observes `stall_s(request, rate)` after each.

    It starts knowing nothing.
    """
    policy, history = Adaptive(margin), []
    for _ in range(rounds):
        rates = policy.allocate(workload.demands, workload.budget)
        history.append(rates)
        for index, (request, rate) in enumerate(zip(workload.requests, rates.tolist(), strict=True)):
            window_s = request.window_ms / 1e3
            seen = Observation("", request.bytes_per_layer, window_s, request.layers, rate, stall_s(index, rate))
            policy.observe(seen)
    return history


def settled(history: list[Array], cost: Callable[[Array], float]) -> Array:
    """The allocation of the median round after the first thirty."""
    later = sorted(history[SETTLED:], key=cost)
    return later[len(later) // 2]


def run_paper() -> tuple[Report, dict[str, dict[str, Array]]]:
    """Workloads A, B and C on the published measurements; the report, and rates by workload and policy."""
    paper = PaperMeasurements()
    report = Report("scheduler", {"name": "optimum on the measured curves", "unit": "added TTFT, ms"}, tall=True)
    allocations: dict[str, dict[str, Array]] = {}
    for workload in paper.workloads:
        margin = paper.margin_gbps * GBPS
        rates = {name: make_policy(name, margin).allocate(workload.demands, workload.budget) for name in POLICIES[:-1]}
        stall_s = partial(_measured_stall_s, paper, workload)
        history = learn(workload, margin, stall_s)
        rates["adaptive"] = settled(history, partial(paper.added_ms, workload))
        rates["optimum"] = paper.optimum(workload)
        allocations[workload.name] = rates
        floor = paper.added_ms(workload, rates["optimum"])
        for name, each in rates.items():
            added = paper.added_ms(workload, each)
            deviation = math.nan
            if not math.isnan(paper.published_added_ms(workload.name, name)):
                deviation = float(np.abs(each / GBPS - paper.published_gbps(workload.name, name)).max())
            measured = {
                **_named_rates(workload, each),
                "farthest from Table A9, Gbps": deviation,
                "added TTFT, ms": added,
                "Table A12, ms": paper.published_added_ms(workload.name, name),
            }
            report.rows.append(Row({"workload": workload.name, "policy": name}, measured, floor, floor / added))
        early = ", ".join(f"{paper.added_ms(workload, each):.0f}" for each in history[:12])
        report.notes.append(f"workload {workload.name}: Adaptive's added TTFT while it learned, ms: {early}, …")
    report.notes.append(f"source: {paper.source}; the method: {' '.join(str(PaperMeasurements.__doc__).split())}")
    return report, allocations


def run_workload(file: Path, margin_gbps: float) -> tuple[Report, dict[str, dict[str, Array]]]:
    """Any other set of requests, by Eq. 3 and 4."""
    workload = read_workload(file)
    margin = margin_gbps * GBPS
    rates = {name: make_policy(name, margin).allocate(workload.demands, workload.budget) for name in POLICIES[:-1]}
    rates["adaptive"] = settled(learn(workload, margin, partial(_stall_s, workload)), workload.added_ttft_s)
    grid = workload.budget * np.arange(1, _UNITS + 1) / _UNITS
    costs = [np.array([_stall_s(workload, at, rate) for rate in grid]) for at in range(len(workload.requests))]
    rates["optimum"] = cheapest_on_grid(costs, workload.budget)
    floor = workload.added_ttft_s(rates["optimum"]) * 1e3
    report = Report("scheduler", {"name": "optimum of Eq. 3", "unit": "added TTFT, ms"}, tall=True)
    for name, each in rates.items():
        added = workload.added_ttft_s(each) * 1e3
        measured = {**_named_rates(workload, each), "added TTFT, ms": added}
        report.rows.append(Row({"workload": workload.name, "policy": name}, measured, floor, floor / added))
    report.notes.append("predicted by Eq. 3 of ObjectCache, first layer included; nothing was measured")
    return report, {workload.name: rates}


def run_curves(count: int) -> Report:
    """Adaptive on links whose curves are known, without and with noise of 10%; `count` of each made-up family."""
    report = Report("scheduler", {"name": "optimum on the curves", "unit": "total stall, of the optimum"}, tall=True)
    groups = {"paper": readings()} | {family: [made_up(family, seed) for seed in range(count)] for family in FAMILIES}
    for noise, within in _WITHIN.items():
        for name, worlds in track(groups.items(), f"noise of {noise:.0%}", transient=True):
            games = [play(world, Adaptive(world.margin), noise) for world in worlds]
            medians, dearest = (np.array(one) for one in zip(*((g.settled, g.dearest) for g in games), strict=True))
            measured = {
                "links": float(len(games)),
                "median round after 30, mean": float(medians.mean()),
                "worst link": float(medians.max()),
                "links within 3%, with noise 6%": float(np.mean(medians <= 1 + within)),
                "dearest round after 10, of the best published": float(dearest.max()),
                "links within 10% of it": float(np.mean(dearest <= _DEARER)),
            }
            params = {"curves": name, "noise": f"{noise:.0%}"}
            report.rows.append(Row(params, measured, 1.0, 1.0 / float(medians.mean())))
    report.notes.append(
        f"{ROUNDS} rounds a link, from no knowledge; 0.2% of all windows is added to each total, so that ratios of "
        "totals near 0 count for little; noise: standard deviation of what Adaptive is told of a stall"
    )
    return report


def _measured_stall_s(paper: PaperMeasurements, workload: Workload, at: int, rate: float) -> float:
    return paper.stall_ms(workload.requests[at].name, rate) / 1e3


def _stall_s(workload: Workload, at: int, rate: float) -> float:
    return float(Workload("", workload.cap_gbps, (workload.requests[at],)).stalls_s(np.array([rate]))[0])


def _named_rates(workload: Workload, rates: Array) -> dict[str, float]:
    return {f"{each.name}, Gbps": rate / GBPS for each, rate in zip(workload.requests, rates.tolist(), strict=True)}


def command(
    source: Annotated[
        str, typer.Option(help="paper: ObjectCache's workloads on its measurements; curves: links of many forms")
    ] = "paper",
    links: Annotated[int, typer.Option(help="with --source curves: of each form", min=1)] = 24,
    workload: Annotated[Path | None, typer.Option(help="a set of requests of your own (JSON)")] = None,
    live: Annotated[bool, typer.Option("--live", help="run the paper's workloads through the real services")] = False,
    only: Annotated[str, typer.Option(help="with --live: which workloads")] = "A,B,C",
    policies: Annotated[str, typer.Option(help="with --live: which policies")] = ",".join(LIVE_POLICIES),
    speed: Annotated[float, typer.Option(help="with --live: windows shorter, rates higher by this factor")] = 1.0,
    rounds: Annotated[int, typer.Option(help="with --live: how often Adaptive runs, to learn")] = 30,
    margin_gbps: Annotated[float, typer.Option(help="with --workload: δ of Eq. 7")] = 5.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Shares of a contended link by policy, and the TTFT that each adds; the optimum as floor."""
    if source not in ("paper", "curves"):
        raise InvalidRequest(f"{source!r}; there are: paper, curves", field="source")
    if source == "curves":
        run_curves(links).show(json_file, plot)
        return
    if live:
        report, allocations = run_live(only.split(","), speed, rounds, policies.split(","))
    elif workload is not None:
        report, allocations = run_workload(workload, margin_gbps)
    else:
        report, allocations = run_paper()
    report.show(json_file, plot, draw=lambda path: draw(report, allocations, path))
