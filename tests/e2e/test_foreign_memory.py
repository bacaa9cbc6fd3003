"""A tenant names memory that is not its own, as source and as target, at every method that takes memory."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio

from quire.client import Buffer
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import AddressUnproven
from quire.wire import convert
from quire.wire.channels import call, stream
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1 import images_pb2
from quire_tools.local import LocalCluster
from tests.e2e.helpers import LAYOUT, fetch_all, random_payload, some_keys, store
from tests.e2e.s3_signing import request
from tests.e2e.tenants import TOKENS, Tenant, two_tenants

CHUNKS = 4
METHODS = ("Fetch", "Retrieve", "Store", "PutLatent", "PutPicture", "GetLatent", "GetImage")


@dataclass(frozen=True)
class World:
    cluster: LocalCluster
    alice: Tenant
    mallory: Tenant
    buffer: Buffer
    """Mallory's own."""

    async def targets(self) -> dict[str, RdmaTarget]:
        """Memory that is not Mallory's, with whatever proof Mallory may have got hold of."""
        own, hers = self.buffer.target(), self.alice.client.transport
        nodes = [node.worker_address for node in await self.mallory.client.status() if node.worker_address]
        return {
            "a storage node's": replace(own, worker_address=nodes[0]),
            "another tenant's": replace(own, worker_address=hers.address),
            "another tenant's, by her own proof": replace(own, worker_address=hers.address, proof=hers.proof),
            "not proved": replace(own, proof=b""),
            "proved by a forgery": replace(own, proof=own.proof[:-1] + bytes([own.proof[-1] ^ 1])),
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("memory"), settings=TOKENS, arena_bytes=96 << 20) as running:
        yield running


@pytest_asyncio.fixture
async def world(cluster: LocalCluster) -> AsyncIterator[World]:
    async with two_tenants(cluster, shared_memory=False) as (alice, mallory):
        for tenant in (alice, mallory):
            keys, payload = some_keys(tenant.namespace, CHUNKS), random_payload(tenant.namespace, CHUNKS)
            await store(tenant.client, tenant.namespace, keys, payload)
        yield World(cluster, alice, mallory, mallory.client.allocate(LAYOUT.payload_bytes(CHUNKS)))


async def _ask(world: World, method: str, target: RdmaTarget) -> Any:
    """A request with that memory, which is right otherwise."""
    mallory = world.mallory
    keys, named = some_keys(mallory.namespace, CHUNKS), convert.namespace_to(mallory.namespace)
    sized = LAYOUT.num_layers, LAYOUT.chunk_tokens, LAYOUT.slice_bytes
    descriptor = convert.descriptor_to(Descriptor(keys, *sized, DeliveryOrder.AUTO, target))
    lookup = pb.LookupRequest(namespace=named, chunk_keys=keys.packed, lease_ttl_ms=10_000)
    there, transfer_id, gateway = convert.target_to(target), os.urandom(16), mallory.client.gateway
    if method == "Fetch":
        found = await call(gateway.Lookup, lookup, timeout_s=20)
        assert found.matched_chunks == CHUNKS
        asked: Any = pb.FetchRequest(lease=found.lease, delivery_id=transfer_id, descriptor=descriptor)
    elif method == "Retrieve":
        asked = pb.RetrieveRequest(lookup=lookup, delivery_id=transfer_id, descriptor=descriptor)
    elif method == "Store":
        asked = pb.StoreRequest(
            namespace=named,
            chunk_keys=some_keys(replace(mallory.namespace, adapter="other"), CHUNKS).packed,
            store_id=transfer_id,
            source=there,
            durability=convert.durability_to(Durability.MEMORY),
            on_existing=convert.on_existing_to(OnExisting.SKIP),
            source_complete=True,
        )
    elif method == "PutLatent":
        level = convert.durability_to(Durability.MEMORY)
        asked = images_pb2.PutLatentRequest(
            image_id="cat", source=there, record_bytes=64, durability=level, allow_unknown_vae=True
        )
    elif method == "PutPicture":
        asked = images_pb2.PutPictureRequest(image_id="cat", source=there, picture_bytes=64)
    elif method == "GetLatent":
        asked = images_pb2.GetLatentRequest(image_id="cat", target=there)
    else:
        asked = images_pb2.GetImageRequest(image_id="cat", target=there)
        asked.rendering.format = "png"
    ask = getattr(gateway, method)
    if method in ("Fetch", "Retrieve", "Store"):
        return [event async for event in stream(ask, asked, timeout_s=20)]
    return await call(ask, asked, timeout_s=20)


