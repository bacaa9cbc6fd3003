"""What is told to operators, and what is not."""

from __future__ import annotations

import asyncio
import json

import pytest
import structlog

from quire.telemetry import background, headers, logger, tracer, within
from quire.telemetry.trace import in_request
from quire_server.telemetry import configure


def test_secrets_are_masked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the field, and in URLs."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    configure("test")
    logger().info(
        "starting",
        cluster_secret="hush",
        Authorization="Bearer hush",
        lease=b"hush",
        redis="redis://user:hush@host:6379/0",
        plain="redis://host:6379/0",
    )
    line = capsys.readouterr().err
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    assert "hush" not in line
    said = json.loads(line)
    assert said["plain"] == "redis://host:6379/0"
    assert said["redis"] == "redis://user:***@host:6379/0"


async def test_what_outlives_a_request_is_none_of_its_trace() -> None:
    """A task of its own context tells callees not to record, and its log lines name no trace."""

    async def sent() -> tuple[bool, str]:
        with tracer().start_as_current_span("x"):
            pass
        return in_request(), headers().get("traceparent", "")

    traced, header = await asyncio.create_task(sent(), context=background())
    assert not traced
    assert header.endswith("-00"), "not sampled"


async def test_work_is_done_within_the_trace_of_its_request() -> None:
    async def sent() -> str:
        return headers().get("traceparent", "")

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert await asyncio.create_task(within({"traceparent": trace}, sent)) == trace
    assert await asyncio.create_task(within({}, sent)) == await sent() == "", "not even behind it"
    assert await asyncio.create_task(within({"traceparent": "nonsense"}, sent)) == ""
