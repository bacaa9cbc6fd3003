"""A tenant that knows another tenant's keys, ids and leases tries them at every method: it reaches nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import aiohttp
import grpc.aio
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from quire.client import AdminClient, Lookup
from quire.model.assignment import Engine
from quire.model.chunk_object import read_chunk_object, with_record, write_chunk_object
from quire.model.durability import Durability
from quire.model.errors import AddressUnproven, ImageMissing, InvalidRequest, LeaseForged, NoDecoder, NotAllowed
from quire.model.images import ImageEntry
from quire.model.keys import ChunkKeys
from quire.model.latents import LatentInfo, Normalisation, Vae, encode_record
from quire.model.records import ChunkRecord
from quire.wire import convert
from quire.wire.channels import call
from quire.wire.v1 import gateway_pb2
from quire.wire.v1.gateway_pb2_grpc import AdminServiceStub
from quire_server.redis import AccessKeys, connect
from quire_server.redis.keys.access import AccessGrant, AccessLevel
from quire_tools.local import LocalCluster
from tests.e2e.helpers import LAYOUT, fetch_all, random_payload, some_keys, store
from tests.e2e.s3_signing import request
from tests.e2e.tenants import TOKENS, Tenant, two_tenants

CHUNKS = 6
SERVICES = gateway_pb2.DESCRIPTOR.services_by_name


@dataclass(frozen=True)
class World:
    """Alice has stored a prefix, in the object tier too, and an image. `known`: all that Mallory knows of them."""

    cluster: LocalCluster
    alice: Tenant
    mallory: Tenant
    keys: ChunkKeys
    payload: npt.NDArray[np.uint8]
    found: Lookup

    async def is_unharmed(self) -> bool:
        """Whether Alice has what she had."""
        found = await self.alice.client.lookup(self.alice.namespace, self.keys)
        fetched, _ = await fetch_all(self.alice.client, found)
        await self.alice.client.release(found)
        return found.matched_chunks == CHUNKS and np.array_equal(fetched, self.payload)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("foreign")
    settings = TOKENS | {"QUIRE_GATEWAY_AUDIT_LOG": str(folder / "audit")}
    with LocalCluster(folder, settings=settings, arena_bytes=96 << 20, drive_bytes=128 << 20) as made:
        yield made


@pytest_asyncio.fixture
async def world(cluster: LocalCluster) -> AsyncIterator[World]:
    async with two_tenants(cluster, adapters=("", "forged")) as (alice, mallory):
        chunks, payload = some_keys(alice.namespace, CHUNKS), random_payload(alice.namespace, CHUNKS)
        await store(alice.client, alice.namespace, chunks, payload, durability=Durability.OBJECT)
        await alice.images.put_record("cat", _record(), allow_unknown_vae=True)
        found = await alice.client.lookup(alice.namespace, chunks)
        yield World(cluster, alice, mallory, chunks, payload, found)
        await alice.client.release(found)


def _record() -> bytes:
    values = np.random.default_rng(1).normal(size=(4, 16, 16)).astype(np.float16)
    return encode_record(values, LatentInfo(values.shape, "float16", Vae("v"), 128, 128, Normalisation()))


async def _lookup(world: World) -> None:
    mallory = world.mallory
    for unchained in (False, True):
        ttl_ms = 0 if unchained else 1000
        found = await mallory.client.lookup(mallory.namespace, world.keys, lease_ttl_ms=ttl_ms, unchained=unchained)
        assert found.matched_chunks == 0
    with pytest.raises(NotAllowed):
        await mallory.client.lookup(world.alice.namespace, world.keys)
    for tenant, is_found in ((world.alice, True), (mallory, False)):
        named, sample = convert.namespace_to(tenant.namespace), world.keys.sample(9)
        message = gateway_pb2.KeySample(count=CHUNKS, whole_bucket=9, keys=sample.packed)
        sampled = gateway_pb2.LookupRequest(namespace=named, sample=message)
        answer = await call(tenant.client.gateway.Lookup, sampled, timeout_s=20)
        assert (answer.matched_chunks > 0 or answer.HasField("wanted_bucket")) == is_found


async def _fetch(world: World) -> None:
    """By her lease, and by a lease on chunks that are equally named."""
    with pytest.raises(NotAllowed):
        await fetch_all(world.mallory.client, world.found)
    mallory, theirs = world.mallory, random_payload(world.mallory.namespace, CHUNKS, 2)
    own = ChunkKeys(world.keys.packed[::-1])
    await store(mallory.client, mallory.namespace, own, theirs)
    found = await mallory.client.lookup(mallory.namespace, own)
    assert found.matched_chunks == CHUNKS
    with pytest.raises(LeaseForged):
        await fetch_all(mallory.client, replace(found, keys=world.keys))
    await mallory.client.release(found)


async def _retrieve(world: World) -> None:
    mallory = world.mallory
    buffer = mallory.client.allocate(LAYOUT.payload_bytes(CHUNKS))
    assert buffer.view is not None
    buffer.view[:] = 0
    retrieved = await mallory.client.retrieve(mallory.namespace, world.keys, buffer)
    assert retrieved.found.matched_chunks == 0 and not buffer.view.any()
    alice, longer = world.alice, some_keys(world.alice.namespace, CHUNKS + 2)
    source, target = (each.client.allocate(LAYOUT.payload_bytes(CHUNKS + 2)) for each in (alice, mallory))
    storing = await alice.client.store(alice.namespace, longer, CHUNKS, source)
    followed = await mallory.client.retrieve(mallory.namespace, longer, target, follow_s=0.2)
    assert followed.found.matched_chunks == 0, "a store that runs is hers, too"
    await storing.cancel()
    target.close()
    source.close()
    buffer.close()


async def _store(world: World) -> None:
    """Under her keys, other bytes: Mallory's own, which go alone."""
    mallory = world.mallory
    theirs = random_payload(mallory.namespace, CHUNKS, 3)
    stored = await store(mallory.client, mallory.namespace, world.keys, theirs)
    assert stored.stored_chunks == CHUNKS
    found = await mallory.client.lookup(mallory.namespace, world.keys)
    fetched, _ = await fetch_all(mallory.client, found)
    assert np.array_equal(fetched, theirs)
    await mallory.client.release(found)
    assert await mallory.client.evict(mallory.namespace, world.keys) == CHUNKS


