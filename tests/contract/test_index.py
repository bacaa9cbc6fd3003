"""The index on a real Redis, asked in one call and by bucket, and in memory; and who is a member."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio as redis

from quire.model.errors import MetadataUnavailable, NameTaken
from quire.model.nodes import Location, Node, SchedulerInfo, StorageInfo
from quire.testing.contracts import IndexContract
from quire.testing.contracts.index import chain
from quire.testing.index import MemoryIndex
from quire_server.redis import Membership, PrefixIndex, connect


class TestIndex(IndexContract):
    @pytest.fixture(params=["one call", "by bucket", "memory"])
    def index(self, request: pytest.FixtureRequest, redis_client: redis.Redis) -> PrefixIndex | MemoryIndex:
        if request.param == "memory":
            return MemoryIndex()
        return PrefixIndex(redis_client, cluster=request.param == "by bucket")


async def test_membership_expires_and_leaves(redis_client: redis.Redis) -> None:
    """A member lives as long as it reports; an old incarnation's good-bye does not remove the new one."""
    members = Membership(redis_client)
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
    )
    new = Node(node_id="s", about=SchedulerInfo(link_rates={"rack": 7}), grpc_address="h:2", incarnation="new")
    await members.renew(old, 60_000)
    assert await members.live() == [old]
    with pytest.raises(NameTaken, match="another name"):
        await members.renew(new, 60_000)
    assert await members.live() == [old], "finding 7: a second live process of one name is refused"
    await members.renew(old, 1)
    await asyncio.sleep(0.01)
    assert await members.live() == []
    await members.renew(new, 60_000)
    assert not await members.leave("s", "old")
    assert await members.live() == [new]
    assert await members.leave("s", "new")
    assert await members.live() == []


async def test_those_who_join_and_leave_are_made_known(redis_client: redis.Redis) -> None:
    """A report of a member that is known is no news."""
    members, heard = Membership(redis_client), asyncio.Queue[None]()

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


async def test_a_dead_member_is_not_listed_with_the_time_of_its_successor(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor reports between two reads: the dead one's address does not get the living one's expiry."""
    members = Membership(redis_client)
    dead = Node(node_id="s", about=StorageInfo(worker_address=b"dead"), incarnation="old")
    await members.renew(dead, 1)
    await asyncio.sleep(0.01)
    read: Any = redis_client.execute_command

    async def slowly(*arguments: Any, **options: Any) -> Any:
        answer = await read(*arguments, **options)
        if arguments[0] == "HGETALL":
            monkeypatch.undo()
            await members.renew(replace(dead, about=StorageInfo(worker_address=b"alive"), incarnation="new"), 60_000)
        return answer

    monkeypatch.setattr(redis_client, "execute_command", slowly)
    assert [node.worker_address for node in await members.live()] != [b"dead"]


async def test_redis_that_is_not_there_is_a_typed_error() -> None:
    client = connect("unix:///nowhere/redis.sock", timeout_s=1)
    with pytest.raises(MetadataUnavailable, match="Redis"):
        await PrefixIndex(client).match(chain(3))
    await client.aclose()
