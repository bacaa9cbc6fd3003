"""The view of the cluster that a gateway looks things up with: old by half a heartbeat, never too old to be true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from quire import PROTOCOL_VERSION
from quire.model.errors import KeysInvalid, MetadataUnavailable
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.nodes import Node, SchedulerInfo, StorageInfo
from quire.model.policy import TenantPolicy
from quire.model.profile import Profiles
from quire.model.records import records
from quire.testing import FakeClock
from quire.testing.index import MemoryIndex
from quire_server.lookups import Lookups, LookupSettings, Question
from quire_server.membership.cluster_view import RefreshedView

SPACE = Namespace("model", "v1", KvLayout(2, 16, 1, 32, Dtype.FP16), b"salt")


class _Redis:
    """Members and tenants. `asked`: how often for the members; `gate`: answers wait for it."""

    def __init__(self) -> None:
        self.names = ["a"]
        self.asked = 0
        self.down = False
        self.changed = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def live(self) -> list[Node]:
        self.asked += 1
        now = list(self.names)
        await self.gate.wait()
        if self.down:
            raise MetadataUnavailable("Redis does not answer")
        found = [
            Node(node_id=name, about=StorageInfo(worker_address=b"w"), protocol_version=PROTOCOL_VERSION)
            for name in now
        ]
        return [*found, Node(node_id="s", about=SchedulerInfo(), protocol_version=PROTOCOL_VERSION)]

    async def changes(self) -> AsyncIterator[None]:
        while True:
            await self.changed.wait()
            self.changed.clear()
            yield

    async def tenants(self) -> dict[str, TenantPolicy]:
        return {SPACE.tenant: TenantPolicy(SPACE.tenant, 2.0)}


def _view(redis: _Redis, clock: FakeClock) -> RefreshedView:
    return RefreshedView(members=redis, tenants=redis, clock=clock, refresh_s=0.5)


def _lookups(index: MemoryIndex, view: RefreshedView, clock: FakeClock) -> Lookups:
    settings = LookupSettings(secrets=(b"s" * 32,))
    return Lookups(settings=settings, index=index, view=view, profiles=Profiles(None), clock=clock)


async def test_what_a_node_holds_that_has_just_joined_is_found() -> None:
    """Its chunks were acknowledged to a client that knew it from the orchestrator."""
    redis, clock, index = _Redis(), FakeClock(), MemoryIndex()
    view = _view(redis, clock)
    lookups = _lookups(index, view, clock)
    await view.start()
    redis.names.append("b")
    keys = block_keys(SPACE, list(range(64)))
    await index.register("b", records(keys, 0, 4), 0)
    assert (await lookups.lookup(Question(SPACE, keys, 1000))).matched_chunks == 4
    asked = redis.asked
    assert (await lookups.lookup(Question(SPACE, keys, 1000))).matched_chunks == 4
    assert redis.asked == asked, "all holders are known: nothing is asked"
    await view.close()


async def test_a_change_is_seen_at_once() -> None:
    redis, clock = _Redis(), FakeClock()
    view = _view(redis, clock)
    await view.start()
    redis.names.append("b")
    redis.changed.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert set(view.storage_nodes()) == {"a", "b"}
    await view.close()


async def test_without_redis_the_view_stays() -> None:
    redis, clock = _Redis(), FakeClock()
    redis.down = True
    view = _view(redis, clock)
    await view.start()
    assert not view.live, "a gateway starts without Redis"
    redis.down = False
    await clock.advance(0.6)
    assert set(view.storage_nodes()) == {"a"} and set(view.live) == {"a", "s"}
    assert view.tenant(SPACE).weight == 2.0
    redis.down = True
    await clock.advance(5.0)
    assert set(view.live) == {"a", "s"}
    with pytest.raises(MetadataUnavailable):
        await view.refresh()
    await view.close()


async def test_those_who_look_at_once_share_an_answer_that_is_not_older_than_their_question() -> None:
    redis, clock = _Redis(), FakeClock()
    view = _view(redis, clock)
    redis.gate.clear()
    early = asyncio.create_task(view.refresh())
    await asyncio.sleep(0)
    redis.names.append("b")  # after the first had asked
    late = [asyncio.create_task(view.refresh()) for _ in range(5)]
    await asyncio.sleep(0)
    redis.gate.set()
    await asyncio.gather(early, *late)
    assert set(view.storage_nodes()) == {"a", "b"}
    assert redis.asked == 2


async def test_a_view_ends_whose_cancellation_gets_lost() -> None:
    """As in a gateway that was told to stop while redis-py sent: it waited for news until it was killed."""
    redis, sent = _Redis(), asyncio.get_running_loop().create_future()

    async def send() -> list[Node]:
        await asyncio.wait_for(sent, 30)
        return []

    redis.live = send  # type: ignore[method-assign]
    view = _view(redis, FakeClock())
    starting = asyncio.create_task(view.start())
    await asyncio.sleep(0)
    sent.set_result(None)
    await starting
    sent = asyncio.get_running_loop().create_future()
    redis.changed.set()
    while redis.changed.is_set():
        await asyncio.sleep(0)
    sent.set_result(None)
    async with asyncio.timeout(20):
        await view.close()
    assert all(task.done() for task in view._tasks), "it goes on listening"


@pytest.mark.parametrize("fails", [True, False])
async def test_members_that_expired_during_an_outage_count_until_they_had_time_to_report(fails: bool) -> None:
    """Redis does not answer, or stands still, for longer than members live: chunks that are there were misses."""
    redis, clock = _Redis(), FakeClock()
    redis.names = ["a", "b", "c"]
    view = _view(redis, clock)
    await view.start()
    redis.down = fails
    if not fails:
        redis.gate.clear()
    redis.names = []
    for _ in range(8):
        await clock.advance(0.5)
    redis.down = False
    redis.gate.set()
    await clock.advance(0.5)
    assert set(view.storage_nodes()) == {"a", "b", "c"}
    redis.names = ["b"]
    await clock.advance(1.0)
    assert set(view.storage_nodes()) == {"a", "b", "c"}
    for _ in range(6):
        await clock.advance(0.5)
    assert set(view.storage_nodes()) == {"b"}
    await view.close()


async def test_storage_nodes_that_all_die_are_forgotten() -> None:
    """Without them in Redis at every look, they were kept for ever."""
    redis, clock = _Redis(), FakeClock()
    redis.names = ["a", "b"]
    view = _view(redis, clock)
    await view.start()
    redis.names = []
    for _ in range(10):
        await clock.advance(0.5)
    assert not view.storage_nodes()
    await view.close()


async def test_a_member_that_leaves_is_forgotten_at_once() -> None:
    redis, clock = _Redis(), FakeClock()
    redis.names = ["a", "b"]
    view = _view(redis, clock)
    await view.start()
    for _ in range(8):
        await clock.advance(0.5)
    redis.names = ["b"]
    await clock.advance(0.5)
    assert set(view.storage_nodes()) == {"b"}
    await view.close()


async def test_no_lease_is_left_if_one_of_several_look_ups_fails() -> None:
    redis, clock, index = _Redis(), FakeClock(), MemoryIndex()
    view = _view(redis, clock)
    lookups = _lookups(index, view, clock)
    await view.start()
    keys = block_keys(SPACE, list(range(64)))
    await index.register("a", records(keys, 0, 4), 0)
    good, twice = Question(SPACE, keys, 1000), Question(SPACE, ChunkKeys(keys.at(0) * 2), 1000)
    assert [answer.matched_chunks for answer in await lookups.lookup_all([good, good])] == [4, 4]
    assert lookups.leases == 2
    with pytest.raises(KeysInvalid):
        await lookups.lookup_all([good, twice])
    assert lookups.leases == 2
    await view.close()
