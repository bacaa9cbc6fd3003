"""Bad input is a typed error that names the field; nothing is written, nothing is lost, the node keeps serving."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from quire.client import AsyncClient, Lookup
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability
from quire.model.errors import (
    ChunkMissing,
    DescriptorInvalid,
    InvalidRequest,
    KeysInvalid,
    LayoutInvalid,
    LeaseExpired,
    LeaseForged,
    PoolFull,
    QuireError,
    TargetInvalid,
)
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.permit import PermitSigner
from quire.wire import convert
from quire.wire.channels import ChannelPool, call
from quire.wire.convert_records import records_to
from quire.wire.v1 import common_pb2, gateway_pb2
from quire.wire.v1.gateway_pb2_grpc import GatewayServiceStub
from quire_server.access.permits import member_permit
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, members, random_payload, some_keys, store

Scene = tuple[AsyncClient, Namespace, ChunkKeys, npt.NDArray[np.uint8], Lookup]


@pytest.fixture
async def scene(cluster: LocalCluster) -> AsyncIterator[Scene]:
    """Twenty stored chunks and a lease. Afterwards they must still be there, whatever the test did."""
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 20), random_payload(namespace, 20)
        await store(client, namespace, keys, payload)
        yield client, namespace, keys, payload, await client.lookup(namespace, keys)
        found = await client.lookup(namespace, keys)
        assert np.array_equal((await fetch_all(client, found))[0], payload), "the node keeps serving"


async def _refused(client: AsyncClient, found: Lookup, kind: type[QuireError], match: str) -> None:
    """A fetch that must fail with `kind` before a byte is written, and give the buffer back."""
    buffer = client.allocate(found.namespace.layout.payload_bytes(len(found.keys)))
    assert buffer.view is not None
    delivery = await client.fetch(found, buffer)
    with pytest.raises(kind, match=match):
        await delivery.layer(0)
    await delivery.quiesced(10)
    assert not buffer.view.any(), "nothing was written"
    buffer.close()


async def test_forged_and_foreign_leases(scene: Scene) -> None:
    client, namespace, keys, _, found = scene
    altered = found.lease[:40] + bytes([found.lease[40] ^ 1]) + found.lease[41:]
    await _refused(client, replace(found, lease=altered), LeaseForged, "lease")
    await _refused(client, replace(found, lease=b""), LeaseForged, "lease")
    shorter = await client.lookup(namespace, keys.run(0, 10))
    await _refused(client, replace(found, lease=shorter.lease), LeaseForged, "other keys")


async def test_expired_lease(scene: Scene) -> None:
    client, namespace, keys, _, _ = scene
    brief = await client.lookup(namespace, keys, lease_ttl_ms=50)
    await asyncio.sleep(0.1)
    await _refused(client, brief, LeaseExpired, "look up again")


async def test_descriptor_that_contradicts_the_stored_shape(scene: Scene) -> None:
    client, namespace, _, _, found = scene
    half = KvLayout(2, 16, 2, 64, Dtype.BF16)
    await _refused(client, replace(found, namespace=replace(namespace, layout=half)), DescriptorInvalid, "layers of")


async def test_target_smaller_than_the_payload(scene: Scene) -> None:
    client, _, _, _, found = scene
    buffer = client.allocate(4096)
    with pytest.raises(TargetInvalid, match="payload ends"):
        await client.fetch(found, buffer)
    buffer.close()


async def test_target_with_a_damaged_key(scene: Scene, cluster: LocalCluster) -> None:
    """The storage node cannot use the key: TargetInvalid, and no byte moves."""
    client, _, _, _, found = scene
    buffer = client.allocate(found.namespace.layout.payload_bytes(20))
    assert buffer.view is not None
    good = buffer.target()
    bad = RdmaTarget(good.worker_address, good.address, good.length, good.remote_key[:-1])
    layout = found.namespace.layout
    descriptor = Descriptor(found.keys, layout.num_layers, 16, layout.slice_bytes, DeliveryOrder.LAYERWISE, bad)
    outcome = await _raw_fetch(cluster, found, convert.descriptor_to(descriptor))
    assert outcome.error_code == "TargetInvalid" and outcome.quiesced
    assert not buffer.view.any()
    buffer.close()


@pytest.mark.parametrize(
    "change,field",
    [
        ({"per_layer_chunk_bytes": 0}, "per_layer_chunk_bytes"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 10**6}, "num_layers"),
        ({"chunk_keys": b"short"}, "chunk_keys"),
        ({"chunk_keys": b""}, "chunk_keys"),
        ({"order": common_pb2.DELIVERY_ORDER_UNSPECIFIED}, "order"),
        ({"per_layer_chunk_bytes": 1 << 40}, "per_layer_chunk_bytes"),
    ],
)
async def test_descriptor_fields(scene: Scene, cluster: LocalCluster, change: dict[str, object], field: str) -> None:
    client, _, _, _, found = scene
    buffer = client.allocate(found.namespace.layout.payload_bytes(20))
    layout = found.namespace.layout
    target = buffer.target()
    descriptor = Descriptor(found.keys, layout.num_layers, 16, layout.slice_bytes, DeliveryOrder.AUTO, target)
    message = convert.descriptor_to(descriptor)
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(InvalidRequest, match=field):
        await _raw_fetch(cluster, found, message)
    buffer.close()


async def test_chunks_that_did_not_match_are_refused(scene: Scene, cluster: LocalCluster) -> None:
    """By the client before anything is asked for; by the gateway, for whom the lease says which keys there are."""
    client, _, keys, _, found = scene
    buffer = client.allocate(found.namespace.layout.payload_bytes(20))
    for first, count in ((20, None), (0, 21), (-1, 3), (3, 0)):
        with pytest.raises(DescriptorInvalid, match="chunks from"):
            await client.fetch(found, buffer, first_chunk=first, chunk_count=count)
    for wrong in (keys.run(0, 19), ChunkKeys(keys.run(0, 19).packed + os.urandom(32))):
        await _refused(client, replace(found, keys=wrong), LeaseForged, "keys")


async def test_lookup_of_nonsense(scene: Scene, cluster: LocalCluster) -> None:
    """Wrong key lengths, overlong lists, an absent layout, an endless lease: each names its field."""
    client, namespace, keys, _, _ = scene
    pool = ChannelPool()
    stub: GatewayServiceStub = GatewayServiceStub(pool.get(cluster.gateway_address))
    known = convert.namespace_to(namespace)
    cases: list[tuple[gateway_pb2.LookupRequest, type[QuireError], str]] = [
        (gateway_pb2.LookupRequest(namespace=known, chunk_keys=b"x" * 31), KeysInvalid, "chunk_keys"),
        (gateway_pb2.LookupRequest(namespace=known, chunk_keys=bytes(32 * 65_537)), KeysInvalid, "at most"),
        (gateway_pb2.LookupRequest(chunk_keys=keys.packed), LayoutInvalid, "layout"),
        (gateway_pb2.LookupRequest(namespace=known, chunk_keys=keys.packed, tokens=[1]), InvalidRequest, "chunk_keys"),
        (
            gateway_pb2.LookupRequest(namespace=known, chunk_keys=keys.packed, lease_ttl_ms=10**9),
            InvalidRequest,
            "lease",
        ),
    ]
    for request, kind, match in cases:
        with pytest.raises(kind, match=match):
            await call(stub.Lookup, request, timeout_s=10)
    unknown = fresh_namespace()
    assert (await client.lookup(unknown, some_keys(unknown, 5))).matched_chunks == 0
    await pool.close()


async def test_tokens_are_hashed_at_the_orchestrator(scene: Scene, cluster: LocalCluster) -> None:
    _, namespace, _, _, _ = scene
    pool = ChannelPool()
    stub: GatewayServiceStub = GatewayServiceStub(pool.get(cluster.gateway_address))
    request = gateway_pb2.LookupRequest(namespace=convert.namespace_to(namespace), tokens=range(20 * 16 + 5))
    assert (await call(stub.Lookup, request, timeout_s=10)).matched_chunks == 20
    await pool.close()


async def test_stores_that_cannot_work(scene: Scene) -> None:
    """No parent, a source that is too small, chunks larger than a slab, more than there is memory: not kept whole."""
    client, namespace, keys, _, _ = scene
    strange = ChunkKeys(os.urandom(32 * 5))
    payload = random_payload(namespace, 5)
    with pytest.raises(InvalidRequest, match="first_chunk"):
        await store(client, namespace, strange, payload[:, :2], first=3)
    with pytest.raises(InvalidRequest, match="first_chunk"):
        await store(client, namespace, keys, payload, first=20)
    huge = fresh_namespace(KvLayout(4, 4096, 8, 128, Dtype.FP32))
    buffer = client.allocate(huge.layout.payload_bytes(1))
    session = await client.store(huge, some_keys(huge, 1), 0, buffer, durability=Durability.MEMORY)
    with pytest.raises(LayoutInvalid, match="slab"):
        await session.commit()
    many = fresh_namespace(KvLayout(4, 256, 8, 128, Dtype.FP16))
    buffer = client.allocate(many.layout.payload_bytes(180))
    session = await client.store(many, some_keys(many, 180), 0, buffer, durability=Durability.MEMORY)
    for layer in range(many.layout.num_layers):
        session.layer_ready(layer)
    with pytest.raises(PoolFull):
        await session.commit()
    assert (await client.lookup(many, some_keys(many, 180))).matched_chunks < 180


async def test_chunk_that_the_node_lost_is_withdrawn(scene: Scene, cluster: LocalCluster) -> None:
    """The index promises an object that was deleted: it costs that chunk alone, and the next look-up is honest."""
    from quire.model.records import records
    from quire.wire.v1 import orchestrator_pb2, storage_pb2
    from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
    from quire.wire.v1.storage_pb2_grpc import StorageServiceStub

    client, *_ = scene
    namespace = fresh_namespace()
    keys, payload = some_keys(namespace, 12), random_payload(namespace, 12)
    await store(client, namespace, keys, payload, durability=Durability.OBJECT)  # nothing is on its way any more
    found = await client.lookup(namespace, keys)
    pool, storage = members(cluster, "orchestrator"), members(cluster, "storage")
    stub: StorageServiceStub = StorageServiceStub(pool.get(cluster.address(found.ranges[0].node_id)))
    now_ms = int(time.time() * 1000)
    index: OrchestratorServiceStub = OrchestratorServiceStub(storage.get(cluster.address("orchestrator")))
    asked = orchestrator_pb2.GetGenerationsRequest(
        node_id=found.ranges[0].node_id, records=records_to(records(keys, 7, 1))
    )
    (generation,) = (await call(index.GetGenerations, asked, timeout_s=10)).generations
    drop = storage_pb2.DropRequest(chunk_keys=keys.at(7), generations=[generation])
    delete = storage_pb2.DeleteObjectsRequest(chunk_keys=keys.at(7), until_ms=now_ms + 120_000)
    for request in (drop, delete):
        member_permit(PermitSigner(cluster.secret.encode()), request, now_ms)
    await call(stub.Drop, drop, timeout_s=10)
    await call(stub.DeleteObjects, delete, timeout_s=10)
    buffer = client.allocate(payload.nbytes)
    delivery = await client.fetch(found, buffer)
    with pytest.raises(ChunkMissing, match="chunk 7"):
        await delivery.layer(0)
    assert [at for at, mark in enumerate((await delivery.summary()).delivered) if not mark] == [7]
    await delivery.quiesced(10)
    got = buffer.layers(namespace.layout.num_layers, 12, namespace.layout.slice_bytes)
    assert np.array_equal(np.delete(got, 7, axis=1), np.delete(payload, 7, axis=1)) and not got[:, 7].any()
    for _ in range(600):
        if (await client.lookup(namespace, keys)).matched_chunks == 7:
            break
        await asyncio.sleep(0.05)
    again = await client.lookup(namespace, keys)
    assert np.array_equal((await fetch_all(client, again))[0], payload[:, :7])
    assert (await store(client, namespace, keys, payload)).stored_chunks >= 1
    assert (await client.lookup(namespace, keys)).matched_chunks == 12
    await storage.close()
    await pool.close()


async def _raw_fetch(cluster: LocalCluster, found: Lookup, descriptor: common_pb2.Descriptor) -> common_pb2.NodeOutcome:
    """A fetch without the SDK's own checks; the first node's outcome."""
    from quire.wire.channels import stream

    pool = ChannelPool()
    stub: GatewayServiceStub = GatewayServiceStub(pool.get(cluster.gateway_address))
    request = gateway_pb2.FetchRequest(
        lease=found.lease,
        delivery_id=os.urandom(16),
        descriptor=descriptor,
    )
    try:
        outcomes = [event.node async for event in stream(stub.Fetch, request, timeout_s=10) if event.HasField("node")]
    finally:
        await pool.close()
    outcome: common_pb2.NodeOutcome = outcomes[0]
    return outcome
