"""The audit log: a line for each denied access, and for each act of an operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.model.errors import ChunkMissing, NotAllowed, Unauthenticated
from quire.testing.clock import FakeClock
from quire_gateway.access.admission import CALLER, Principal
from quire_gateway.access.audit import AuditLog
from quire_gateway.core.s3_errors import S3Error
from quire_server.redis.keys.access import AccessKey
from quire_server.telemetry.otlp_logs import OtlpLog
from quire_tools.otlp_sink import OtlpSink


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_denials_and_acts_are_lines(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path / "audit"), FakeClock())
    log.request("/quire.v1.GatewayService/Lookup", Unauthenticated("wrong secret", field="authorization"))
    CALLER.set(Principal(tenant="mallory", key=AccessKey("QK1", "mallory")))
    log.request("/quire.v1.GatewayService/Evict", NotAllowed("not this tenant's salt", field="namespace.tenant_salt"))
    log.request("S3 GET /quire-kv/a", S3Error("AccessDenied", "Access Denied"))
    log.request("/quire.v1.GatewayService/Fetch", ChunkMissing("gone"))
    log.request("S3 GET /b/a", S3Error("NoSuchKey", "gone"))
    CALLER.set(Principal(operator=True))
    log.act("SetTenant", "alice", None)
    log.act("SetTheta", "5", NotAllowed("no"))
    lines = _lines(tmp_path / "audit")
    assert [(each["audit"], each["act"].rpartition("/")[2], each["tenant"], each["key"]) for each in lines] == [
        ("denied", "Lookup", "", ""),
        ("denied", "Evict", "mallory", "QK1"),
        ("denied", "a", "mallory", "QK1"),
        ("act", "SetTenant", "", ""),
        ("act", "SetTheta", "", ""),
    ]
    assert [each["operator"] for each in lines] == [False, False, False, True, True]
    assert lines[1]["object"] == "namespace.tenant_salt" and lines[1]["outcome"].startswith("NotAllowed: ")
    assert [each["outcome"][:10] for each in lines[3:]] == ["ok", "NotAllowed"]


async def test_a_flood_is_counted_and_acts_are_never_left_out(tmp_path: Path) -> None:
    clock = FakeClock()
    log = AuditLog(str(tmp_path / "audit"), clock)
    for _ in range(250):
        log.request("m", NotAllowed("no"))
    log.act("SetTheta", "5", None)
    await clock.advance(1.1)
    log.request("m", NotAllowed("no"))
    lines = _lines(tmp_path / "audit")
    assert len(lines) == 102 and lines[100]["act"] == "SetTheta"
    assert sum(each.get("left_out", 0) for each in lines) == 150


def test_a_collector_has_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpSink() as sink:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.endpoint)
        collector = OtlpLog("quire-gateway", "quire.audit", node_id="gateway-0")
        log = AuditLog(str(tmp_path / "audit"), FakeClock(), collector)
        log.request("m", NotAllowed("no"))
        log.act("SetTheta", "5", None)
        collector.close()
        assert [json.loads(body) for _, body in sink.logs.records] == _lines(tmp_path / "audit")
        assert {service for service, _ in sink.logs.records} == {"quire-gateway"}
