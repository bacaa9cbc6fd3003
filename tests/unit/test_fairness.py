"""While a tenant exhausts a limit, the p99 of a neighbour's requests is at most three times that of an idle server.

Every limit that requests meet is one of these kinds: `test_every_limit_is_one_of_these` reads the services for others.
Time is simulated.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import pytest

from quire.model.errors import TooManyRequests
from quire.testing.simulation.loop import SimulatedLoop, simulate
from quire.transport.fair_threads import FairThreads
from quire_server.core.shares import SharedBound
from quire_server.limits.shared_room import SharedRoom
from quire_server.limits.turns import FairTurns
from quire_storage.delivery.fair_queue import WireQueue

_PLACES: Final = 4
_GREEDY, _ASKED, _WORK_S = 200, 100, 1.0
_REPOSITORY: Final = Path(__file__).parents[2]

Use = Callable[[str], Awaitable[None]]
"""Serves a request of a tenant, from its entry to its end."""


def _inside(place: Callable[[str], AbstractAsyncContextManager[object]]) -> Use:
    """Work inside a place that a tenant enters."""

    async def use(tenant: str) -> None:
        async with place(tenant):
            await asyncio.sleep(_WORK_S)

    return use


def _turns(loop: SimulatedLoop) -> Use:
    return _inside(FairTurns(_PLACES).turn)


def _room(loop: SimulatedLoop) -> Use:
    room = SharedRoom(_PLACES)
    return _inside(lambda tenant: room.held(tenant, 1, wait_s=1e6))


def _shares(loop: SimulatedLoop) -> Use:
    bound = SharedBound(_PLACES)

    async def use(tenant: str) -> None:
        if not bound.take(tenant):
            raise TooManyRequests("full")
        await asyncio.sleep(_WORK_S)
        bound.give_back(tenant)

    return use


def _chunkwise(loop: SimulatedLoop) -> Use:
    queue = WireQueue(_PLACES)

    async def use(tenant: str) -> None:
        leave = await queue.enter(tenant, 1.0, 1, longest_s=1e6)
        await asyncio.sleep(_WORK_S)
        leave()

    return use


class _SlowThreads(Executor):
    """Simulated threads: a job begins in the call that finds a thread free, and `end` frees it."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], Any]] = []
        self._free = _PLACES

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._jobs.append(work)
        self._begin()
        return Future()

    def _begin(self) -> None:
        while self._free and self._jobs:
            self._free -= 1
            self._jobs.pop(0)()

    def end(self) -> None:
        self._free += 1
        self._begin()


def _threads(loop: SimulatedLoop) -> Use:
    executor = _SlowThreads()
    threads = FairThreads(executor)

    async def use(tenant: str) -> None:
        ended = loop.create_future()

        def end() -> None:
            executor.end()
            ended.set_result(None)

        threads.submit(tenant, lambda: loop.call_later(_WORK_S, end))
        await ended

    return use


_LIMITS: Final[dict[str, tuple[Callable[[SimulatedLoop], Use], str]]] = {
    "FairTurns": (_turns, "images over HTTP, whole bodies, hashing, nonces, large look-ups, fetches, encoding"),
    "SharedBound": (_shares, "gRPC requests, sessions, bytes of sessions, S3 requests, deliveries, stores, nonces"),
    "SharedRoom": (_room, "bytes that S3 clients have not read"),
    "FairQueue": (_chunkwise, "chunkwise deliveries, latents at the device"),
    "FairThreads": (_threads, "threads that copy and verify"),
}


async def _p99_s(loop: SimulatedLoop, use: Use) -> float:
    """Return the 99th percentile of a neighbour's requests, sent one after the other."""
    times_s: list[float] = []
    for _ in range(_ASKED):
        began_s = loop.time()
        await use("neighbour")
        times_s.append(loop.time() - began_s)
    return sorted(times_s)[int(0.99 * _ASKED) - 1]


async def _flood(use: Use) -> None:
    while True:
        try:
            await use("greedy")
        except TooManyRequests:
            await asyncio.sleep(0.1)


async def _ratio(loop: SimulatedLoop, make: Callable[[SimulatedLoop], Use]) -> float:
    idle_s = await _p99_s(loop, make(loop))
    use = make(loop)
    flood = [asyncio.create_task(_flood(use)) for _ in range(_GREEDY)]
    await asyncio.sleep(10 * _WORK_S)
    busy_s = await _p99_s(loop, use)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    return busy_s / idle_s


@pytest.mark.parametrize("name", _LIMITS)
def test_a_neighbour_of_a_greedy_tenant_is_served(name: str) -> None:
    assert simulate(1, lambda loop: _ratio(loop, _LIMITS[name][0])) <= 3


def test_first_come_first_served_would_fail() -> None:
    """The fault put back: a semaphore, which knows no tenants."""

    def make(loop: SimulatedLoop) -> Use:
        room = asyncio.Semaphore(_PLACES)
        return _inside(lambda tenant: room)

    assert simulate(1, lambda loop: _ratio(loop, make)) > 3


_UNSHARED: Final = {
    "services/storage/quire_storage/cluster/integrity.py": "repairs, which no tenant asks for",
    "services/storage/quire_storage/cluster/replication.py": "copies between nodes",
    "services/storage/quire_storage/ingest/stores.py": "groups of one store",
    "services/gateway/quire_gateway/images/service.py": "deletions of one request",
    "libs/quire_server/redis/connection.py": "connections to Redis, each held for one command",
}


def test_every_limit_is_one_of_these() -> None:
    """Semaphores know no tenants. `_UNSHARED` has the reason for each that is left."""
    users = set[str]()
    for folder in ("libs/quire_server", "services"):
        for path in (_REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in ("Semaphore", "BoundedSemaphore"):
                    users.add(path.relative_to(_REPOSITORY).as_posix())
    assert users == _UNSHARED.keys()
