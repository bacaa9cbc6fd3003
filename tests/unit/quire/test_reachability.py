"""A node that died a moment ago is a member until its time is over: a client that starts just then goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from quire.client.reachability import Reachability
from quire.model.errors import PeerLost
from quire.model.nodes import Node, StorageInfo
from quire.testing.simulation import simulate

NEVER = float("inf")


class Peer:
    """Reached when its time comes, by the running loop; lost at its end."""

    def __init__(self, after_s: float, lost_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._reached_s, self._lost_s = self._loop.time() + after_s, self._loop.time() + lost_s

    @property
    def reached(self) -> bool:
        return self._loop.time() >= self._reached_s and self.error is None

    @property
    def error(self) -> PeerLost | None:
        return PeerLost("Endpoint timeout (-80)") if self._loop.time() >= self._lost_s else None


class Transport:
    """Connects to those that live, and to those that only seem to: `silent` never answer, `late` take a while."""

    name = "fake"
    expecting = staticmethod(contextlib.nullcontext)

    def __init__(self, *alive: bytes, late: Mapping[bytes, float] | None = None, silent: Sequence[bytes] = ()) -> None:
        self.answers = dict.fromkeys(alive, 0.0) | dict(late or {})
        self.silent = silent
        self.tried: list[bytes] = []

    def connect(self, address: bytes) -> Peer:
        self.tried.append(address)
        if address in self.silent:
            return Peer(NEVER, 2.0)
        if address not in self.answers:
            raise PeerLost("Destination is unreachable (-6)")
        return Peer(self.answers[address], NEVER)


def node(name: str) -> Node:
    return Node(node_id=name, about=StorageInfo(worker_address=name.encode()))


def check(transport: Transport, members: Callable[[], Sequence[Node]]) -> float:
    """Check twice, and tell how long it took, in virtual seconds."""
    this: Any = transport

    async def asked() -> Sequence[Node]:
        return members()

    async def main(loop: Any) -> float:
        reachability = Reachability(this, asked)
        started = loop.time()
        await reachability.check()
        await reachability.check()
        return float(loop.time() - started)

    run: Callable[[Any], Coroutine[Any, Any, float]] = main
    return float(simulate(1, run))


def test_another_node_is_as_good_as_the_first() -> None:
    transport = Transport(b"storage-1")
    assert check(transport, lambda: [node("storage-0"), node("storage-1")]) == 0.0
    assert transport.tried == [b"storage-0", b"storage-1"], "and the second check connects to none"


def test_a_node_that_takes_its_time_is_waited_for() -> None:
    """Nothing is asked of a node before its death would be noticed."""
    assert check(Transport(late={b"storage-0": 1.0}), lambda: [node("storage-0")]) == pytest.approx(1.0, abs=0.01)


def test_a_node_that_takes_its_time_does_not_hold_up_what_another_one_can_do() -> None:
    transport = Transport(late={b"storage-0": 2.0, b"storage-1": 0.1}, silent=[b"storage-2"])
    took = check(transport, lambda: [node("storage-2"), node("storage-0"), node("storage-1")])
    assert took == pytest.approx(0.7, abs=0.02)


def test_a_node_that_is_dead_and_listed_is_never_reached() -> None:
    """UCX says so after a while: it was not asked for anything, so nothing may still be written by it."""
    transport = Transport(silent=[b"storage-0"])
    with pytest.raises(PeerLost, match=r"no way to storage-0 by fake \(Endpoint timeout"):
        check(transport, lambda: [node("storage-0")])


def test_a_node_that_comes_back_elsewhere_is_reached() -> None:
    """The dead one is listed five times, then its successor."""
    transport = Transport(b"second-life")
    answers = [[node("storage-0")]] * 5
    took = check(transport, lambda: answers.pop() if answers else [node("second-life")])
    assert 0.5 < took < 2.0


def test_no_way_is_said_when_no_dead_node_can_be_listed_any_more() -> None:
    transport = Transport()
    with pytest.raises(PeerLost, match=r"no way to storage-0 by fake .*UCX_NET_DEVICES"):
        check(transport, lambda: [node("storage-0")])
    assert len(transport.tried) > 20


def test_a_cluster_without_storage_nodes_is_no_error() -> None:
    assert check(Transport(), list) == 0.0
