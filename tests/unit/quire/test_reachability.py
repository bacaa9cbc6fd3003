"""A node that died a moment ago is a member until its time is over: a client that starts just then goes on."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from quire.client.reachability import Reachability
from quire.model.errors import PeerLost
from quire.model.nodes import Node, StorageInfo
from quire.testing.simulation import simulate


class Transport:
    """Connects to those that live."""

    name = "fake"

    def __init__(self, *alive: bytes) -> None:
        self.alive = set(alive)
        self.tried: list[bytes] = []

    def connect(self, address: bytes) -> None:
        self.tried.append(address)
        if address not in self.alive:
            raise PeerLost("Destination is unreachable (-6)")


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
