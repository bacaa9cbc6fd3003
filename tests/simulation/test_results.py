"""A run of many seeds that is stopped and goes on."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.results import Result, Results

SEEDS = range(1, 6)


def _result(seed: int, failure: str = "") -> Result:
    return Result(seed, failure, operations=100, faults=3, messages=10, wall_s=0.5, digest="")


def test_parts_of_a_run_add_up(tmp_path: Path) -> None:
    path = tmp_path / "build" / "results.jsonl"
    first = Results(path, "a", {"seconds": 6.0})
    first.add(_result(1))
    first.add(_result(3, "lost"))
    with path.open("a") as file:
        file.write('{"of": {"commit": "a", "sec')  # it is killed as it writes
    again = Results(path, "a", {"seconds": 6.0})
    assert again.left(SEEDS) == [2, 4, 5]
    again.add(_result(2))
    assert Results(path, "a", {"seconds": 6.0}).left(SEEDS) == [4, 5]
    assert again.totals(SEEDS) == {
        "seeds": 3,
        "operations": 300,
        "faults": 9,
        "messages": 30,
        "failed": 1,
        "operations a second of one core": 200,
    }
    assert [each.seed for each in again.failed(SEEDS)] == [3] and not again.failed([1, 2])


def test_of_another_commit_or_another_day_nothing_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path, "a", {"seconds": 6.0}).add(_result(1))
    assert Results(path, "b", {"seconds": 6.0}).left([1]) == [1]
    assert Results(path, "a", {"seconds": 5.0}).left([1]) == [1]
    assert Results(None, "", {}).totals([1])["seeds"] == 0
