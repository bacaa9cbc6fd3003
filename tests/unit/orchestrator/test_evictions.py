"""What leaves the index, and who hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.model.durability import Durability, OnExisting
from quire.model.errors import InvalidRequest
from quire.model.fingerprints import fingerprint
from quire.model.index import Drop
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node, StorageInfo
from quire.model.records import NO_NAMESPACE, records
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.runtime import Orchestrator
from tests.unit.orchestrator.world import CHUNK, World


async def test_a_prefix_that_lies_in_the_object_tier_alone_can_be_extended() -> None:
    """Finding 22: it counted as not stored, and the client was told that its chunks would have no parent."""
    world = World()
    keys = await world.stored(4)
    await world.index.evict(list(reversed(records(keys, 2, 2))), 0, 0)
    stored = records(keys, 0, 2)
    await world.index.add_objects(stored, await world.index.register("a", stored, 0))
    await world.index.unregister("a", stored, 0, only_in_object=True)
    allocation = (await world.start()).allocation
    ranges, nodes, known = await allocation.allocate(keys, 2, Durability.LOCAL, OnExisting.SKIP, chunk_bytes=CHUNK)
    assert known == 2
    assert sum(each.count for each in ranges) == 2 and ranges[0].first == 2
    assert [node.node_id for node in nodes] == [each.node_id for each in ranges]
    assert not world.raised, "what the object tier has is as durable as anything can be"


async def test_a_node_that_is_away_hears_of_evictions_when_it_is_back() -> None:
    """With the generations of the entries that ended: what it stores again until then is another entry's."""
    world = World()
    keys = await world.stored(2)
    generations = await world.index.register("a", records(keys, 0, 2), 0)
    evictions = (await world.start()).evictions
    assert await evictions.evict(NO_NAMESPACE, keys, keep=1) == 1
    drop = Drop(keys.at(1), fingerprint(keys.bucket_of(1)), generations[1])
    for _ in range(2):
        assert await evictions.drops("a", 0) == ([drop], 0), "until the node has confirmed it"
    await evictions.settle_drops("a", [drop])
    assert await evictions.drops("a", 0) == ([], 0)


async def test_nodes_let_go_of_what_the_object_tier_has() -> None:
    """Four chunks: the first is kept, the last has no object, and a lease pins the third."""
    world = World()
    keys = await world.stored(4)
    objects = records(keys, 0, 3)
    await world.index.add_objects(objects, await world.index.register("a", objects, 0))
    world.pinned.add(keys.at(2))
    world.infos |= world.with_objects()  # others have no object tier, and perhaps a copy
    evictions = (await world.start()).evictions
    assert await evictions.demote(NO_NAMESPACE, keys, keep=1) == 1
    nodes = [name for name, info in world.infos.items() if isinstance(info, StorageInfo)]
    assert len(nodes) > 1 and world.demoted == {name: [keys.at(1), keys.at(2)] for name in nodes}
    world.away.add("a")
    assert await evictions.demote(NO_NAMESPACE, keys, keep=1) == 0, "it may have them all"
    with pytest.raises(InvalidRequest):
        await evictions.demote(NO_NAMESPACE, keys, keep=5)


async def test_objects_stay_while_an_index_is_to_be_rebuilt() -> None:
    """It may have gone back, and may not know that what was to be deleted was stored again since."""
    world = World()
    orchestrator = await world.start()
    keys = await world.stored(1)
    await world.index.add_objects(records(keys, 0, 1), await world.index.register("a", records(keys, 0, 1), 0))
    await world.index.evict(records(keys, 0, 1), 0, 0)
    world.infos = {name: info for name, info in world.infos.items() if name == "leader"} | world.with_objects()
    await orchestrator.cluster.refresh()
    assert orchestrator.cluster.rebuild and await orchestrator.evictions.sweep_objects() == 0
    await world.index.rebuilt(orchestrator.cluster.rebuild)
    assert await orchestrator.evictions.sweep_objects() == 1
    assert world.deleted == [keys.at(0)]
    await orchestrator.close()


@pytest.mark.parametrize("node_state", [{"changes": {"a": 1}}, {"epoch": "another"}], ids=["changes", "epoch"])
async def test_objects_stay_while_a_storage_node_knows_of_more_than_the_index(node_state: dict[str, Any]) -> None:
    """A backup was restored: the object may have been stored and acknowledged again since."""
    world = World()
    orchestrator, keys = await _with_an_object_to_delete(world)
    vars(world).update(node_state)
    assert await orchestrator.evictions.sweep_objects() == 0
    assert not world.deleted
    assert all(await world.index.register("@object", records(keys, 0, 1), 0)), "it is not claimed any more"
    await orchestrator.close()


async def test_an_orchestrator_notices_an_index_that_went_back() -> None:
    """Also if the only node that had reported the lost chunks is lost, too."""
    world = World()
    orchestrator, _ = await _with_an_object_to_delete(world)
    backup = world.index.state.copy()
    await orchestrator.cluster.refresh()
    assert not await world.index.rebuild()
    world.index.state = backup
    assert await orchestrator.evictions.sweep_objects() == 0
    assert await world.index.rebuild() and not world.deleted
    await orchestrator.close()


