"""Mutation testing of what must not be wrong: pacing, permits, the prefix index and the residency machine.

python tools/mutants.py pacing permits      status 1 if a mutant survives that is not explained below

mutmut changes one thing at a time and runs the tests that reach it: first those that are quick, then for what survived
also those on a Redis Cluster. It wants packages beside each other, so they are copied to build/mutants.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "build" / "mutants"
_PACKAGES: Final = ("libs/quire", "libs/quire_server", "services/storage/quire_storage")
_FIXTURES: Final = (
    "__init__.py",
    "conftest.py",
    "workers.py",
    "fork_server.py",
    "hosts.py",
    "redis_cluster.py",
    "polling.py",
)
_SETTINGS: Final = """\
[tool.mutmut]
source_paths = {packages}
only_mutate = {modules}
pytest_add_cli_args_test_selection = ["tests"]
pytest_add_cli_args = ["-q", "-p", "no:cacheprovider", "-k", "{chosen}"]
timeout_multiplier = 2.0
timeout_constant = 5.0
use_git_change_detection = false
track_dependencies = false
[tool.pytest.ini_options]
asyncio_mode = "auto"
timeout = 120
"""


_OF_THE_CODE: Final = "not find_a_fault"
"""Tests that put faults back test other tests, and take minutes."""


class Scope(NamedTuple):
    """Modules to change, the tests that should notice, and what these need beside them."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    helpers: tuple[str, ...] = ()


SCOPES: Final = {
    "pacing": Scope(("quire_storage/core/pacing.py",), ("unit/storage/test_pacing.py",)),
    "permits": Scope(("quire/model/permit.py",), ("unit/quire/test_permit.py",)),
    "index": Scope(("quire_server/redis/prefix_index/index.py", "quire/model/index.py"), ("contract/test_index.py",)),
    "residency": Scope(
        tuple(
            f"quire_storage/core/residency/{name}.py"
            for name in (
                *("admission", "contents", "copies", "departures", "evictions", "machine", "memory", "pins"),
                *("promotions", "stores", "uploads", "writes"),
            )
        ),
        (
            "unit/storage/test_residency.py",
            "unit/storage/test_residency_histories.py",
            "unit/storage/test_residency_index.py",
            "unit/storage/test_residency_listing.py",
            "unit/storage/test_residency_levels.py",
            "unit/storage/test_residency_policy.py",
            "unit/storage/test_housekeeping.py",
            "unit/storage/test_fingerprint_index.py",
        ),
        (
            "unit/storage/residency_world.py",
            "unit/storage/residency_answers.py",
            "unit/storage/residency_histories.py",
        ),
    ),
}
EXPLAINED: Final[Mapping[str, Mapping[str, str]]] = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())
"""Survivors that are no fault, by a part of the changed line."""


def prepare(names: Sequence[str]) -> None:
    """The packages, and the tests of these scopes, beside each other."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for package in _PACKAGES:
        shutil.copytree(ROOT / package, FOLDER / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        for file in (*SCOPES[name].tests, *SCOPES[name].helpers):
            (FOLDER / "tests" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "tests" / file, FOLDER / "tests" / file)
    for file in _FIXTURES:
        shutil.copy2(ROOT / "tests" / file, FOLDER / "tests" / file)


def _run(names: Sequence[str], chosen: str, mutants: Sequence[str] = ()) -> None:
    """With the tests that `chosen` is true of, as pytest's -k reads it."""
    modules = [module for name in names for module in SCOPES[name].modules]
    packages = [Path(package).name for package in _PACKAGES]
    (FOLDER / "pyproject.toml").write_text(_SETTINGS.format(packages=packages, modules=modules, chosen=chosen))
    subprocess.run([sys.executable, "-m", "mutmut", "run", *mutants], cwd=FOLDER, check=True)


def _mutmut(*arguments: str) -> str:
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False).stdout


def _survivors() -> list[str]:
    states = [line.strip().partition(": ") for line in _mutmut("results").splitlines()]
    return [mutant for mutant, _, state in states if state in ("survived", "no tests")]


def _why(mutant: str, changed: Sequence[str]) -> str:
    """The reason why a survivor is no fault; empty if it may be one."""
    lines = [each.lstrip("+- ").replace("XX", "").lower() for each in changed]
    if len(set(lines)) == 1 and lines[0].startswith("assert "):
        return "the words of an assertion"
    module = mutant.partition(".x")[0].replace(".", "/") + ".py"
    reasons = next(EXPLAINED[name] for name, scope in SCOPES.items() if module in scope.modules)
    return next((why for part, why in reasons.items() if any(part in each for each in changed)), "")


def main(arguments: Sequence[str]) -> None:
    names = list(arguments) or list(SCOPES)
    if unknown := set(names) - SCOPES.keys():
        sys.exit(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(SCOPES)}")
    prepare(names)
    _run(names, f"not redis_cluster and {_OF_THE_CODE}")
    if survivors := [mutant for mutant in _survivors() if ".redis." in mutant]:
        _run(names, _OF_THE_CODE, survivors)
    left = 0
    for mutant in _survivors():
        changed = [each for each in _mutmut("show", mutant).splitlines() if each[:2] in ("- ", "+ ")]
        why = _why(mutant, changed)
        left += not why
        print(mutant, *changed, f"explained: {why}" if why else "NOT EXPLAINED", sep="\n", end="\n\n")
    sys.exit(f"{left} mutants survive unexplained" if left else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
