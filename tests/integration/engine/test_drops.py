"""Drops and restarts: what tells a node after a crash which deletions concern its copies."""

from __future__ import annotations

from quire.model.durability import Durability
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import Engine, key_of


async def _crashed(engine: Engine) -> Engine:
    """The same node after a loss of power: what it knows is what its drives say."""
    engine.disk.crash()
    again = Engine(engine.disk)
    again.listed = dict(engine.listed)
    return await again.start()


async def test_a_drop_of_long_ago_takes_nothing_that_was_stored_again() -> None:
    """Finding D1: after a restart the node knew no generations, and took the old drop to concern the new copy."""
    engine = await Engine(SimDisk()).start()
    await engine.put([1], Durability.LOCAL)
    ended = engine.listed[key_of(1)]
    assert await engine.drop([1]) == 1
    await engine.put([1], Durability.LOCAL)
    assert engine.listed[key_of(1)] != ended
    engine = await _crashed(engine)
    assert await engine.tiers.drop({key_of(1): ended}) == 0 and engine.has(1)
    assert await engine.tiers.drop({key_of(1): engine.listed[key_of(1)]}) == 1 and not engine.has(1)
    await engine.stop()


async def test_an_acknowledged_chunk_knows_its_entry_after_a_crash_though_the_index_had_one_before() -> None:
    """Another node had registered the chunk: the generation that this node proposed is not its entry's."""
    engine = await Engine(SimDisk()).start()
    engine.listed[key_of(1)] = 4711
    assert await engine.put([1], Durability.LOCAL) == {key_of(1)}
    engine = await _crashed(engine)
    assert engine.residency.recorded(key_of(1)) == 4711
    assert await engine.tiers.drop({key_of(1): 4711}) == 1
    await engine.stop()
