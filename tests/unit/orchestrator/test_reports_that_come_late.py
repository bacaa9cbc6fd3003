"""For how long a report of a member counts."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.orchestrator.world import World


async def test_a_member_whose_reports_come_late_expires_later() -> None:
    """As long as three of its longest pauses, five times the usual time at most; in time again, it is as before."""
    world = World()
    cluster = (await world.start()).cluster
    a, b, _ = await world.live()
    usual_ms = cluster._ttl_ms(a)
    for _ in range(5):
        await world.clock.advance(1.0)
        assert cluster._ttl_ms(a) == usual_ms == 3000
    await world.clock.advance(2.5)
    assert cluster._ttl_ms(a) == 7500
    assert cluster._ttl_ms(b) == usual_ms, "each by its own reports"
    assert cluster._ttl_ms(replace(a, incarnation="another")) == usual_ms, "it was away, not late"
    info = world.infos.pop("a")  # it expires
    await world.clock.advance(12.0)
    await cluster.refresh()
    assert cluster._ttl_ms(a) == 5 * usual_ms, "it was late, and is known for that"
    world.infos["a"] = info
    await cluster.refresh()
    await world.clock.advance(200.0)
    assert cluster._ttl_ms(a) == 5 * usual_ms, "another orchestrator had its reports: no pause of its own"
    for _ in range(80):
        await world.clock.advance(1.0)
        last_ms = cluster._ttl_ms(a)
    assert last_ms == usual_ms


async def test_members_that_have_gone_are_forgotten() -> None:
    world = World()
    cluster = (await world.start()).cluster
    a, b, _ = await world.live()
    cluster._ttl_ms(a)
    await world.clock.advance(301.0)
    cluster._ttl_ms(b)
    assert [name for name, _ in cluster._pauses] == ["b"]
