"""Keys of members: a permutation for each namespace, which no request passes by."""

from __future__ import annotations

import hmac
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import cbor2
import pytest

from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.events import CacheEvent, EventKind, EventPage
from quire.model.hashing import Namespace
from quire.model.index import Match, Pin
from quire.model.keys import ChunkKeys
from quire.model.lease import Lease, LeaseSigner
from quire.model.outcome import FetchSummary, StoreSummary
from quire.model.ranges import ChunkRange
from quire.model.records import NO_PARENT
from quire.testing.clock import FakeClock
from quire.wire import convert
from quire.wire.credentials import AUTHORIZATION, authorization, operator_token
from quire.wire.v1 import gateway_pb2 as pb
from quire_gateway.access.addresses import WorkerAddresses
from quire_gateway.access.admission import Admission
from quire_gateway.access.key_derivation import DerivedKeys, KeyDerivation, SameKeys
from quire_gateway.config import GatewayConfig
from quire_gateway.grpc.admin import AdminServicer
from quire_gateway.grpc.public import GatewayServicer
from quire_gateway.kv.retention import Retention
from quire_gateway.kv.transfers import FetchCall, StoreCall
from quire_server.lookups import LookupAnswer, Question
from tests.e2e.helpers import LAYOUT

SECRET = os.urandom(32)
SPACE = Namespace("m", "1", LAYOUT)
KEYS = ChunkKeys(os.urandom(32 * 5))


async def _secret() -> bytes:
    return SECRET


async def test_a_permutation_for_each_namespace() -> None:
    keys, other = DerivedKeys(_secret), replace(SPACE, tenant_salt=b"other")
    derived = await keys.derive(SPACE.tag, KEYS)
    assert await keys.revert(SPACE.tag, derived) == KEYS
    assert not set(derived) & set(KEYS) and len(set(derived)) == len(KEYS)
    assert not set(derived) & set(await keys.derive(other.tag, KEYS))
    assert derived == await DerivedKeys(_secret).derive(SPACE.tag, KEYS), "another gateway derives the same"
    assert derived.run(1, 2) == await keys.derive(SPACE.tag, KEYS.run(1, 2))
    for _ in range(2000):  # more namespaces than ciphers are kept
        await keys.derive(os.urandom(16), KEYS.run(0, 1))
    assert derived == await keys.derive(SPACE.tag, KEYS)


class _Seen:
    """Everything behind the frontend: notes the keys that come."""

    def __init__(self) -> None:
        self.keys: list[ChunkKeys] = []

    async def lookup(self, question: Question) -> LookupAnswer:
        self.keys.append(question.keys if question.sample is None else ChunkKeys(question.sample.packed))
        return LookupAnswer([ChunkRange("a", 0, len(question.keys))])

    async def lookup_all(self, questions: Sequence[Question]) -> list[LookupAnswer]:
        return [await self.lookup(question) for question in questions]

    async def release(self, token: bytes) -> bool:
        return True

    async def match(self, keys: ChunkKeys, pin: Pin | None = None) -> Match:
        self.keys.append(keys)
        return Match(())

    async def unpin(self, bucket: bytes, key: bytes, lease_id: bytes) -> bool:
        return False

    async def unpin_all(self, keys: ChunkKeys, lease_id: bytes) -> int:
        self.keys.append(keys)
        return 0

    async def Evict(self, request: pb.EvictRequest, **options: Any) -> pb.EvictResponse:
        self.keys.append(ChunkKeys(request.chunk_keys))
        return pb.EvictResponse()

    async def Demote(self, request: pb.DemoteRequest, **options: Any) -> pb.DemoteResponse:
        self.keys.append(ChunkKeys(request.chunk_keys))
        return pb.DemoteResponse()

    async def Assign(self, request: pb.AssignRequest, **options: Any) -> pb.AssignResponse:
        self.keys.append(ChunkKeys(request.chunk_keys))
        return pb.AssignResponse()

    async def prefetch(self, readable: LookupAnswer, namespace: Namespace, keys: ChunkKeys, within_s: float) -> int:
        self.keys.append(keys)
        return 0

    async def fetch(self, fetch: FetchCall) -> AsyncIterator[FetchSummary]:
        self.keys.append(fetch.descriptor.keys)
        yield FetchSummary(0, 0)

    async def store(self, store: StoreCall) -> AsyncIterator[StoreSummary]:
        self.keys.append(store.keys)
        yield StoreSummary(0, 0, 0)


