"""Members of a cluster, and what operators ask of storage nodes, on a real Redis and on a real Redis Cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio as redis

from quire.model.errors import NameTaken
from quire.model.nodes import GatewayInfo, Location, Node, RunningDelivery, SchedulerInfo, StorageInfo, StorageState
from quire_server.redis import Membership


async def test_membership_expires_and_leaves(any_redis: redis.Redis) -> None:
    """A member lives as long as it reports; an old incarnation's good-bye does not remove the new one."""
    members = Membership(any_redis)
    old = Node(
        node_id="s",
        about=StorageInfo(worker_address=b"w", capacity_bytes=10, used_bytes=5, link="rack", has_object_tier=True),
        grpc_address="h:1",
        incarnation="old",
        protocol_version=1,
        location=Location("host", "zone"),
        stats={"chunks": 2.0},
        tenant_stats={"tenant.a.requests": 1.0},
        notes={"io": "threads"},
        running=(RunningDelivery(delivery_id=b"d" * 16, layers=32, layers_sent=3),),
    )
    new = Node(node_id="s", about=SchedulerInfo(link_rates={"rack": 7}), grpc_address="h:2", incarnation="new")
    await members.renew(old, 60_000)
    assert await members.described() == [old]
    assert await members.live() == [replace(old, stats={}, tenant_stats={}, notes={}, running=())], (
        "without figures for people"
    )
    with pytest.raises(NameTaken, match="another name"):
        await members.renew(new, 60_000)
    assert await members.described() == [old], "finding 7: a second live process of one name is refused"
    await members.renew(old, 1)
    await asyncio.sleep(0.01)
    assert await members.live() == []
    await members.renew(new, 60_000)
    assert await members.described() == [new], "nothing of the one before it"
    assert not await members.leave("s", "old")
    assert await members.live() == [new]
    assert await members.leave("s", "new")
    assert await members.live() == []


async def test_a_storage_node_is_expected_until_it_is_decommissioned_and_stops(any_redis: redis.Redis) -> None:
    """The state of a node outlives its memberships, and is not taken from its reports."""
    members, active, out = Membership(any_redis), StorageState.ACTIVE, StorageState.DECOMMISSIONED
    draining = StorageState.DRAINING
    node = Node(node_id="s", about=StorageInfo(worker_address=b"w"), incarnation="one")
    assert not await members.set_state("s", draining, active), "it has never joined"
    assert await members.renew(node, 60_000) is active
    assert await members.renew(Node(node_id="g", about=GatewayInfo(), incarnation="one"), 60_000) is active
    assert await members.expected() == {"s": active}
    assert not await members.set_state("s", out, draining), "it is not draining"
    assert await members.set_state("s", draining, active)
    assert await members.renew(replace(node, state=active), 60_000) is draining
    assert [(each.node_id, each.stays) for each in await members.live()] == [("g", True), ("s", False)]
    await members.leave("s", "one")
    assert await members.expected() == {"s": draining}
    again = replace(node, incarnation="two")
    assert await members.renew(again, 60_000) is draining
    assert await members.set_state("s", out, draining)
    await members.leave("s", "two", crashed=True)
    assert await members.renew(again, 60_000) is out
    assert not await members.leave("s", "one") and await members.expected() == {"s": out}
    await members.leave("s", "two")
    assert await members.expected() == {}
    assert await members.renew(again, 60_000) is active, "a node that is new"


async def test_a_state_of_another_release_is_not_relied_on(redis_client: redis.Redis) -> None:
    members = Membership(redis_client)
    await members.renew(Node(node_id="s", about=StorageInfo(worker_address=b"w"), incarnation="one"), 60_000)
    await redis_client.hset("quire:{nodes}:storage", "s", "resting")
    (node,) = await members.live()
    assert not node.stays and await members.expected() == {"s": StorageState.DRAINING}


async def test_those_who_join_and_leave_are_made_known(any_redis: redis.Redis) -> None:
    """A report of a member that is known is no news."""
    members, heard = Membership(any_redis), asyncio.Queue[None]()

    async def listen() -> None:
        async for _ in members.changes():
            heard.put_nowait(None)

    async def news() -> int:
        await asyncio.sleep(0.1)
        count = heard.qsize()
        while not heard.empty():
            heard.get_nowait()
        return count

    listening = asyncio.create_task(listen())
    async with asyncio.timeout(10):
        await heard.get()  # it listens
        node = Node(node_id="s", about=StorageInfo(worker_address=b"w"), incarnation="old")
        await members.renew(node, 60_000)
        await heard.get()
        await members.renew(node, 60_000)
        assert await news() == 0
        await members.renew(node, 1)
        await asyncio.sleep(0.01)
        await members.renew(node, 60_000)  # alive again
        await heard.get()
        assert await members.leave("s", "old")
        await heard.get()
        assert not await members.leave("s", "old")
        assert await news() == 0
    listening.cancel()


async def test_renewals_that_are_written_together(any_redis: redis.Redis) -> None:
    """Each is told of its own: one whose name is taken costs the others nothing, one that hangs up neither."""
    members = Membership(any_redis)
    nodes = [
        Node(node_id=f"s{number}", about=StorageInfo(worker_address=b"w"), incarnation="one") for number in range(8)
    ]
    await members.renew(nodes[3], 60_000)
    other = replace(nodes[3], incarnation="other")
    asked = [
        asyncio.create_task(members.renew(node, 60_000, gather_s=0.05))
        for node in (*nodes[:3], other, *nodes[4:], nodes[3])
    ]
    await asyncio.sleep(0.01)
    asked[5].cancel()
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(done[3], NameTaken)
    assert isinstance(done[5], asyncio.CancelledError)
    assert [each for number, each in enumerate(done) if number not in (3, 5)] == [StorageState.ACTIVE] * 7
    assert [node.incarnation for node in await members.live()] == ["one"] * 7, "not the one that hung up"


async def test_a_renewal_that_waits_does_not_bring_back_who_has_left(any_redis: redis.Redis) -> None:
    """In a large cluster a renewal waits for others; a node that stops cancels its own."""
    members = Membership(any_redis)
    node = Node(node_id="s", about=StorageInfo(worker_address=b"w"), incarnation="one")
    await members.renew(node, 60_000)
    waiting = asyncio.create_task(members.renew(node, 60_000, gather_s=0.1))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await members.leave("s", "one")
    await asyncio.sleep(0.3)
    assert await members.live() == []


async def test_a_dead_member_is_not_listed_with_the_time_of_its_successor(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor reports between two reads: the dead one's address does not get the living one's expiry."""
    members = Membership(any_redis)
    dead = Node(node_id="s", about=StorageInfo(worker_address=b"dead"), incarnation="old")
    await members.renew(dead, 1)
    await asyncio.sleep(0.01)
    read: Any = any_redis.execute_command

    async def slowly(*arguments: Any, **options: Any) -> Any:
        answer = await read(*arguments, **options)
        if arguments[0] == "HGETALL":
            monkeypatch.undo()
            await members.renew(replace(dead, about=StorageInfo(worker_address=b"alive"), incarnation="new"), 60_000)
        return answer

    monkeypatch.setattr(any_redis, "execute_command", slowly)
    assert [node.worker_address for node in await members.live()] != [b"dead"]
