"""Every order of events of a tiny cluster: two nodes, an object tier, an index, two clients, two chunks.

The machines are the real ones: `Residency`, the orchestrator's decisions on evictions, and the index's semantics
(`MemoryIndex`, held by the contract suite that holds Redis). What lies between them, messages and the executor, is
modelled as operations of one or more steps, and any of them may take its next step at any time. A state is a value:
it is copied, compared with all that were seen (but for the names of tickets and generations), and followed further,
breadth first, so that a broken promise is told by the shortest story.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from quire.model.durability import Durability
from quire.model.errors import QuireError
from tests.simulation.exhaustive.cluster import Cluster
from tests.simulation.exhaustive.model import Broken, Evict, Follow, Read, Scenario, Store, told
from tests.simulation.exhaustive.states import fingerprint, frozen
from tests.simulation.mutations import MUTATIONS


@dataclass(frozen=True, slots=True)
class Explored:
    """What an exploration saw. `story`: how a promise was broken, empty if none was. `complete`: nothing is left."""

    states: int
    ends: int
    complete: bool
    story: tuple[str, ...]
    wall_s: float


def explore(scenario: Scenario, states_max: int = 1 << 60) -> Explored:
    """Follow every choice from every state, breadth first."""
    started = time.perf_counter()
    first = Cluster(scenario)
    parents: dict[int, tuple[int, tuple[str, ...]]] = {fingerprint(first): (0, ())}
    frontier: deque[tuple[int, bytes]] = deque([(fingerprint(first), frozen(first))])
    ends = 0
    while frontier and len(parents) < states_max:
        mark, stored = frontier.popleft()
        choices = list(pickle.loads(stored).choices())
        for choice in choices:
            state: Cluster = pickle.loads(stored)
            try:
                state.take(choice)
                after = fingerprint(state)
                if after in parents:
                    continue
                parents[after] = (mark, choice)
                if state.is_over:
                    ends += 1
                    pickle.loads(frozen(state)).finish()
            except (Broken, AssertionError, QuireError, KeyError) as error:
                story = (*_story(scenario, parents, mark, choice), f"{type(error).__name__}: {error}")
                return Explored(len(parents), ends, False, story, time.perf_counter() - started)
            frontier.append((after, frozen(state)))
    return Explored(len(parents), ends, not frontier, (), time.perf_counter() - started)


def _story(
    scenario: Scenario, parents: dict[int, tuple[int, tuple[str, ...]]], mark: int, last: tuple[str, ...]
) -> tuple[str, ...]:
    """The choices that led there, told again."""
    choices = [last]
    while parents[mark][1]:
        mark, choice = parents[mark]
        choices.append(choice)
    state, lines = Cluster(scenario), []
    for choice in reversed(choices):
        before = pickle.loads(frozen(state))
        try:
            lines.append(state.take(choice))
        except Exception:
            lines.append(f"then: {_last(before, choice)}")
    return tuple(lines)


def _last(state: Cluster, choice: tuple[str, ...]) -> str:
    return told(state.steps[int(choice[1])]) if choice[0] in ("step", "lose") else " ".join(choice)


_OBJECT, _MEMORY, _LOCAL = Durability.OBJECT, Durability.MEMORY, Durability.LOCAL
SCENARIOS: Final = (
    Scenario(
        "stored again beside an eviction",
        clients=((Evict(),), (Store(0, 1, _MEMORY),)),
        before=(Store(0, 1, _MEMORY), Store(1, 1, _MEMORY)),
    ),
    Scenario(
        "an object beside an eviction",
        clients=((Evict(),), (Store(0, 1, _OBJECT),)),
        before=(Store(0, 1, _OBJECT),),
        sweeps=1,
    ),
    Scenario(
        "messages lost beside an eviction",
        clients=((Evict(),), (Store(0, 1, _OBJECT),)),
        before=(Store(0, 1, _OBJECT),),
        losses=1,
        sweeps=1,
    ),
    Scenario(
        "drives, and an index that is emptied",
        clients=((Store(0, 1, _OBJECT),), (Evict(),)),
        before=(Store(1, 1, _LOCAL),),
        drives=True,
        emptied=1,
    ),
    Scenario(
        "a follower",
        clients=((Store(0, 1, _MEMORY), Evict(), Store(0, 2, _MEMORY, 1)), (Follow(0),)),
        slabs=1,
        losses=1,
    ),
    Scenario("two stores of one chunk", clients=((Store(0, 1, _MEMORY),), (Store(0, 1, _MEMORY, 1),)), losses=1),
    Scenario("a prefix on two nodes", clients=((Store(0, 2, _MEMORY),), (Store(1, 2, _MEMORY), Evict(1)))),
    Scenario("a node crashes", clients=((Store(0, 2, _OBJECT),), (Read(1),)), crashes=1),
    Scenario("on drives", clients=((Store(0, 1, _LOCAL),), (Evict(),)), drives=True, crashes=1),
    Scenario(
        "the index is emptied",
        clients=((Read(1),), (Evict(1),)),
        before=(Store(0, 2, _OBJECT),),
        emptied=1,
        sweeps=1,
    ),
    Scenario(
        "no memory",
        clients=((Store(0, 2, _OBJECT),), (Read(0), Read(1))),
        slabs=1,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Every order of events of a tiny cluster, breadth first.")
    parser.add_argument("--states", type=int, default=1 << 60, help="of a scenario, at most")
    parser.add_argument("--only", default="", help="the scenarios whose names contain this")
    parser.add_argument("--mutation", default="", help="put a known fault back: " + ", ".join(MUTATIONS))
    arguments = parser.parse_args()
    if arguments.mutation:
        MUTATIONS[arguments.mutation].apply()
    for scenario in SCENARIOS:
        if arguments.only not in scenario.name:
            continue
        found = explore(scenario, arguments.states)
        extent = "the first " if found.story or not found.complete else "all "
        print(f"{scenario.name}: {extent}{found.states} states, {found.ends} ends, {found.wall_s:.1f} s", flush=True)
        for line in found.story:
            print("   ", line)
        if found.story:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
