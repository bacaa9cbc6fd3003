"""Results of seeds in a file, so that a long run goes on where it was stopped, and parts of it add up."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Result:
    """The outcome of a seed. `failure`: empty, or the broken promise and its story. `digest`: of the whole history."""

    seed: int
    failure: str
    operations: int
    faults: int
    messages: int
    wall_s: float
    digest: str
    counts: dict[str, int] = field(default_factory=dict)


class Results:
    """Holds the results of one commit and one kind of day, and skips others in the same file.

    `path`: None for no file. `kind`: the settings of a day besides its seed.
    """

    def __init__(self, path: Path | None, commit: str, kind: Mapping[str, Any]) -> None:
        self._path = path
        self._kind = {"commit": commit, **kind}
        self._known: dict[int, Result] = {}
        if path is not None and path.exists():
            lines = filter(None, map(_parsed, path.read_text().splitlines()))
            results = [Result(**line["result"]) for line in lines if line["of"] == self._kind]
            self._known = {result.seed: result for result in results}

    def add(self, result: Result) -> None:
        """Keep it, at once."""
        self._known[result.seed] = result
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write("\n" + json.dumps({"of": self._kind, "result": asdict(result)}) + "\n")

    def left(self, seeds: Iterable[int]) -> list[int]:
        """Select the seeds without a result."""
        return [seed for seed in seeds if seed not in self._known]

    def failed(self, seeds: Iterable[int]) -> list[Result]:
        return [result for result in filter(None, map(self._known.get, seeds)) if result.failure]

    def totals(self, seeds: Iterable[int]) -> dict[str, int]:
        """Sums over those of these seeds that have run."""
        sums: Counter[str] = Counter(seeds=0, operations=0, faults=0, messages=0, failed=0)
        wall_s = 0.0
        for result in filter(None, map(self._known.get, seeds)):
            sums.update(seeds=1, operations=result.operations, faults=result.faults, messages=result.messages)
            sums["failed"] += bool(result.failure)
            wall_s += result.wall_s
        return {**sums, "operations a second of one core": round(sums["operations"] / wall_s) if wall_s else 0}


def _parsed(line: str) -> dict[str, Any] | None:
    """Read a line; None for an empty one, and for one that a killed run has cut short."""
    with contextlib.suppress(json.JSONDecodeError):
        parsed: dict[str, Any] = json.loads(line)
        return parsed
    return None


def commit_of(folder: Path) -> str:
    """The commit that is checked out; empty where something was changed since, or there is no repository."""
    commands = (["git", "status", "--porcelain"], ["git", "rev-parse", "HEAD"])
    changed, commit = (subprocess.run(each, cwd=folder, capture_output=True, text=True) for each in commands)
    return "" if changed.returncode or changed.stdout.strip() else commit.stdout.strip()
