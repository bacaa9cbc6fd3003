"""When a storage node may be drained, decommissioned and stopped, and what counts as a copy meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from quire.model.durability import Durability, OnExisting
from quire.model.errors import ConditionFailed
from quire.model.index import OBJECT_TIER
from quire.model.keys import ChunkKeys
from quire.model.nodes import Location, StorageInfo, StorageState
from quire.model.records import records
from quire_orchestrator.removals import Removals
from quire_orchestrator.runtime import Orchestrator
from quire_server.lookups import Question
from tests.unit.orchestrator.world import CHUNK, SPACE, World

_ACTIVE, _DRAINING, _OUT = StorageState.ACTIVE, StorageState.DRAINING, StorageState.DECOMMISSIONED


async def _two(chunks: int = 4) -> tuple[World, Orchestrator, ChunkKeys]:
    """Nodes `a`, which has a chain, and `b`."""
    world = World(states={"a": _ACTIVE, "b": _ACTIVE})
    return world, await world.start(), await world.stored(chunks)


def _report(world: World, name: str, reached: StorageState) -> None:
    info = world.infos[name]
    assert isinstance(info, StorageInfo)
    world.infos[name] = replace(info, reached=reached)


async def test_the_way_of_a_node_out_of_the_cluster() -> None:
    world, orchestrator, keys = await _two()
    removals: Removals = orchestrator.removals
    assert (await removals.check("a")).sole_chunks == 4
    with pytest.raises(ConditionFailed, match="4 of its chunks"):
        await removals.decommission("a", lose_chunks=False)
    await removals.set_draining("a", draining=True)
    with pytest.raises(ConditionFailed, match="not reported yet that it has been told"):
        await removals.decommission("a", lose_chunks=False)
    _report(world, "a", _DRAINING)
    with pytest.raises(ConditionFailed, match="4 of its chunks"):  # what it reports is not enough
        await removals.decommission("a", lose_chunks=False)
    await world.index.register("b", records(keys, 0, 4), 0)
    drained = await removals.check("a")
    assert drained.is_drained and not drained.is_safe and "not decommissioned" in drained.reason
    await removals.decommission("a", lose_chunks=False)
    assert "refuses stores" in (await removals.check("a")).reason, "it has not heard of that yet"
    _report(world, "a", _OUT)
    safe = await removals.check("a")
    assert safe.is_safe and safe.reason == ""


async def test_copies_on_nodes_that_leave_and_in_the_object_tier() -> None:
    world, orchestrator, keys = await _two()
    removals = orchestrator.removals
    await world.index.register("b", records(keys, 0, 4), 0)
    assert (await removals.check("a")).sole_chunks == 0
    world.states["b"] = _DRAINING
    assert (await removals.check("a")).sole_chunks == 4
    await world.index.register(OBJECT_TIER, records(keys, 0, 4), 0)
    assert (await removals.check("a")).sole_chunks == 0
    with pytest.raises(ConditionFailed, match="last storage node"):
        await removals.decommission("a", lose_chunks=False)
    with pytest.raises(ConditionFailed, match="nothing can take"):
        await removals.set_draining("a", draining=True)


async def test_a_report_of_a_state_that_has_ended_does_not_count() -> None:
    """Undone and drained again within a heartbeat: stores in between would be nobody's."""
    world, orchestrator, keys = await _two()
    removals = orchestrator.removals
    await world.index.register("b", records(keys, 0, 4), 0)
    world.states["a"] = _OUT
    _report(world, "a", _OUT)
    await removals.set_draining("a", draining=True)
    assert world.states["a"] is _OUT, "that is more than draining"
    await removals.set_draining("a", draining=False)
    assert not (await removals.check("a")).is_drained
    with pytest.raises(ConditionFailed, match="try again"):
        await removals.set_draining("a", draining=True)
    with pytest.raises(ConditionFailed, match="drain it first"):
        await removals.decommission("a", lose_chunks=False)
    _report(world, "a", _ACTIVE)
    await removals.set_draining("a", draining=True)
    assert world.states["a"] is _DRAINING


