"""Who the storage nodes are: told once, then only what changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from quire.model.nodes import Location, Node, StorageInfo
from quire_server.membership import membership_log as module
from quire_server.membership.membership_log import KnownNodes, MembershipChanges, MembershipLog


def _node(number: int, start: str = "first", used: int = 0) -> Node:
    about = StorageInfo(worker_address=b"w%d" % number, capacity_bytes=1 << 30, used_bytes=used)
    return Node(node_id=f"n{number}", about=about, incarnation=start, location=Location(f"h{number}"))


def _by_name(*nodes: Node) -> dict[str, Node]:
    return {node.node_id: node for node in nodes}


async def _names(roster: KnownNodes) -> list[str]:
    return sorted(node.node_id for node in await roster.storage_nodes())


async def test_changes_are_told_and_nothing_twice() -> None:
    log, roster = MembershipLog(), KnownNodes()
    log.look(_by_name(*map(_node, range(100))))
    first = log.changes(roster.version)
    assert first.all and len(first.nodes) == 100
    roster.update(first)
    assert log.changes(roster.version) == MembershipChanges(roster.version)
    fuller = [_node(number, used=number + 5) for number in range(100)]
    log.look(_by_name(*fuller))
    log.look_at(fuller[3])
    assert log.changes(roster.version) == MembershipChanges(roster.version), "how full they are is no change"
    log.look(_by_name(*fuller[1:99], _node(100), _node(50, "second")))
    some = log.changes(roster.version)
    assert {node.node_id for node in some.nodes} == {"n50", "n100"} and set(some.gone) == {"n0", "n99"}
    roster.update(some)
    assert await _names(roster) == sorted(f"n{number}" for number in range(1, 101) if number != 99)
    log.look_at(_node(0))
    roster.update(log.changes(roster.version))
    assert "n0" in await _names(roster)


async def test_who_comes_from_another_orchestrator_is_told_everything() -> None:
    roster = KnownNodes()
    for names in (range(3), range(2, 5)):
        log = MembershipLog()
        log.look(_by_name(*map(_node, names)))
        changes = log.changes(roster.version)
        assert changes.all
        roster.update(changes)
        assert await _names(roster) == [f"n{number}" for number in names]


async def test_who_was_away_for_long_is_told_everything() -> None:
    """What is forgotten of those that left cannot be told any more."""
    log, roster = MembershipLog(), KnownNodes()
    log.look(_by_name(_node(0), _node(1)))
    roster.update(log.changes(""))
    for number in range(2, module._GONE_MAX + 10):
        log.look(_by_name(_node(0), _node(number)))
    assert len(log._gone) == module._GONE_MAX
    changes = log.changes(roster.version)
    assert changes.all and len(changes.nodes) == 2


async def test_who_knows_no_other_waits_for_news() -> None:
    """A node that has just joined asks again at once, and not with the next heartbeat."""
    roster = KnownNodes()
    roster.update(MembershipChanges("a/1", (_node(0),), all=True))
    asking = asyncio.create_task(roster.storage_nodes())
    await roster.wanted(10.0)
    roster.update(MembershipChanges("a/2", (_node(1), replace(_node(2), incarnation="x"))))
    assert len(await asking) == 3