async def _evict(world: World) -> None:
    assert await world.mallory.client.evict(world.mallory.namespace, world.keys) == 0


async def _demote(world: World) -> None:
    assert await world.mallory.client.demote(world.mallory.namespace, world.keys) == 0


async def _assign(world: World) -> None:
    """Chunks of another tenant's equal prompt make no engine quicker."""
    engines, tokens = [Engine(name="e", tokens_per_s=1000.0)], 10_000
    hers = await world.alice.client.assign(world.alice.namespace, world.keys, tokens, engines)
    other = await world.mallory.client.assign(world.mallory.namespace, world.keys, tokens, engines)
    assert other.take_chunks == 0 < hers.take_chunks and other.ttft_s[0] > hers.ttft_s[0]


async def _retain(world: World) -> None:
    assert await world.mallory.client.retain(world.mallory.namespace, world.keys, 60.0) == 0


async def _prefetch(world: World) -> None:
    assert await world.mallory.client.prefetch(world.mallory.namespace, world.keys) == 0


async def _release(world: World) -> None:
    with pytest.raises(NotAllowed):
        await world.mallory.client.release(world.found)


async def _head(world: World) -> None:
    with pytest.raises(ImageMissing):
        await world.mallory.images.head("cat")


async def _get_latent(world: World) -> None:
    with pytest.raises(ImageMissing):
        await world.mallory.images.get_record("cat")


async def _get_image(world: World) -> None:
    with pytest.raises(ImageMissing):
        await world.mallory.images.get("cat")


async def _put_latent(world: World) -> None:
    """An image of the same id is another one."""
    await world.mallory.images.put_record("cat", _record(), allow_unknown_vae=True)
    assert await world.mallory.images.delete("cat")


async def _put_picture(world: World) -> None:
    """This cluster has no decoder: nothing is stored."""
    with pytest.raises(NoDecoder):
        await world.mallory.images.put_picture("cat", b"\x89PNG\r\n\x1a\n", weights_sha256=64 * "0")
    assert not await world.mallory.images.delete("cat")


async def _delete_image(world: World) -> None:
    assert not await world.mallory.images.delete("cat")


async def _list_images(world: World) -> None:
    found: list[ImageEntry] = [each async for each in world.mallory.images.list("")]
    assert not found


async def _status(world: World) -> None:
    assert not any(node.tenant_stats or node.running for node in await world.mallory.client.status())


async def _prove_address(world: World) -> None:
    """A storage node's address is refused. At Alice's no answer to the nonce is to be had, which she takes for none."""
    mallory, alice = world.mallory.client, world.alice.client
    buffer = mallory.allocate(64)
    node = next(node for node in await mallory.status() if node.worker_address)
    for address, refused in ((node.worker_address, True), (alice.transport.address, False)):
        target = convert.target_to(replace(buffer.target(), worker_address=address))
        ask = partial(call, mallory.gateway.ProveAddress, timeout_s=20)
        if refused:
            with pytest.raises(AddressUnproven, match="a storage node's own"):
                await ask(gateway_pb2.ProveAddressRequest(target=target))
            continue
        challenge = (await ask(gateway_pb2.ProveAddressRequest(target=target))).challenge
        with pytest.raises(AddressUnproven, match="was not sent"):
            await ask(gateway_pb2.ProveAddressRequest(target=target, challenge=challenge, nonce=bytes(16)))
    buffer.close()


