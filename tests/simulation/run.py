"""Simulated days by seed: `python -m tests.simulation.run --seeds 1:200`. Tells the story of each that failed.

A seed decides everything but how Python orders sets of strings: run with PYTHONHASHSEED=0, as `days()` makes sure.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import structlog

from quire.testing.simulation import SimulatedLoop, simulate
from tests import fork_server
from tests.simulation.faults import ALL_FAULTS
from tests.simulation.metadata import close_server
from tests.simulation.mutations import MUTATIONS
from tests.simulation.results import Result, Results, commit_of
from tests.simulation.world import Day

ROOT = Path(__file__).resolve().parents[2]
_SEEDS_A_PROCESS = 10
_ENDLESS_S = 900.0  # virtual


def day(seed: int, seconds: float, faults: Sequence[str], *, reads_only: bool = False) -> Result:
    """Run one seed in this process."""
    days: list[Day] = []

    async def main(loop: SimulatedLoop) -> None:
        days.append(Day(loop, seconds=seconds, faults=faults, reads_only=reads_only))
        async with asyncio.timeout(seconds + _ENDLESS_S):
            await days[0].run()

    started, failure = time.perf_counter(), ""
    try:
        simulate(seed, main)
    except (Exception, asyncio.CancelledError) as error:
        failure = f"{type(error).__name__}: {error}"
    counts = days[0].history.counts
    operations = sum(count for name, count in counts.items() if ":" not in name)
    struck = sum(count for name, count in counts.items() if name.startswith("fault"))
    wall_s = time.perf_counter() - started
    messages = days[0].cluster.network.messages
    return Result(seed, failure, operations, struck, messages, wall_s, days[0].digest.hexdigest(), dict(counts))


def days(
    seeds: Sequence[int],
    *,
    seconds: float = 6.0,
    faults: Sequence[str] = ALL_FAULTS,
    mutation: str = "",
    reads_only: bool = False,
    workers: int = os.cpu_count() or 1,
) -> Iterator[Result]:
    """Run seeds in processes of their own, some at a time; results as they come."""
    size = max(1, min(_SEEDS_A_PROCESS, -(-len(seeds) // workers)))
    parts = [seeds[at : at + size] for at in range(0, len(seeds), size)]

    cores: SimpleQueue[int] = SimpleQueue()
    allowed = sorted(os.sched_getaffinity(0))
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))  # not all on one core
    for number in range(first, first + workers):
        cores.put(allowed[number % len(allowed)])

    def run(part: Sequence[int]) -> list[Result]:
        core = cores.get()
        try:
            return run_on(core, part)
        finally:
            cores.put(core)

    def run_on(core: int, part: Sequence[int]) -> list[Result]:
        command = [sys.executable, "-m", "tests.simulation.run", "--worker", "--seeds", ",".join(map(str, part))]
        command += ["--seconds", str(seconds), "--faults", ",".join(faults), "--mutation", mutation]
        command += ["--reads-only"] if reads_only else []
        command += ["--core", str(core)]
        done = fork_server.run(command, cwd=ROOT, timeout=900, kind="simulation")
        found = [Result(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(found) < len(part):
            raise RuntimeError(f"a worker ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return found

    with ThreadPoolExecutor(workers) as pool:
        for results in pool.map(run, parts):
            yield from results


def _work(arguments: argparse.Namespace, seeds: Sequence[int]) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    if arguments.core is not None:  # the redis-server's too: they take turns, and a core that sleeps wakes up slowly
        os.sched_setaffinity(0, {arguments.core})
    gc.disable()  # processes that have crashed in the simulation must not run their clean-up
    if arguments.mutation:
        MUTATIONS[arguments.mutation].apply()
    faults = [fault for fault in arguments.faults.split(",") if fault]
    for seed in seeds:
        result = day(seed, arguments.seconds, faults, reads_only=arguments.reads_only)
        print(json.dumps(asdict(result)), flush=True)
    close_server()
    os._exit(0)


def _seeds(text: str) -> list[int]:
    if ":" in text:
        first, _, stop = text.partition(":")
        return list(range(int(first), int(stop)))
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1:201", help="first:stop, or some separated by commas")
    parser.add_argument("--seconds", type=float, default=6.0, help="virtual seconds of load")
    parser.add_argument("--faults", default=",".join(ALL_FAULTS))
    parser.add_argument("--mutation", default="", help="put a known fault back: " + ", ".join(MUTATIONS))
    parser.add_argument("--reads-only", action="store_true", help="everything is stored on drives first")
    parser.add_argument("--results", type=Path, help="go on with what is there of this commit, and add to it")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    seeds = _seeds(arguments.seeds)
    if arguments.worker:
        _work(arguments, seeds)
    faults = [fault for fault in arguments.faults.split(",") if fault]
    options: dict[str, Any] = {
        "seconds": arguments.seconds,
        "faults": faults,
        "mutation": arguments.mutation,
        "reads_only": arguments.reads_only,
    }
    commit = commit_of(ROOT)
    results = Results(arguments.results if commit else None, commit, options)
    if arguments.results and not commit:
        print("the working tree was changed since its commit: no result is kept")
    unfinished = results.left(seeds)
    if len(unfinished) < len(seeds):
        print(f"from earlier runs on {commit[:10]}: {_told(results.totals(seeds))}", flush=True)
    for number, result in enumerate(days(unfinished, **options), 1):
        results.add(result)
        if result.failure:
            print(f"seed {result.seed} after {result.wall_s:.1f} s: {result.failure}", flush=True)
        elif number % 50 == 0:
            print(_told(results.totals(seeds)), flush=True)
    print(_told(results.totals(seeds)))
    failed = [str(result.seed) for result in results.failed(seeds)]
    if failed:
        print(f"failed: seeds {', '.join(failed)}")
    return 1 if failed else 0


def _told(totals: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in totals.items())


if __name__ == "__main__":
    sys.exit(main())
