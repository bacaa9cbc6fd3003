"""A node that died a moment ago is a member until its time is over: a client that starts just then goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from quire.client.memory.route_check import RouteCheck
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
    """Connects to those that live, and to those that only seem to: `silent` never answer, `late` take a while. A
    connection is there until it is lost.
    """

    name = "fake"
    expecting = staticmethod(contextlib.nullcontext)

    def __init__(self, *alive: bytes, late: Mapping[bytes, float] | None = None, silent: Sequence[bytes] = ()) -> None:
        self.answers = dict.fromkeys(alive, 0.0) | dict(late or {})
        self.silent = silent
        self.peers: dict[bytes, Peer] = {}
        self.tried: list[bytes] = []

    def connect(self, address: bytes) -> Peer:
        self.tried.append(address)
        if address not in self.answers and address not in self.silent:
            raise PeerLost("Destination is unreachable (-6)")
        if address not in self.peers or self.peers[address].error is not None:
            never = address in self.silent
            self.peers[address] = Peer(NEVER, 2.0) if never else Peer(self.answers[address], NEVER)
        return self.peers[address]


def node(name: str) -> Node:
    return Node(node_id=name, about=StorageInfo(worker_address=name.encode()))


def check(transport: Transport, members: Callable[[], Sequence[Node]], *, at_once: int = 1) -> float:
    """Check, and then again; how long it took, in virtual seconds. A failure says that in its notes."""
    this: Any = transport

    async def asked() -> Sequence[Node]:
        return members()

    async def main(loop: Any) -> float:
        reachability = RouteCheck(this, asked)
        started = loop.time()
        try:
            await asyncio.gather(*(reachability.check() for _ in range(at_once)))
        except PeerLost as error:
            error.add_note(f"{loop.time() - started:.1f}")
            raise
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
    with pytest.raises(PeerLost, match=r"no way to storage-0 by fake \(Endpoint timeout") as raised:
        check(transport, lambda: [node("storage-0")])
    assert 6.0 < float(raised.value.__notes__[0]) < 9.5


def test_a_node_whose_membership_ends_while_it_is_tried_was_not_reached_either() -> None:
    """Else memory was lent to whatever it may still do."""
    transport, answers = Transport(silent=[b"storage-0"]), [[node("storage-0")]]
    with pytest.raises(PeerLost, match="no way to storage-0"):
        check(transport, lambda: answers.pop() if answers else [])


def test_many_nodes_that_are_silent_do_not_take_longer() -> None:
    names = [f"storage-{number}" for number in range(200)]
    with pytest.raises(PeerLost, match="no way to storage-") as raised:
        check(Transport(silent=[name.encode() for name in names]), lambda: [*map(node, names)])
    assert 6.0 < float(raised.value.__notes__[0]) < 9.5


def test_a_node_that_is_slower_than_a_try_is_reached_in_the_next_one() -> None:
    assert check(Transport(late={b"storage-0": 4.0}), lambda: [node("storage-0")]) == pytest.approx(4.0, abs=0.01)


def test_those_who_ask_at_once_share_a_try() -> None:
    transport = Transport(late={b"storage-0": 1.0})
    assert check(transport, lambda: [node("storage-0")], at_once=20) == pytest.approx(1.0, abs=0.01)
    assert transport.tried == [b"storage-0"]


def test_a_client_that_is_closed_tries_no_more() -> None:
    this: Any = Transport(silent=[b"storage-0"])

    async def members() -> Sequence[Node]:
        return [node("storage-0")]

    async def main(loop: Any) -> None:
        reachability = RouteCheck(this, members)
        asking = asyncio.create_task(reachability.check())
        await asyncio.sleep(1.0)
        reachability.close()
        with pytest.raises(PeerLost, match="closed"):
            await asking
        assert loop.time() < 1.1

    simulate(1, main)


def test_a_node_that_comes_back_elsewhere_is_reached() -> None:
    """The dead one is listed five times, then its successor."""
    transport = Transport(b"second-life")
    answers = [[node("storage-0")]] * 5
    took = check(transport, lambda: answers.pop() if answers else [node("second-life")])
    assert 0.5 < took < 2.0


def test_no_way_is_said_when_no_dead_node_can_be_listed_any_more() -> None:
    transport = Transport()
    with pytest.raises(PeerLost, match=r"no way to storage-0 by fake .*UCX_NET_DEVICES") as raised:
        check(transport, lambda: [node("storage-0")])
    assert len(transport.tried) > 20 and 6.0 <= float(raised.value.__notes__[0]) < 6.5


def test_a_cluster_without_storage_nodes_is_no_error() -> None:
    assert check(Transport(), list) == 0.0
