"""The public gRPC frontend: what it must not do on its loop."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

import quire_gateway.grpc.public as public
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.ranges import ChunkRange
from quire.testing import FakeClock
from quire.wire import convert
from quire.wire.v1 import gateway_pb2
from quire_gateway.admission import Admission
from quire_gateway.config import GatewayConfig
from quire_server.lookups import Found, Question


class _Lookups:
    release = None

    async def lookup(self, question: Question) -> Found:
        return Found([ChunkRange("a", 0, len(question.keys))])


async def test_a_look_up_by_tokens_hashes_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 13: a MiB of tokens took 1.3 s of the event loop, and all that the service answers waited."""
    seen: list[threading.Thread] = []

    def hashed(namespace: Namespace, tokens: Any) -> ChunkKeys:
        seen.append(threading.current_thread())
        return block_keys(namespace, tokens)

    monkeypatch.setattr(public, "block_keys", hashed)
    nothing: Any = None
    config, clock = GatewayConfig(cluster_secret="s" * 32), FakeClock()
    lookups: Any = _Lookups()
    servicer = public.GatewayServicer(
        config=config,
        gateway=nothing,
        images=nothing,
        latents=nothing,
        admission=Admission(config, nothing, clock),
        lookups=lookups,
        orchestrator=nothing,
        clock=clock,
    )
    namespace = Namespace("model", "v1", KvLayout(2, 16, 1, 32, Dtype.FP16))
    request = gateway_pb2.LookupRequest(namespace=convert.namespace_to(namespace), tokens=range(64))
    context: Any = SimpleNamespace(invocation_metadata=dict)
    assert (await servicer.Lookup(request, context)).matched_chunks == 4
    assert seen and seen[0] is not threading.main_thread()