async def test_concurrent_refreshes_are_no_sign_of_a_rollback() -> None:
    """Concurrent refreshes may receive their ticks in any order."""
    world = World()
    orchestrator = await world.start()
    await world.index.rebuilt(await world.index.rebuild())
    tick, answered = world.index.tick, asyncio.Event()

    async def late() -> int:
        world.index.tick = tick  # type: ignore[method-assign]
        number = await tick()
        await answered.wait()
        return number

    world.index.tick = late  # type: ignore[method-assign]
    first = asyncio.create_task(orchestrator.cluster.refresh())
    await asyncio.sleep(0)
    await orchestrator.cluster.refresh()
    answered.set()
    await first
    await orchestrator.cluster.refresh()
    assert not await world.index.rebuild()
    await orchestrator.close()


async def test_an_orchestrator_that_stops_deregisters_no_node() -> None:
    """A refresh that outlived its cancellation watched the nodes anew, and took its own closed channels for theirs."""
    world = World()
    orchestrator, closed, deregistered = await world.start(), asyncio.Event(), list[str]()

    async def gone(node: Node) -> None:
        await closed.wait()

    async def leave(node_id: str, incarnation: str) -> bool:
        deregistered.append(node_id)
        return True

    vars(world).update(gone=gone, leave=leave)
    await asyncio.sleep(0)  # the nodes are watched
    await orchestrator.close()
    await orchestrator.cluster.refresh()
    closed.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not deregistered and not orchestrator.cluster._watchers


async def test_objects_stay_while_a_storage_node_does_not_answer() -> None:
    world = World()
    orchestrator, keys = await _with_an_object_to_delete(world)
    world.away.add("a")
    assert await orchestrator.evictions.sweep_objects() == 0
    assert not await world.index.rebuild() and not world.deleted
    world.away.clear()
    assert await orchestrator.evictions.sweep_objects() == 0, "it has its time of grace anew"
    await world.clock.advance(61.0)
    assert await orchestrator.evictions.sweep_objects() == 1 and world.deleted == [keys.at(0)]
    await orchestrator.close()


async def test_objects_stay_if_the_index_was_rebuilt_while_they_were_claimed() -> None:
    """That rebuild could not list the claimed objects."""
    world = World()
    orchestrator, _ = await _with_an_object_to_delete(world)
    is_current = world.is_current

    async def meanwhile(node: Node, epoch: str, changes: int) -> bool:
        await world.index.damaged()
        await world.index.rebuilt(await world.index.rebuild())
        return await is_current(node, epoch, changes)

    world.is_current = meanwhile  # type: ignore[method-assign]
    assert await orchestrator.evictions.sweep_objects() == 0
    assert await world.index.rebuild() and not world.deleted
    await orchestrator.close()


async def _with_an_object_to_delete(world: World) -> tuple[Orchestrator, ChunkKeys]:
    """Nothing lists it, and its time of grace is over."""
    orchestrator = await world.start()
    keys = await world.stored(1)
    await world.index.add_objects(records(keys, 0, 1), await world.index.register("a", records(keys, 0, 1), 0))
    await world.index.evict(records(keys, 0, 1), 0, 0)
    world.infos = {name: info for name, info in world.infos.items() if name == "leader"} | world.with_objects()
    await world.index.rebuilt(await world.index.rebuild())
    await orchestrator.cluster.refresh()
    await world.index.rebuilt(await world.index.rebuild())
    return orchestrator, keys


async def test_no_node_is_withdrawn_for_an_outage_of_redis() -> None:
    """Finding D11: nobody could report while Redis was away, and the first sweep took every node for gone for good."""
    world = World()
    orchestrator = await world.start()
    await world.stored(2)
    evictions, cluster, lost_s = (
        orchestrator.evictions,
        orchestrator.cluster,
        OrchestratorConfig(cluster_secret="s").node_lost_ms / 1000,
    )
    nodes, world.infos = world.infos, {}
    await world.clock.advance(2 * lost_s)
    assert await evictions.forget_lost_nodes() == 0, "membership was not read for as long"
    await cluster.refresh()  # Redis is back, and no node has reported yet
    assert await evictions.forget_lost_nodes() == 0
    for _ in range(3):
        await world.clock.advance(1.0)
        await cluster.refresh()
    assert await evictions.forget_lost_nodes() == 0, "each has its whole time"
    world.infos = nodes
    await cluster.refresh()
    assert cluster.away_s("a") == 0.0
    await orchestrator.close()


async def test_a_node_that_stays_away_is_withdrawn_at_its_time() -> None:
    world = World()
    orchestrator = await world.start()
    await world.stored(2)
    world.infos = {name: info for name, info in world.infos.items() if name != "a"}
    waited_s = 0.0
    while not await orchestrator.evictions.forget_lost_nodes():
        await world.clock.advance(1.0)
        await orchestrator.cluster.refresh()
        waited_s += 1.0
    assert waited_s == OrchestratorConfig(cluster_secret="s").node_lost_ms / 1000
    await orchestrator.close()