TRIED: Mapping[str, Callable[[World], Awaitable[None]]] = {
    "Lookup": _lookup,
    "Fetch": _fetch,
    "Retrieve": _retrieve,
    "Store": _store,
    "Evict": _evict,
    "Demote": _demote,
    "Assign": _assign,
    "Retain": _retain,
    "Prefetch": _prefetch,
    "Release": _release,
    "HeadImage": _head,
    "GetLatent": _get_latent,
    "GetImage": _get_image,
    "PutLatent": _put_latent,
    "PutPicture": _put_picture,
    "DeleteImage": _delete_image,
    "ListImages": _list_images,
    "Status": _status,
    "ProveAddress": _prove_address,
}
"""By method. A session's requests are answered by the same methods."""


@pytest.mark.parametrize(
    "method", sorted(set(gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].methods_by_name))
)
async def test_a_method_of_clients(world: World, method: str) -> None:
    """A new method fails here until there is a try at it."""
    if method == "Session":
        asked = gateway_pb2.SessionRequest.DESCRIPTOR.oneofs_by_name["request"].fields
        methods = {each.name.title().replace("_", "") for each in asked} - {"Renew", "Cancel", "Close"}
        assert methods <= TRIED.keys()
        return
    await TRIED[method](world)
    assert await world.is_unharmed()
    assert (await world.alice.images.get_record("cat")) == _record()


