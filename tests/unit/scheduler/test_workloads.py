"""ObjectCache's workloads: published allocations, the learning policy against them, files of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.model.errors import InvalidRequest
from quire_bench.scheduler.scheduler import run_paper, run_workload
from quire_bench.scheduler.workloads import GBPS, PaperMeasurements, read_workload
from quire_scheduler.core.factory import make_policy

PAPER = PaperMeasurements()


@pytest.mark.parametrize("policy", ["equal", "kv-prop", "bw-prop", "stall-opt", "calibrated"])
@pytest.mark.parametrize("at", [0, 1, 2], ids=["A", "B", "C"])
def test_allocations_are_those_of_table_a9(policy: str, at: int) -> None:
    workload = PAPER.workloads[at]
    rates = make_policy(policy, PAPER.margin_gbps * GBPS).allocate(workload.demands, workload.budget)
    assert np.abs(rates / GBPS - PAPER.published_gbps(workload.name, policy)).max() <= 0.02


def test_what_was_measured_is_what_table_a12_sums() -> None:
    """The raw measurements, without any interpolation, add up to the published totals."""
    for workload in PAPER.workloads:
        for policy in ("equal", "kv-prop", "bw-prop", "stall-opt", "calibrated"):
            measured = sum(each["ttft_ms"] for each in PAPER._measured(workload.name, policy))
            base = PAPER._data["workloads"][workload.name]["no_limit_ttft_ms"]
            assert measured - base == pytest.approx(PAPER.published_added_ms(workload.name, policy), abs=0.5)


def test_adaptive_is_no_worse_than_the_better_published_one_and_near_the_optimum() -> None:
    """On the measured curves, having begun with no knowledge of them: within 2% of the optimum."""
    report, allocations = run_paper()
    for workload in "ABC":
        added = {
            row.params["policy"]: row.measured["added TTFT, ms"]
            for row in report.rows
            if row.params["workload"] == workload
        }
        assert added["optimum"] <= min(added.values()) + 1e-6
        assert added["adaptive"] <= min(added["stall-opt"], added["calibrated"])
        assert added["adaptive"] <= 1.02 * added["optimum"]
        budget = next(each.budget for each in PAPER.workloads if each.name == workload)
        assert all(rates.sum() <= budget * (1 + 1e-9) for rates in allocations[workload].values())


def _file(tmp_path: Path, record: object) -> Path:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(record))
    return file


def test_a_workload_of_ones_own(tmp_path: Path) -> None:
    requests = [{"name": f"r{n}", "bytes_per_layer": n * 10**7, "window_ms": 5.0 * n} for n in (1, 2, 3)]
    report, _ = run_workload(_file(tmp_path, {"cap_gbps": 20, "requests": requests}), 5.0)
    added = {row.params["policy"]: row.measured["added TTFT, ms"] for row in report.rows}
    assert set(added) == {"equal", "kv-prop", "bw-prop", "stall-opt", "calibrated", "adaptive", "optimum"}
    assert added["optimum"] <= min(added.values()) * 1.001
    assert added["adaptive"] <= min(added["stall-opt"], added["calibrated"]) * 1.001


@pytest.mark.parametrize(
    "record,match",
    [
        ({}, "cap_gbps|requests"),
        ({"cap_gbps": 0, "requests": []}, "cap_gbps"),
        ({"cap_gbps": -1, "requests": []}, "cap_gbps"),
        ({"cap_gbps": "fast", "requests": []}, "cap_gbps"),
        ({"cap_gbps": 1, "requests": []}, "requests"),
        ({"cap_gbps": 1, "requests": [{"name": "r", "bytes_per_layer": 0, "window_ms": 1}]}, "bytes_per_layer"),
        ({"cap_gbps": 1, "requests": [{"name": "r", "bytes_per_layer": 1, "window_ms": 0}]}, "window_ms"),
        ({"cap_gbps": 1, "requests": [{"name": "r", "bytes_per_layer": 1, "window_ms": -2}]}, "window_ms"),
        ({"cap_gbps": 1, "requests": [{"name": "r", "bytes_per_layer": 1}]}, "window_ms"),
        ([], "no workload"),
    ],
)
def test_workloads_that_make_no_sense(tmp_path: Path, record: object, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        read_workload(_file(tmp_path, record))
    with pytest.raises(InvalidRequest):
        read_workload(tmp_path / "nothing.json")
