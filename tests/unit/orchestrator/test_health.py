"""Checks that only an orchestrator can make: Redis, refused members, certificates; and the verdict as a metric."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quire import PROTOCOL_VERSION
from quire.model.errors import MetadataUnavailable, SecretDiffers
from quire.model.health import Verdict
from quire.model.nodes import Node, StorageInfo
from quire.wire import convert_health
from quire.wire.v1 import orchestrator_pb2 as pb
from quire_orchestrator.health import Health
from quire_server.access.certs import make
from quire_server.telemetry.build_info import CertificateLife
from tests.unit.orchestrator.world import World


@dataclass
class _Redis:
    problems: list[str] = field(default_factory=list)
    share: float | None = 0.0


async def _health(world: World, redis: _Redis | None = None, *files: str, now_s: float = 0.0) -> Health:
    orchestrator = await world.start()
    certificates = CertificateLife(files, lambda: now_s)
    return Health(cluster=orchestrator.cluster, redis=redis or _Redis(), certificates=certificates, clock=world.clock)


async def _codes(health: Health, world: World) -> list[tuple[str, Verdict]]:
    return [(check.code, check.verdict) for check in health.checks(await world.live())]


@pytest.mark.parametrize(
    ("redis", "expected"),
    [
        (_Redis(), []),
        (_Redis(share=None), []),
        (_Redis(share=0.85), [("REDIS_FULL", Verdict.WARN)]),
        (_Redis(share=0.97), [("REDIS_FULL", Verdict.ERR)]),
        (_Redis(problems=["appendonly is off"]), [("REDIS_UNSAFE", Verdict.WARN)]),
    ],
)
async def test_redis(redis: _Redis, expected: list[tuple[str, Verdict]]) -> None:
    world = World()
    assert await _codes(await _health(world, redis), world) == expected


async def test_a_member_that_is_refused_is_named_for_a_while() -> None:
    world = World()
    orchestrator = await world.start()
    health = Health(cluster=orchestrator.cluster, redis=_Redis(), certificates=CertificateLife(()), clock=world.clock)
    stranger = Node(node_id="x", about=StorageInfo(), incarnation="one", protocol_version=PROTOCOL_VERSION)
    with pytest.raises(SecretDiffers):
        orchestrator.cluster.check(stranger, b"wrong")
    (check,) = health.checks(await world.live())
    assert (check.code, check.node) == ("MEMBER_REFUSED", "x") and "SecretDiffers" in check.problem
    await world.clock.advance(16.0)
    assert health.checks(await world.live()) == []


async def test_certificates(tmp_path: Path) -> None:
    """Of members by their statistic, of the orchestrator by its files."""
    file = str(make(tmp_path, [], 90).ca)
    world = World()
    ends_s = CertificateLife([file], lambda: 0.0).days
    assert ends_s is not None
    last_s = ends_s * 86400
    ending, ended = ("CERTIFICATE_ENDS", Verdict.WARN), ("CERTIFICATE_ENDED", Verdict.ERR)
    for left_days, expected in ((30, []), (3, [ending]), (-1, [ended])):
        health = await _health(world, None, file, now_s=last_s - left_days * 86400)
        assert await _codes(health, world) == expected
    assert await _codes(await _health(world, None, str(tmp_path / "none"), now_s=1e9), world) == [
        ("CERTIFICATE_ENDED", Verdict.ERR)
    ]
    health = await _health(world)
    nodes = await world.live()
    for days, code in ((5.0, "CERTIFICATE_ENDS"), (0.0, "CERTIFICATE_ENDED")):
        (check,) = health.checks([*nodes[1:], replace(nodes[0], stats={"certificate days": days})])
        assert (check.code, check.node) == (code, "a")


async def test_the_verdict_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    health = await _health(world, _Redis(share=0.97, problems=["one", "two"]))
    assert health.stats == {}, "it has not looked yet"
    health.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert health.stats == {"health": 2, "failed.REDIS_FULL": 1, "failed.REDIS_UNSAFE": 2}

    async def away(*_: Any, **__: Any) -> list[Node]:
        raise MetadataUnavailable("Redis does not answer")

    monkeypatch.setattr(health._cluster, "nodes", away)
    await world.clock.advance(20.0)
    await asyncio.sleep(0.05)
    assert health.stats == {"health": 2, "failed.UNREACHABLE": 1}
    await health.close()


async def test_an_answer_of_the_release_before_is_judged_by_its_members() -> None:
    world = World()
    health = await _health(world, _Redis(share=0.97))
    checks = health.checks(await world.live())
    answer = pb.ListNodesResponse(checked=True, checks=convert_health.checks_to(checks))
    assert convert_health.checks_from(answer) == checks
    (check,) = convert_health.checks_from(pb.ListNodesResponse())
    assert check.code == "NO_STORAGE"