async def _passed_on(derivation: KeyDerivation) -> dict[str, set[ChunkKeys]]:
    """By method, what came of `KEYS`."""
    config, clock = GatewayConfig(cluster_secret="s" * 32), FakeClock()
    nothing, seen = cast(Any, None), cast(Any, _Seen())
    servicer = GatewayServicer(
        config=config,
        gateway=seen,
        images=nothing,
        latents=nothing,
        own=nothing,
        pictures=nothing,
        admission=Admission(config, nothing, clock),
        lookups=seen,
        following=seen,
        orchestrator=seen,
        retention=Retention(seen, clock, 1000),
        derivation=derivation,
        addresses=WorkerAddresses(required=False, secrets=[], nodes=dict, sender=nothing, clock=clock),
        clock=clock,
    )
    context: Any = type("Context", (), {"invocation_metadata": lambda _: ()})()
    named: Any = {"namespace": convert.namespace_to(SPACE), "chunk_keys": KEYS.packed}
    sample = pb.KeySample(count=len(KEYS), whole_bucket=0, keys=KEYS.packed)
    sampled: Any = {"namespace": convert.namespace_to(SPACE), "sample": sample}
    sized = LAYOUT.num_layers, LAYOUT.chunk_tokens, LAYOUT.slice_bytes
    target = RdmaTarget(b"w", 4096, 1 << 30, b"k")
    descriptor = convert.descriptor_to(Descriptor(KEYS, *sized, DeliveryOrder.AUTO, target))
    lookup = pb.LookupRequest(**named)
    scope = derivation.scope(SPACE.tag)
    lease = Lease(
        lease_id=bytes(16),
        tip=(await derivation.derive(SPACE.tag, KEYS)).at(len(KEYS) - 1),
        tip_bucket=b"",
        expires_ms=1 << 60,
        ranges=(ChunkRange("a", 0, len(KEYS)),),
        namespace=scope,
    )
    token = LeaseSigner(*config.secrets).sign(lease)
    store = pb.StoreRequest(
        **named,
        store_id=bytes(16),
        source=convert.target_to(target),
        durability=convert.durability_to(Durability.MEMORY),
        on_existing=convert.on_existing_to(OnExisting.SKIP),
    )
    requests: dict[str, list[Any]] = {
        "Lookup": [
            pb.LookupRequest(**named, other_shards=[pb.ShardKeys(**named)]),
            pb.LookupRequest(**sampled, other_shards=[pb.ShardKeys(**sampled)]),
        ],
        "Evict": [pb.EvictRequest(**named)],
        "Demote": [pb.DemoteRequest(**named)],
        "Assign": [pb.AssignRequest(**named)],
        "Retain": [pb.RetainRequest(**named, ttl_ms=5), pb.RetainRequest(**named)],
        "Prefetch": [pb.PrefetchRequest(**named)],
        "Fetch": [pb.FetchRequest(lease=token, delivery_id=bytes(16), descriptor=descriptor)],
        "Retrieve": [pb.RetrieveRequest(lookup=lookup, delivery_id=bytes(16), descriptor=descriptor)],
        "Store": [store],
    }
    found = {}
    for method, each in requests.items():
        seen.keys.clear()
        for request in each:
            answer = getattr(servicer, method)(request, context)
            if hasattr(answer, "__aiter__"):
                assert [event async for event in answer]
            else:
                await answer
        found[method] = set(seen.keys)
    return found


async def test_no_request_passes_by() -> None:
    derived = DerivedKeys(_secret)
    expected = await derived.derive(SPACE.tag, KEYS)
    assert await _passed_on(derived) == {method: {expected} for method in await _passed_on(SameKeys())}


async def test_without_tokens_keys_stay_as_they_are() -> None:
    """Also the fault put back: what the test before would see if a method passed keys on."""
    found = await _passed_on(SameKeys())
    assert set(map(frozenset, found.values())) == {frozenset({KEYS})}


async def test_operators_are_told_the_keys_of_clients() -> None:
    derived = DerivedKeys(_secret)
    keys = await derived.derive(SPACE.tag, KEYS)
    parents = NO_PARENT + keys.run(0, 4).packed
    event = CacheEvent(kind=EventKind.STORED, holder="a", keys=keys, parents=parents, namespace=SPACE.tag)

    class Watching:
        async def follow(self, after: str) -> AsyncIterator[EventPage]:
            yield EventPage((event, replace(event, namespace=bytes(16))), "1-1")

    config, nothing, watching = GatewayConfig(cluster_secret="s" * 32), None, Watching()
    anything: Any = nothing
    admission: Any = Admission(config, anything, FakeClock())
    servicer = AdminServicer(config, admission, anything, watching, anything, derived, anything)  # type: ignore[arg-type]
    metadata = ((AUTHORIZATION, authorization(operator_token("s" * 32))),)
    context: Any = SimpleNamespace(invocation_metadata=lambda: metadata)
    (page,) = [page async for page in servicer.Watch(pb.WatchRequest(), context)]
    first, unknown = page.events
    assert (first.chunk_keys, first.parent_keys) == (KEYS.packed, NO_PARENT + KEYS.run(0, 4).packed)
    assert unknown.chunk_keys == keys.packed, "of a node that tells no namespace"


@pytest.mark.parametrize("namespace", [b"", SPACE.tag])
def test_a_lease_names_the_namespace_of_its_keys(namespace: bytes) -> None:
    """One of all keys is what the release before writes and reads; of a sample it has no digest."""
    signer = LeaseSigner(SECRET)
    lease = Lease(
        lease_id=b"i" * 16,
        tip=b"t" * 32,
        tip_bucket=b"b" * 32,
        expires_ms=5,
        ranges=(),
        keys_digest=KEYS.digest(),
        namespace=namespace,
    )
    assert signer.open(signer.sign(lease)) == lease
    fields = [lease.lease_id, lease.tip, lease.tip_bucket, 5, [], lease.keys_digest, {}, ["", 1.0, 0]]
    body = cbor2.dumps([5, *fields, namespace] if namespace else [4, *fields])
    assert signer.sign(lease) == hmac.digest(SECRET, b"quire lease 1" + body, "sha256") + body
    sampled = replace(lease, keys_digest=b"")
    assert signer.open(signer.sign(sampled)) == sampled
