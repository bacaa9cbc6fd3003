"""Acts of operators on their way to an audit log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from quire.testing import FakeClock
from quire_gateway.access.audit import AuditLog
from quire_gateway.access.key_acts import KeyActs
from quire_server.redis import Acts


async def test_each_act_is_taken_by_one_gateway(any_redis: redis.Redis) -> None:
    """The first act is taken too, which was recorded before any gateway asked."""
    acts = Acts(any_redis)
    await acts.record("CreateKey", "QK1 of alice", "root@host")
    assert await acts.take("gateway-0", 10) == [], "the group of gateways begins"
    for number in range(5):
        await acts.record("DeleteKey", f"QK{number}", "root@host")
    first, second = await acts.take("gateway-0", 4), await acts.take("gateway-1", 10)
    subjects = [act.subject for act in (*first, *second)]
    assert subjects == ["QK1 of alice", *(f"QK{number}" for number in range(5))]
    assert {act.by for act in (*first, *second)} == {"root@host"}
    assert all(act.at_ms > 1_600_000_000_000 for act in first)
    assert await acts.take("gateway-0", 10) == []


async def test_an_act_that_was_not_confirmed_is_taken_again(any_redis: redis.Redis) -> None:
    acts = Acts(any_redis)
    await acts.take("gateway-0", 1)
    await acts.record("RotateKey", "QK1", "root@host")
    (act,) = await acts.take("gateway-0", 1)
    assert await acts.take("gateway-0", 1, unconfirmed=True) == [act]
    await acts.confirm([act])
    assert await acts.take("gateway-0", 1, unconfirmed=True) == []


async def test_gateways_that_begin_at_once_share_one_group(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways find no group before one of them creates it."""
    acts, barrier, create = Acts(any_redis), asyncio.Barrier(2), any_redis.xgroup_create

    async def create_together(*arguments: Any, **options: Any) -> Any:
        await barrier.wait()
        return await create(*arguments, **options)

    monkeypatch.setattr(any_redis, "xgroup_create", create_together)
    await acts.record("CreateKey", "QK1 of alice", "root@host")
    gateways = ("gateway-0", "gateway-1")
    async with asyncio.timeout(20):
        assert await asyncio.gather(*(acts.take(gateway, 1) for gateway in gateways)) == [[], []]
    taken = [await acts.take(gateway, 1) for gateway in gateways]
    assert list(map(len, taken)) == [1, 0]


async def test_acts_that_redis_has_trimmed_are_passed_over(any_redis: redis.Redis) -> None:
    """A gateway that was away for longer than the acts are kept goes on with those that are left."""
    acts = Acts(any_redis)
    await acts.take("gateway-0", 1)
    for number in range(3):
        await acts.record("DeleteKey", f"QK{number}", "root@host")
    (first, *later) = await acts.take("gateway-0", 3)
    await any_redis.xdel("quire:acts", first.entry)
    assert await acts.take("gateway-0", 3, unconfirmed=True) == later
    await acts.confirm(later)
    assert await acts.take("gateway-0", 3, unconfirmed=True) == []


async def test_acts_are_lines_of_the_audit_log(any_redis: redis.Redis, tmp_path: Path) -> None:
    acts, clock = Acts(any_redis), FakeClock()
    await acts.take("gateway-0", 1)
    await acts.record("GrantKey", "QK1: bob/shared:read", "root@host")
    writing = KeyActs(acts, AuditLog(str(tmp_path / "audit"), clock), "gateway-0", clock)
    writing.start()
    file = tmp_path / "audit"
    while not file.exists() or not file.read_text():
        await clock.advance(1.0)
    await writing.close()
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line.pop("at_ms") > 0
    assert line == {
        "audit": "act",
        "key": "",
        "tenant": "",
        "operator": True,
        "by": "root@host",
        "act": "GrantKey",
        "object": "QK1: bob/shared:read",
        "outcome": "ok",
    }
