"""Access keys with an end. With a real Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cbor2
import pytest
import redis.asyncio as redis

from quire.testing.clock import FakeClock
from quire_gateway.access.keyring import KeyRing
from quire_gateway.access.revocation import Revocations
from quire_server.redis import AccessKeys


async def test_an_expired_key_is_unknown(any_redis: redis.Redis) -> None:
    """At once, also to a gateway that has just read it; its open sessions end as those of a deleted one."""
    clock, keys, ended = FakeClock(), AccessKeys(any_redis, b"s" * 32), list[str]()
    ring = KeyRing(keys, clock)
    key = await keys.create("alice", expires_ms=clock.now_ms() + 400)
    unlimited = await keys.create("alice")
    assert await ring.get(key.name) == key and await ring.get(unlimited.name) == unlimited
    revocations = Revocations(ring, clock)
    revocations.watch(key, lambda: ended.append(key.name))
    revocations.watch(unlimited, lambda: ended.append(unlimited.name))
    await revocations.look()
    assert not ended
    await clock.advance(0.5)
    assert await ring.get(key.name) is None and await ring.get(unlimited.name) == unlimited
    await revocations.look()
    assert ended == [key.name]


async def test_other_acts_leave_the_end(any_redis: redis.Redis) -> None:
    keys = AccessKeys(any_redis, b"s" * 32)
    key = await keys.create("alice", expires_ms=5)
    assert await keys.rotate(key.name) == replace(key, generation=2)
    assert [stored.expires_ms for stored in await keys.all()] == [5]


@pytest.mark.parametrize("expires_ms", [0, 5])
async def test_keys_of_the_release_before(any_redis: redis.Redis, expires_ms: int) -> None:
    """This release reads such keys, and stores a key without an end in the form that the previous release reads."""
    keys = AccessKeys(any_redis, b"s" * 32)
    key = await keys.create("alice", expires_ms=expires_ms)
    raw: Any = await any_redis.hget("quire:s3:access", key.name)
    assert len(cbor2.loads(raw)) == (6 if expires_ms else 5)
    await any_redis.hset("quire:s3:access", "QKOLD", cbor2.dumps(["bob", [], 1, False, True]))
    old = await keys.get("QKOLD")
    assert old is not None and (old.tenant, old.expires_ms) == ("bob", 0)
