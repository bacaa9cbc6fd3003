"""Bad days of a whole cluster, by seed; and that the simulator finds the faults that a review found."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.run import ROOT, days

_SEEDS = int(os.environ.get("QUIRE_SIMULATION_SEEDS", "4"))
_MUTATION_SEEDS = int(os.environ.get("QUIRE_MUTATION_SEEDS", "200"))
_STEP = 4
_SIMULATED = [name for name, mutation in MUTATIONS.items() if not mutation.explored and not mutation.tested]


@pytest.mark.timeout(900)
def test_no_seed_breaks_a_promise() -> None:
    """No wrong byte, nothing acknowledged lost, every request answered, nothing left behind, whatever happens."""
    failed = [result for result in days(range(1, _SEEDS + 1), seconds=5.0) if result.failure]
    assert not failed, f"{len(failed)} of {_SEEDS}; seed {failed[0].seed}: {failed[0].failure}"


@pytest.mark.timeout(300)
def test_slow_clients_cost_no_others() -> None:
    """They read from drives, like all others, and take nothing for seconds: the others' reads take no longer."""
    results = days(range(1, 2 * _SEEDS // 3 + 1), seconds=6.0, faults=["slow client"], reads_only=True)
    failed = [result for result in results if result.failure]
    assert not failed, f"seed {failed[0].seed}: {failed[0].failure}"


@pytest.mark.timeout(300)
def test_connections_that_break_cost_nothing() -> None:
    """Sessions are taken up again: what runs goes on, and no answer is lost."""
    failed = [result for result in days(range(1, _SEEDS // 2 + 1), seconds=5.0, faults=["reset"]) if result.failure]
    assert not failed, f"seed {failed[0].seed}: {failed[0].failure}"


@pytest.mark.timeout(300)
def test_a_day_without_faults() -> None:
    """Aborted transfers give their memory back within a second, not when their permits end; and the first bytes under a
    key are kept.
    """
    failed = [result for result in days(range(1, _SEEDS // 2 + 1), seconds=5.0, faults=[]) if result.failure]
    assert not failed, f"seed {failed[0].seed}: {failed[0].failure}"


@pytest.mark.timeout(120)
def test_a_seed_replays() -> None:
    """The same seed is the same history, in another process too."""
    first, second = ([result.digest for result in days([seed], seconds=5.0)] for seed in (7, 7))
    other = [result.digest for result in days([8], seconds=5.0)]
    assert first == second != other


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, mutation in MUTATIONS.items() if mutation.tested])
def test_a_known_fault_fails_its_test(name: str) -> None:
    """Put back, it is found by the tests that stand beside its mend."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", MUTATIONS[name].tested]
    environment = {**os.environ, "QUIRE_TEST_MUTATION": name}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "= FAILURES =" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


_FOUND_SOON = ("repeated-keys", "staging-without-shares", "announced-before-copied", "leaked-pins", "stops-unanswered")


def _marked(name: str) -> Any:
    """Faults that take most seeds to find are looked for by `make mutations` alone, most others by `make test-slow`."""
    if name in _FOUND_SOON:
        return name
    takes_most = name in ("parts-not-compared", "answers-not-kept")
    return pytest.param(name, marks=pytest.mark.long if takes_most else pytest.mark.slow)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(map(_marked, _SIMULATED)))
def test_a_known_fault_is_found(name: str) -> None:
    """Put back, it breaks a promise within so many seeds, and the check that says so is the one that should."""
    mutation = MUTATIONS[name]
    search = range(mutation.seed, mutation.seed + _MUTATION_SEEDS)
    for seeds in (search[:1], *(search[at : at + _STEP] for at in range(1, len(search), _STEP))):
        results = list(days(seeds, seconds=6.0, faults=mutation.faults, mutation=name, reads_only=mutation.reads_only))
        found = [result for result in results if mutation.found_by in result.failure and result.failure]
        if found:
            print(f"| {mutation.finding} | {mutation.what} | {found[0].seed} | {found[0].wall_s:.1f} |")
            return
    pytest.fail(f"{mutation.what}: not found by {_MUTATION_SEEDS} seeds")
