"""Every order of events of a tiny cluster, as far as a test run has time; and that faults put back are found by it."""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests import fork_server
from tests.simulation.exhaustive.model import Scenario
from tests.simulation.exploration import SCENARIOS, explore
from tests.simulation.mutations import MUTATIONS
from tests.simulation.run import ROOT

_STATES = int(os.environ.get("QUIRE_EXPLORED_STATES", "400"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_order_of_events_breaks_a_promise(scenario: Scenario) -> None:
    found = explore(scenario, _STATES)
    assert not found.story, "\n".join(found.story)
    assert found.complete or found.states >= _STATES, "it ended early"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "overtaken" else name
        for name, mutation in MUTATIONS.items()
        if mutation.explored
    ],
)
def test_a_known_fault_is_found_by_exploring(name: str) -> None:
    """Put back, some order of events breaks a promise, and the check that says so is the one that should."""
    mutation, started = MUTATIONS[name], time.perf_counter()
    command = [sys.executable, "-m", "tests.simulation.exploration", "--mutation", name, "--only", mutation.explored]
    done = fork_server.run(command, cwd=ROOT, timeout=500, kind="simulation")
    assert done.returncode == 1 and mutation.found_by in done.stdout, done.stdout + done.stderr
    states = done.stdout.partition("the first ")[2].partition(" ")[0]
    print(f"| {mutation.finding or ''} | {mutation.what} | {states} states | {time.perf_counter() - started:.1f} |")
