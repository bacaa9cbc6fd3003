"""When a roll may go on, by what the storage nodes say."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from quire.model.nodes import Node, StorageInfo
from quire.testing import FakeClock
from quire_server.telemetry.metrics import Gate
from quire_storage.cluster.redundancy import CHECKED_AMONG, NOT_YET, digest, open_when_redundant, start_of, unready


def _node(name: str, checked: str | None, incarnation: str = "1", protocol: int = 4) -> Node:
    notes = {} if checked is None else {CHECKED_AMONG: checked}
    about = StorageInfo()
    return Node(node_id=name, about=about, incarnation=incarnation, notes=notes, protocol_version=protocol)


def _among(*starts: tuple[str, str]) -> str:
    return digest(start_of(_node(name, None, incarnation)) for name, incarnation in starts)


def test_all_nodes_must_have_checked_their_replicas_among_those_that_are_there_now() -> None:
    now, before = _among(("a", "1"), ("b", "1")), _among(("a", "1"), ("b", "0"))
    assert unready([_node("a", now), _node("b", now)], "a") == []
    assert unready([_node("a", now), _node("b", before)], "a") == ["b"], "it has not heard of the other's restart"
    assert unready([_node("a", NOT_YET), _node("b", now)], "a") == ["a"]
    assert unready([_node("b", _among(("b", "1")))], "a") == ["a"], "the cluster does not know it"


def test_a_node_without_replicas_holds_nobody_up_but_one_of_a_release_before_does() -> None:
    now = _among(("a", "1"), ("memory", "1"))
    assert unready([_node("a", now), _node("memory", None)], "a") == []
    assert unready([_node("a", now), _node("memory", None, protocol=3)], "a") == ["memory"]


@dataclass
class _World:
    """This node, and what the orchestrator says of all."""

    compared: bool = False
    replicas: str = NOT_YET
    other: str = NOT_YET
    asked: int = 0

    async def described(self) -> list[Node]:
        self.asked += 1
        return [_node("a", self.replicas), _node("b", self.other)]


async def test_the_gate_opens_when_all_of_it_holds() -> None:
    gate, world, clock = Gate("starting"), _World(), FakeClock()
    peers: Any = world
    opening = asyncio.create_task(open_when_redundant(gate, "a", peers, world, clock))
    await clock.advance(10.0)
    assert gate.why == "starting"
    world.compared = True
    await clock.advance(10.0)
    assert "this node" in gate.why and not world.asked, "the orchestrator is not asked before this node is ready"
    world.replicas = _among(("a", "1"), ("b", "1"))
    await clock.advance(10.0)
    assert gate.why.endswith("at b")
    world.other = world.replicas
    await clock.advance(10.0)
    assert not gate.why
    await asyncio.wait_for(opening, 5)
