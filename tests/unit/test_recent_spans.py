"""Spans that a process keeps in memory, and what a gateway makes of members that tell them, or do not."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from quire.model.errors import Unauthenticated
from quire.model.nodes import GatewayInfo, MemberSpans, Node
from quire.wire.credentials import AUTHORIZATION, authorization, operator_token, spans_token
from quire.wire.v1 import trace_pb2
from quire_gateway.adapters import spans
from quire_gateway.adapters.spans import GrpcClusterSpans
from quire_gateway.config import GatewayConfig
from quire_server import trace_service
from quire_server.grpc_server import Server
from quire_server.telemetry.recent_spans import RecentSpans

_SECRET = b"s" * 32


def _finished(most: int, names: Sequence[str]) -> RecentSpans:
    kept = RecentSpans()
    kept.keep("storage", most)
    provider = TracerProvider()
    provider.add_span_processor(kept)
    for name in names:
        with provider.get_tracer("test").start_as_current_span(name):
            pass
    return kept


def _told(recent: RecentSpans, trace_id: str = "") -> list[dict[str, Any]]:
    return [json.loads(each) for each in recent.told(recent.kept(), trace_id)]


def test_the_oldest_leave_first() -> None:
    told = _told(_finished(2, ["a", "b", "c"]))
    assert [(each["name"], each["service"], each["ok"]) for each in told] == [
        ("b", "storage", True),
        ("c", "storage", True),
    ]
    assert not _told(_finished(0, ["a"]))


def test_traces_are_found_by_how_their_id_begins() -> None:
    kept = _finished(8, ["a", "b"])
    ids = [each["trace_id"] for each in _told(kept)]
    assert [each["name"] for each in _told(kept, ids[1][:12])] == ["b"]
    assert not _told(kept, "x")


async def _pages(token: str, monkeypatch: pytest.MonkeyPatch, recent: RecentSpans) -> list[int]:
    """How many spans each page has."""
    monkeypatch.setattr(trace_service, "recent_spans", recent)
    context: Any = SimpleNamespace(invocation_metadata=lambda: ((AUTHORIZATION, authorization(token)),))
    servicer = trace_service.TraceServicer([b"another" * 5, _SECRET])
    return [len(page.spans) async for page in servicer.ListSpans(trace_pb2.ListSpansRequest(), context)]


async def test_they_are_told_in_pages_to_who_shows_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = _finished(300, ["a"] * 300)
    assert await _pages(spans_token(_SECRET), monkeypatch, recent) == [200, 100]
    for wrong in ("", spans_token(b"x" * 32), operator_token(_SECRET.decode())):
        with pytest.raises(Unauthenticated):
            await _pages(wrong, monkeypatch, recent)


async def test_members_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are told; one whose secret differs refuses, one takes connections and says nothing."""
    monkeypatch.setattr(trace_service, "recent_spans", _finished(8, ["a"]))
    mute = socket.create_server(("127.0.0.1", 0))
    good, other = (Server("127.0.0.1:0", [], secrets=[secret]) for secret in (_SECRET, b"x" * 32))
    for server in (good, other):
        await server.start()
    config = GatewayConfig(cluster_secret=_SECRET.decode(), orchestrator_address="127.0.0.1:1")

    async def told(**ports: int) -> dict[str, MemberSpans]:
        async def nodes() -> list[Node]:
            where = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
            return [Node(node_id=name, about=GatewayInfo(), grpc_address=each) for name, each in where.items()]

        return {page.member: page async for page in GrpcClusterSpans(config, nodes).of("")}

    pages = await told(good=good.port, other=other.port)
    silent = {"other", "orchestrator at 127.0.0.1:1"}
    assert pages.keys() == {"good", *silent}
    assert len(pages["good"].spans) == 1 and not pages["good"].error
    assert all(pages[name].error and not pages[name].spans for name in silent)
    monkeypatch.setattr(spans, "_SILENCE_S", 0.2)  # gRPC itself gives up after three seconds
    assert "silent" in (await told(mute=mute.getsockname()[1]))["mute"].error
    mute.close()
    for server in (good, other):
        await server.stop(0)