@pytest.mark.parametrize("change", ["undone", "restarted", "a holder left", "a holder is drained"])
async def test_a_change_while_chunks_are_counted_voids_the_count(change: str) -> None:
    """The count of a large index takes long: what it relied on has to hold at its end."""
    world, orchestrator, keys = await _two()
    await world.index.register("b", records(keys, 0, 4), 0)
    world.states["a"] = _DRAINING
    _report(world, "a", _DRAINING)
    sole, holder = world.index.sole, world.infos["b"]

    async def slowly(node_id: str, counted: Sequence[str]) -> int:
        count = await sole(node_id, counted)
        match change:
            case "undone":
                world.states["a"] = _ACTIVE
            case "restarted":
                _report(world, "a", _ACTIVE)
            case "a holder left":
                del world.infos["b"]
            case _:
                world.states["b"] = _DRAINING
        return count

    world.index.sole = slowly  # type: ignore[method-assign]
    voided = await orchestrator.removals.check("a")
    assert not voided.is_drained and "ask again" in voided.reason
    world.index.sole = sole  # type: ignore[method-assign]
    world.infos["b"], world.states = holder, {"a": _DRAINING, "b": _ACTIVE}
    _report(world, "a", _DRAINING)
    assert (await orchestrator.removals.check("a")).is_drained


async def test_a_state_that_somebody_else_has_set_meanwhile_stays() -> None:
    """A decommissioning that has looked, and an undo before it writes: at a barrier, between the two."""
    world, orchestrator, keys = await _two()
    await world.index.register("b", records(keys, 0, 4), 0)
    world.states["a"] = _DRAINING
    _report(world, "a", _DRAINING)
    set_state = world.set_state

    async def late(node_id: str, state: StorageState, previous: StorageState) -> bool:
        world.states["a"] = _ACTIVE
        return await set_state(node_id, state, previous)

    world.set_state = late  # type: ignore[method-assign]
    with pytest.raises(ConditionFailed, match="another operator"):
        await orchestrator.removals.decommission("a", lose_chunks=False)
    assert world.states["a"] is _ACTIVE


async def test_a_node_that_is_away_is_never_safe() -> None:
    """It may be back in a moment, with chunks that nobody knows of: only an operator can give it up."""
    world, orchestrator, keys = await _two()
    removals = orchestrator.removals
    info = world.infos.pop("a")
    assert (await removals.check("a")).sole_chunks == 4
    await world.index.register("b", records(keys, 0, 4), 0)
    unknown = await removals.check("a")
    assert not unknown.is_safe and not unknown.is_drained and "it is away" in unknown.reason
    with pytest.raises(ConditionFailed, match="it is away"):
        await removals.decommission("a", lose_chunks=False)
    away = [node for node in await orchestrator.cluster.nodes(None, with_away=True) if node.is_away]
    assert [(node.node_id, node.state) for node in away] == [("a", _ACTIVE)]
    await removals.decommission("a", lose_chunks=True)
    assert not [node for node in await orchestrator.cluster.nodes(None, with_away=True) if node.is_away]
    world.infos["a"] = info
    assert (await removals.check("a")).state is _OUT, "it is back, and not used"


async def test_new_chunks_and_readers_go_to_nodes_that_stay() -> None:
    world, orchestrator, keys = await _two()
    await world.index.register("b", records(keys, 0, 4), 0)
    longer = await world.stored(40, first=40)
    for state, readers in ((_ACTIVE, {"a", "b"}), (_DRAINING, {"b"})):
        world.states["a"] = state
        await orchestrator.cluster.refresh()
        questions = [Question(SPACE, keys, 1000, Location()) for _ in range(8)]
        answers = [await orchestrator.lookups.lookup(question) for question in questions]
        assert {run.node_id for answer in answers for run in answer.ranges} == readers
    ranges, _, known = await orchestrator.allocation.allocate(
        longer, 0, Durability.MEMORY, OnExisting.SKIP, chunk_bytes=CHUNK
    )
    assert known == 4 and {run.node_id for run in ranges} == {"b"}
    world.states["b"] = _DRAINING
    await orchestrator.cluster.refresh()
    ranges, _, _ = await orchestrator.allocation.allocate(
        longer, 0, Durability.MEMORY, OnExisting.SKIP, chunk_bytes=CHUNK
    )
    assert ranges, "a cluster of nodes that leave still takes stores"


async def test_no_copy_is_given_up_for_one_on_a_node_that_leaves() -> None:
    world, orchestrator, keys = await _two()
    await world.index.register("b", records(keys, 0, 4), 0)
    chunks = records(keys, 0, 4)
    world.states["a"] = _DRAINING
    await orchestrator.cluster.refresh()
    assert await orchestrator.reports.withdraw("b", chunks, keepers=["a"]) == [False] * 4
    assert await orchestrator.reports.withdraw("a", chunks[3:], keepers=["b"]) == [True]
