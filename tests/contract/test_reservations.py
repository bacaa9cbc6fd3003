"""Room that is reserved for what tenants write, in a real Redis."""

from __future__ import annotations

import asyncio

import redis.asyncio as redis

from quire.model.errors import QuotaExceeded
from quire.model.hashing import tenant_name
from quire.model.policy import TenantPolicy
from quire_server.limits.quotas import Quotas
from quire_server.redis import Images, Reservations, S3Buckets
from quire_server.redis.keys.access import salt_of
from quire_server.redis.reservations import RESERVATION_MS

SECRET = b"s" * 32


async def test_reservations_count_those_before_them(any_redis: redis.Redis) -> None:
    one, other = Reservations(any_redis), Reservations(any_redis)
    first = await one.add("alice", 100)
    second = await other.add("alice", 30)
    third = await one.add("alice", 7)
    assert [first.earlier_bytes, second.earlier_bytes, third.earlier_bytes] == [0, 100, 130]
    assert (await one.add("bob", 5)).earlier_bytes == 0
    await one.end(first)
    assert await one.earlier_bytes(third) == 30
    assert await other.earlier_bytes(second) == 0


async def test_a_renewed_reservation_counts_also_after_a_lost_redis(any_redis: redis.Redis) -> None:
    reservations = Reservations(any_redis)
    first = await reservations.add("alice", 100)
    await any_redis.delete("quire:reserved:alice")
    await reservations.renew(first)
    assert (await reservations.add("alice", 5)).earlier_bytes == 100
    await reservations.end(first)
    assert (await reservations.add("alice", 5)).earlier_bytes == 5


async def test_a_dead_process_keeps_no_room(any_redis: redis.Redis) -> None:
    reservations = Reservations(any_redis)
    await any_redis.hset("quire:reserved:alice", mapping={"old": "1:500:1", "next": "1"})
    assert (await reservations.add("alice", 10)).earlier_bytes == 0
    assert await any_redis.hget("quire:reserved:alice", "old") is None
    assert 0 < await any_redis.pttl("quire:reserved:alice") <= RESERVATION_MS


async def test_processes_at_one_moment_fill_the_room_and_no_more(any_redis: redis.Redis) -> None:
    """Twenty gateways write 100 bytes each, at the same time, where there is room for seven."""
    tenant = tenant_name(salt_of("alice", SECRET))
    barrier = asyncio.Barrier(20)
    admitted = asyncio.Event()

    async def write() -> bool:
        quotas = Quotas(
            policy=lambda name: TenantPolicy(name, stored_bytes_max=799 if name == tenant else 0),
            objects=S3Buckets(any_redis),
            images=Images(any_redis),
            reservations=Reservations(any_redis),
            secrets=[SECRET],
        )
        await barrier.wait()
        try:
            async with quotas.reserve("alice", 100):
                await admitted.wait()
                return True
        except QuotaExceeded:
            return False

    writes = [asyncio.create_task(write()) for _ in range(20)]
    async with asyncio.timeout(60):
        while sum(task.done() for task in writes) < 13:
            await asyncio.sleep(0.01)
        admitted.set()
        assert sum(await asyncio.gather(*writes)) == 7