@pytest.mark.parametrize("method", sorted(SERVICES["AdminService"].methods_by_name))
async def test_a_method_of_operators(world: World, method: str) -> None:
    """Tenants have none of them."""
    name, secret = world.mallory.s3_key
    described = SERVICES["AdminService"].methods_by_name[method]
    sent = getattr(gateway_pb2, described.input_type.name)()
    async with grpc.aio.insecure_channel(world.cluster.admin_address) as channel:
        call: Any = getattr(AdminServiceStub(channel), method)(
            sent, metadata=(("authorization", f"Bearer {name}:{secret}"),), timeout=20
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (anext(aiter(call)) if described.server_streaming else call)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_objects_of_chunks(world: World) -> None:
    """Each has its owner's keys in it; another tenant's are refused, and under one's own namespace not there."""
    alice, mallory, key = world.alice, world.mallory, world.keys.at(CHUNKS - 1).hex()
    url, hers, his = (
        f"http://{world.cluster.s3_address}/quire-kv",
        alice.namespace.tag.hex(),
        mallory.namespace.tag.hex(),
    )
    status, _, whole = await request("GET", f"{url}/{hers}/{key}", alice.s3_key)
    assert status == 200
    last = read_chunk_object(whole)
    assert (last.record.key.hex(), last.record.parent) == (key, world.keys.at(CHUNKS - 2))
    assert np.array_equal(last.payload, world.payload[:, CHUNKS - 1])
    ranged = {"Range": f"bytes={len(whole) - 100}-"}
    assert (await request("GET", f"{url}/{hers}/{key}", alice.s3_key, ranged))[2] == whole[-100:]
    listed: set[str] = set()
    after = ""
    while True:  # page by page
        query = f"list-type=2&max-keys=2&prefix={hers}/" + (f"&start-after={after}" if after else "")
        _, _, page = await request("GET", f"{url}?{query.replace('/', '%2F')}", alice.s3_key)
        names = [each.split(b"<")[0].decode() for each in page.split(b"<Key>")[1:]]
        listed.update(names)
        if b"<IsTruncated>true" not in page:
            break
        after = names[-1]
    assert listed == {f"{hers}/{each.hex()}" for each in world.keys}

    for method, expected in (("GET", 404), ("HEAD", 404), ("PUT", 400), ("DELETE", 204)):
        body = whole if method == "PUT" else b""
        assert (await request(method, f"{url}/{hers}/{key}", mallory.s3_key, body=body))[0] == 403
        assert (await request(method, f"{url}/{his}/{key}", mallory.s3_key, body=body))[0] == expected
    assert (await request("GET", f"{url}?list-type=2&prefix={hers}%2F", mallory.s3_key))[0] == 403
    assert (await request("GET", f"{url}?list-type=2", mallory.s3_key))[0] == 403, "of all namespaces"
    _, _, page = await request("GET", f"{url}?list-type=2&prefix={his}%2F", mallory.s3_key)
    assert hers.encode() not in page

    tag = replace(mallory.namespace, adapter="forged").tag
    root = ChunkRecord(last.record.key, b"", last.record.key, b"", tag)
    forged, his = write_chunk_object(last.payload, with_record(last.header, root)), tag.hex()
    assert (await request("PUT", f"{url}/{his}/{key}", mallory.s3_key, body=forged))[0] == 200
    assert (await request("GET", f"{url}/{his}/{key}", mallory.s3_key))[2] == forged
    assert await world.is_unharmed()
    assert (await request("DELETE", f"{url}/{his}/{key}", mallory.s3_key))[0] == 204
    assert await world.is_unharmed()


async def test_a_chunk_is_stored_again_from_its_object(world: World) -> None:
    """What a tenant has read from `quire-kv` it can store there again, also in another cluster."""
    alice, keys = world.alice, some_keys(world.alice.namespace, CHUNKS)
    url = f"http://{world.cluster.s3_address}/quire-kv/{alice.namespace.tag.hex()}"
    kept = [(await request("GET", f"{url}/{key.hex()}", alice.s3_key))[2] for key in keys]
    await alice.client.release(world.found)
    assert await alice.client.evict(alice.namespace, keys) == CHUNKS
    for key, body in zip(keys, kept, strict=True):
        status, _, why = await request("PUT", f"{url}/{key.hex()}", alice.s3_key, body=body)
        assert status == 200, why
    assert await world.is_unharmed()


async def test_grants_are_of_one_namespace(cluster: LocalCluster) -> None:
    redis = connect(cluster.redis_url)
    keys = AccessKeys(redis, cluster.secret.encode())
    with pytest.raises(InvalidRequest, match="names no namespace"):
        await keys.create("bob", (AccessGrant("quire", "quire-kv", "", AccessLevel.READ),))
    key = await keys.create("bob")
    with pytest.raises(InvalidRequest, match="names no namespace"):
        await keys.grant(key.name, AccessGrant("quire", "quire-kv", "0a", AccessLevel.READ))
    await redis.aclose()


@pytest.mark.timeout(60)
async def test_events_have_the_keys_of_clients(world: World) -> None:
    async with AdminClient(world.cluster.admin_address, world.cluster.secret) as operator:
        watching = operator.watch()
        await anext(watching)
        namespace = world.alice.namespace
        keys = ChunkKeys(some_keys(replace(namespace, adapter="other"), CHUNKS).packed)
        await store(world.alice.client, namespace, keys, world.payload)
        told: list[bytes] = []
        parents: list[bytes] = []
        while len(told) < CHUNKS:
            for event in (await anext(watching)).events:
                if event.namespace == namespace.tag and event.holder != "@object":
                    told += list(event.keys)
                    parents += list(ChunkKeys(event.parents))
        assert told == list(keys) and parents == [bytes(32), *list(keys)[:-1]]
        await watching.aclose()


async def test_images_over_http(world: World) -> None:
    name, secret = world.mallory.s3_key
    base = f"http://{world.cluster.http_address}"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {name}:{secret}"}) as http:
        for method, path, statuses in (
            ("GET", "/v1/images/cat", {404}),
            ("HEAD", "/v1/images/cat", {404}),
            ("DELETE", "/v1/images/cat", {404, 204}),
            ("GET", "/v1/latents/cat", {404}),
        ):
            async with http.request(method, base + path) as answer:
                assert answer.status in statuses, (method, path, answer.status)
        async with http.get(base + "/v1/images") as answer:
            assert "cat" not in json.dumps(await answer.json())
    assert (await world.alice.images.get_record("cat")) == _record()


async def test_what_was_refused_is_in_the_audit_log(world: World, cluster: LocalCluster) -> None:
    """Of every frontend, with the key that was shown; and what an operator has done."""
    with pytest.raises(NotAllowed):
        await world.mallory.client.lookup(world.alice.namespace, world.keys)
    hers = world.alice.namespace.tag.hex()
    assert (await request("GET", f"http://{cluster.s3_address}/quire-kv/{hers}/0", world.mallory.s3_key))[0] == 403
    async with aiohttp.ClientSession() as http, http.get(f"http://{cluster.http_address}/v1/images/cat") as answer:
        assert answer.status == 401
    async with AdminClient(cluster.admin_address, cluster.secret) as operator:
        await operator.set_theta(0)
    lines = [json.loads(line) for line in (cluster.folder / "audit").read_text().splitlines()]
    told = {(each["audit"], each["act"].split(" ")[0].rpartition("/")[2], each["tenant"]) for each in lines}
    assert {
        ("denied", "Lookup", "mallory"),
        ("denied", "S3", "mallory"),
        ("denied", "GET", ""),
        ("act", "SetTheta", ""),
    } <= told
    assert {each["act"].split(" ")[0] for each in lines if each["key"] == world.mallory.s3_key[0]} >= {"S3"}