async def test_the_methods_are_all_that_take_memory() -> None:
    """A new one fails here until it is tried below."""
    taking = set()
    for method in pb.DESCRIPTOR.services_by_name["GatewayService"].methods:
        fields = {each.message_type.full_name for each in method.input_type.fields if each.message_type is not None}
        if fields & {"quire.v1.RdmaTarget", "quire.v1.Descriptor"}:
            taking.add(method.name)
    assert taking == {*METHODS, "ProveAddress"}


@pytest.mark.parametrize("method", METHODS)
async def test_memory_of_others_is_refused(world: World, method: str) -> None:
    for whose, target in (await world.targets()).items():
        with pytest.raises(AddressUnproven):
            await _ask(world, method, target)
            pytest.fail(f"{method}: {whose}")


async def test_ones_own_memory_is_taken(world: World) -> None:
    """Or the test above tests nothing."""
    target = world.buffer.target()
    assert target.proof
    for method in ("Retrieve", "Store"):
        assert (await _ask(world, method, target))[-1]


@pytest.mark.parametrize("where", ["one", "many"])
async def test_memory_of_others_is_refused_over_s3(world: World, where: str) -> None:
    mallory, url = world.mallory, f"http://{world.cluster.s3_address}"
    encoded = base64.urlsafe_b64encode(mallory.namespace.to_json().encode()).decode()
    named = {"x-quire-namespace": encoded}
    keys, sized = some_keys(mallory.namespace, CHUNKS), (LAYOUT.num_layers, LAYOUT.chunk_tokens, LAYOUT.slice_bytes)
    assert (await request("PUT", f"{url}/mine", mallory.s3_key))[0] in (200, 409)
    assert (await request("PUT", f"{url}/mine/a", mallory.s3_key, body=b"bytes"))[0] == 200
    chunk = f"quire-kv/{mallory.namespace.tag.hex()}/{keys.at(0).hex()}"
    paths = ["quire-kv"] if where == "many" else [chunk, "mine/a"]

    async def ask(method: str, path: str, target: RdmaTarget) -> tuple[int, bytes]:
        if where == "many":
            described = Descriptor(keys, *sized, DeliveryOrder.AUTO, target).to_header()
            headers = named | {"x-quire-descriptor": described}
        else:
            headers = (named if "kv" in path else {}) | {"x-amz-rdma-token": target.to_token()}
        status, _, body = await request(method, f"{url}/{path}", mallory.s3_key, headers)
        return status, body

    for path in paths:
        for method in ("GET", "PUT"):
            for whose, target in (await world.targets()).items():
                status, why = await ask(method, path, target)
                assert status == 403 and b"AccessDenied" in why, (method, path, whose, why)
            status, why = await ask(method, path, world.buffer.target())
            assert status == 200, (method, path, why)


async def test_a_client_proves_its_address_once(cluster: LocalCluster, world: World) -> None:
    """And again in time: an old proof is replaced before it is over."""
    client = world.mallory.client
    before = client.transport.proof
    await client.reach()
    assert client.transport.proof == before
    client._own_address._good_until_s = client._own_address._renew_s = 0.0
    found = await client.lookup(world.mallory.namespace, some_keys(world.mallory.namespace, CHUNKS))
    fetched, _ = await fetch_all(client, found)
    assert client.transport.proof != before and fetched.any()
    await client.release(found)
