"""The public gRPC frontend: what it must not do on its loop, and what it does not pass on."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import quire_gateway.grpc.public as public
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.errors import InvalidRequest, LeaseExpired, LeaseForged, NotAllowed, QuireError
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.lease import Lease, LeaseSigner
from quire.model.outcome import FetchSummary
from quire.model.ranges import ChunkRange
from quire.testing import FakeClock
from quire.wire import convert
from quire.wire.v1 import common_pb2, gateway_pb2, orchestrator_pb2
from quire_gateway.access.addresses import WorkerAddresses
from quire_gateway.access.admission import Admission, Principal
from quire_gateway.access.key_derivation import SameKeys
from quire_gateway.config import GatewayConfig
from quire_gateway.kv.transfers import FetchCall
from quire_server.lookups import LookupAnswer, Question


class _Lookups:
    release = None

    async def lookup(self, question: Question) -> LookupAnswer:
        return LookupAnswer([ChunkRange("a", 0, len(question.keys))])

    async def lookup_all(self, questions: Sequence[Question]) -> list[LookupAnswer]:
        return [await self.lookup(question) for question in questions]


def _servicer(clock: FakeClock, gateway: Any = None) -> public.GatewayServicer:
    nothing: Any = None
    config = GatewayConfig(cluster_secret="s" * 32)
    lookups: Any = _Lookups()
    return public.GatewayServicer(
        config=config,
        gateway=gateway,
        images=nothing,
        latents=nothing,
        own=nothing,
        pictures=nothing,
        admission=Admission(config, nothing, clock),
        lookups=lookups,
        following=nothing,
        orchestrator=nothing,
        retention=nothing,
        derivation=SameKeys(),
        addresses=WorkerAddresses(required=False, secrets=[], nodes=dict, sender=nothing, clock=clock),
        clock=clock,
    )


class _Moves:
    """A gateway that only counts."""

    fetches = 0

    async def fetch(self, fetch: FetchCall) -> AsyncIterator[FetchSummary]:
        self.fetches += 1
        yield FetchSummary(1, 1, delivered=b"\1")


async def test_a_lease_that_does_not_fit_moves_nothing() -> None:
    """Over other keys, expired, or of another cluster."""
    clock, moves = FakeClock(), _Moves()
    servicer = _servicer(clock, moves)
    keys = ChunkKeys(bytes(32))
    lease = Lease(
        lease_id=b"l" * 16,
        tip=keys.at(0),
        tip_bucket=keys.at(0),
        expires_ms=clock.now_ms() + 1000,
        ranges=(ChunkRange("a", 0, 1),),
    )
    context: Any = SimpleNamespace(invocation_metadata=dict)

    async def fetch(keys: ChunkKeys, secret: bytes = b"s" * 32) -> int:
        target = RdmaTarget(b"w", 4096, 1 << 20, b"k")
        descriptor = Descriptor(keys, 2, 16, 64, DeliveryOrder.AUTO, target)
        token = LeaseSigner(secret).sign(lease)
        request = gateway_pb2.FetchRequest(
            lease=token, delivery_id=b"d" * 16, descriptor=convert.descriptor_to(descriptor)
        )
        return len([event async for event in servicer.Fetch(request, context)])

    assert await fetch(keys) == 1
    with pytest.raises(LeaseForged, match="other keys"):
        await fetch(ChunkKeys(bytes([1]) * 32))
    with pytest.raises(LeaseForged, match="sign"):
        await fetch(keys, b"another secret")
    await clock.advance(2.0)
    with pytest.raises(LeaseExpired):
        await fetch(keys)
    assert moves.fetches == 1


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        ({"other_shards": [{"namespace": {"tenant_salt": b"another"}}]}, NotAllowed, ""),
        ({"other_shards": [{}], "prompt_tokens": 16, "device": "gpu"}, InvalidRequest, "other_shards"),
        ({"other_shards": [{}], "tokens": [1, 2]}, InvalidRequest, "other_shards"),
        ({"other_shards": [{}] * 256}, InvalidRequest, "other_shards"),
    ],
)
async def test_shards_that_are_not_looked_up_together(
    request_: dict[str, Any], error: type[QuireError], field: str
) -> None:
    context: Any = SimpleNamespace(principal=Principal())
    with pytest.raises(error) as refused:
        await _servicer(FakeClock()).Lookup(gateway_pb2.LookupRequest(**request_), context)
    assert refused.value.field == field


async def test_a_tenant_is_not_told_what_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the members: who they are, and not which deliveries run for which tenant."""
    running = common_pb2.RunningDelivery(delivery_id=b"d" * 16, tenant="another")
    node = common_pb2.Node(node_id="s-0", running=[running], tenant_stats={"tenant.another.requests": 1.0})

    async def list_nodes(*_: Any) -> Any:
        return orchestrator_pb2.ListNodesResponse(nodes=[node])

    servicer = _servicer(FakeClock())
    monkeypatch.setattr(servicer, "_orchestrator", SimpleNamespace(ListNodes=None))
    monkeypatch.setattr(servicer, "_forward", list_nodes)

    async def told(principal: Principal) -> Any:
        context: Any = SimpleNamespace(principal=principal)
        return (await servicer.Status(gateway_pb2.StatusRequest(), context)).nodes[0]

    assert await told(Principal()) == node
    assert await told(Principal(tenant="one")) == common_pb2.Node(node_id="s-0")


async def test_a_look_up_by_tokens_hashes_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 13: a MiB of tokens took 1.3 s of the event loop, and all that the service answers waited."""
    seen: list[threading.Thread] = []

    def hashed(namespace: Namespace, tokens: Any) -> ChunkKeys:
        seen.append(threading.current_thread())
        return block_keys(namespace, tokens)

    monkeypatch.setattr("quire_gateway.access.token_hashing.block_keys", hashed)
    servicer = _servicer(FakeClock())
    namespace = Namespace("model", "v1", KvLayout(2, 16, 1, 32, Dtype.FP16))
    request = gateway_pb2.LookupRequest(namespace=convert.namespace_to(namespace), tokens=range(64))
    context: Any = SimpleNamespace(invocation_metadata=dict)
    assert (await servicer.Lookup(request, context)).matched_chunks == 4
    assert seen and seen[0] is not threading.main_thread()
