"""Who gets in and what they get: certificates, tokens, permits, limits, the admin frontend."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from yarl import URL

from quire import PROTOCOL_VERSION
from quire.client import AdminClient, AsyncClient, ImageClient
from quire.model.descriptor import DeliveryOrder, Descriptor
from quire.model.durability import Durability
from quire.model.errors import (
    ImageMissing,
    LeaseForged,
    NodeUnavailable,
    NotAllowed,
    QuireError,
    QuotaExceeded,
    TooManyRequests,
    Unauthenticated,
)
from quire.model.hashing import Namespace
from quire.model.latents import LatentInfo, Normalisation, Vae, decode_record
from quire.model.layout import Dtype, KvLayout
from quire.model.nodes import Node, StorageInfo
from quire.model.policy import ENTRY_BYTES
from quire.model.signed_urls import signed_url
from quire.wire import convert
from quire.wire.channels import ChannelPool, call, stream
from quire.wire.credentials import proof
from quire.wire.tls import MEMBER_NAME, Tls
from quire.wire.v1 import common_pb2, images_pb2, orchestrator_pb2, storage_pb2, trace_pb2
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire.wire.v1.storage_pb2_grpc import StorageServiceStub
from quire.wire.v1.trace_pb2_grpc import TraceServiceStub
from quire_server.access import certs
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from tests import fork_server
from tests.e2e import s3_signing
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store

HTTPS_ADDRESS = f"127.0.0.1:{free_ports(1)[0]}"
LAYOUT = KvLayout(8, 16, 8, 128, Dtype.BF16)
CHUNKS = 16  # 8 MiB
RATE = 16_000_000

_Storage: type[StorageServiceStub] = StorageServiceStub


@dataclass(frozen=True)
class Tenant:
    token: str
    salt: bytes

    def namespace(self) -> Namespace:
        return replace(fresh_namespace(LAYOUT), tenant_salt=self.salt)


@dataclass(frozen=True)
class Guarded:
    cluster: LocalCluster
    public: Tls
    members: Tls

    def shown_by(self, service: str) -> Tls:
        """As one of its services speaks with the others."""
        pair = self.cluster.folder / "certs" / service
        return Tls(pair / "ca.crt", pair / "tls.crt", pair / "tls.key", MEMBER_NAME)

    def client(self, token: str) -> AsyncClient:
        return AsyncClient(self.cluster.tls_address, tls=self.public, token=token)

    def tenant(self, name: str, *options: str) -> Tenant:
        """A new key, made as an operator makes it."""
        command = fork_server.quire("keys", "create", name, *options, "--rdma", "--folder", self.cluster.folder)
        made = fork_server.run(command, timeout=60).stdout
        said = dict(line.rsplit(maxsplit=1) for line in made.splitlines())
        return Tenant(said["gRPC token"], bytes.fromhex(said["salt"]))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    settings = {
        "QUIRE_GATEWAY_AUTH": "tokens",
        "QUIRE_GATEWAY_HTTP_TLS_LISTEN": HTTPS_ADDRESS,
        "QUIRE_GATEWAY_TENANT_BYTES_MAX": str(12 << 20),
        "QUIRE_SCHEDULER_LINKS": f"default={RATE}",
        "QUIRE_SCHEDULER_POLICY": "equal",
        "QUIRE_STORAGE_POLICY_CHECK_S": "0.5",
        "QUIRE_TRACE_RECENT": "2000",
    }
    folder = tmp_path_factory.mktemp("guarded")
    with LocalCluster(folder, decoders=1, tls=True, settings=settings, arena_bytes=128 << 20) as cluster:
        made = folder / "certs"
        members = Tls(made / "ca.pem", made / "operator/tls.crt", made / "operator/tls.key", MEMBER_NAME)
        yield Guarded(cluster, Tls(made / "ca.pem"), members)


async def test_a_tenant_with_a_token_stores_and_fetches_over_tls(guarded: Guarded) -> None:
    tenant = guarded.tenant("honest")
    async with guarded.client(tenant.token) as client:
        namespace = tenant.namespace()
        keys, payload = some_keys(namespace, CHUNKS), random_payload(namespace, CHUNKS)
        await store(client, namespace, keys, payload)
        got, _ = await fetch_all(client, await client.lookup(namespace, keys))
        assert np.array_equal(got, payload)


async def test_callers_without_credentials_are_refused(guarded: Guarded) -> None:
    """No token, half a token, a key that does not exist, a wrong secret, a member's name with a wrong proof."""
    name = guarded.tenant("another").token.split(":")[0]
    for token in ("", "x", "QKNOBODY:secret", f"{name}:{'A' * 40}", f"{name}:", "member:" + "0" * 64):
        async with guarded.client(token) as client:
            with pytest.raises(Unauthenticated):
                await client.status()


def test_images_over_http_want_the_same_token(guarded: Guarded) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{guarded.cluster.http_address}/v1/images", timeout=10)
    assert caught.value.code == 401
    assert json.load(caught.value)["code"] == "Unauthenticated"
    request = urllib.request.Request(
        f"http://{guarded.cluster.http_address}/v1/images",
        headers={"Authorization": f"Bearer {guarded.tenant('another').token}"},
    )
    assert json.load(urllib.request.urlopen(request, timeout=10)) == {"images": [], "next": None}


async def test_images_are_their_tenants_own(guarded: Guarded) -> None:
    """Under one id each has its own; no tenant sees, replaces or deletes another's."""
    info = LatentInfo((4, 8, 8), "float16", Vae("v"), 64, 64, Normalisation())
    values = [np.full((4, 8, 8), number, dtype=np.float16) for number in range(2)]
    one, two = guarded.tenant("one"), guarded.tenant("two")
    async with guarded.client(one.token) as first, guarded.client(two.token) as second:
        mine, theirs = ImageClient(first), ImageClient(second)
        await mine.put("cat", values[0], info, allow_unknown_vae=True)
        assert [entry.image_id async for entry in theirs.list()] == []
        with pytest.raises(ImageMissing):
            await theirs.head("cat")
        with pytest.raises(ImageMissing):
            await theirs.get_latent("cat")
        assert not await theirs.delete("cat")
        await theirs.put("cat", values[1], info, allow_unknown_vae=True)
        for images, expected in ((mine, values[0]), (theirs, values[1])):
            assert np.array_equal((await images.get_latent("cat"))[0], expected)
            assert (await images.head("cat")).latent_sha256 == hashlib.sha256(expected.tobytes()).digest()
            assert [entry.image_id async for entry in images.list()] == ["cat"]
        await mine.put("dog", values[0], info, allow_unknown_vae=True)
        ask = partial(call, timeout_s=5)  # what only a gateway may say: whose they are
        listed = await ask(second.gateway.ListImages, images_pb2.ListImagesRequest(tenant="one"))
        assert [entry.image_id for entry in listed.entries] == ["cat"]
        with pytest.raises(QuireError):
            await ask(second.gateway.HeadImage, images_pb2.HeadImageRequest(image_id="dog", tenant="one"))
        gone = await ask(second.gateway.DeleteImage, images_pb2.DeleteImageRequest(image_id="dog", tenant="one"))
        assert not gone.deleted
        url, mark = f"http://{guarded.cluster.http_address}", {"Authorization": f"Bearer {two.token}"}
        async with aiohttp.ClientSession(url, headers=mark) as http:
            async with http.get("/v1/latents/cat") as answer:
                assert "private" in answer.headers["Cache-Control"], (
                    "one URL, two tenants' images: no shared cache keeps it"
                )
            async with http.get("/v1/images") as answer:
                assert "private" in answer.headers["Cache-Control"]
                assert [each["id"] for each in (await answer.json())["images"]] == ["cat"]
            async with http.delete("/v1/images/cat") as answer:
                assert answer.status == 204
        with pytest.raises(ImageMissing):
            await theirs.head("cat")
        assert np.array_equal((await mine.get_latent("cat"))[0], values[0])


async def test_a_signed_url_reads_what_it_names_until_its_time(guarded: Guarded) -> None:
    """Without a token; not another image, not longer, not after its key was rotated, and nothing but reading."""
    info = LatentInfo((4, 8, 8), "float16", Vae("v"), 64, 64)
    tenants = [guarded.tenant("site"), guarded.tenant("other site")]
    for number, tenant in enumerate(tenants):
        async with guarded.client(tenant.token) as client:
            values = np.full((4, 8, 8), number, dtype=np.float16)
            await ImageClient(client).put("a b/猫", values, info, allow_unknown_vae=True)
    (key, secret), (other_key, other_secret) = (tenant.token.split(":") for tenant in tenants)
    path, soon_s = "/v1/latents/a%20b/%E7%8C%AB", time.time() + 600
    mine = signed_url(path, key=key, secret=secret, expires_s=soon_s)
    theirs = signed_url(path, key=other_key, secret=other_secret, expires_s=soon_s)
    refused = {
        path: 401,
        mine.replace(key, other_key): 403,
        mine.replace("/a%20b", "/a%20c"): 403,
        mine.replace("expires=", "expires=1"): 403,
        mine + "&w=1": 403,
        mine.partition("&signature")[0]: 400,
        signed_url(path, key=key, secret=secret, expires_s=time.time() - 1): 403,
        signed_url(path, key=key, secret=other_secret, expires_s=soon_s): 403,
        signed_url("/v1/images", key=key, secret=secret, expires_s=soon_s): 400,
    }
    async with aiohttp.ClientSession(f"http://{guarded.cluster.http_address}") as http:
        got = []
        for url in (mine, theirs):
            async with http.get(URL(url, encoded=True)) as answer:
                assert answer.status == 200, await answer.text()
                assert "private" not in answer.headers["Cache-Control"], "one URL is one tenant's image"
                got.append(decode_record(await answer.read())[0][0, 0, 0])
        assert got == [0.0, 1.0]
        for url, status in refused.items():
            async with http.get(URL(url, encoded=True)) as answer:
                assert answer.status == status, (url, await answer.text())
        for method in ("PUT", "DELETE"):
            async with http.request(method, URL(mine.replace("latents", "images"), encoded=True)) as answer:
                assert answer.status == 401
        command = fork_server.quire("keys", "rotate", key, "--folder", guarded.cluster.folder)
        assert (await asyncio.to_thread(fork_server.run, command, timeout=60)).returncode == 0
        async with asyncio.timeout(20):  # a gateway remembers a key for two seconds
            while True:
                async with http.get(URL(mine, encoded=True)) as answer:
                    if answer.status == 403:
                        break
                await asyncio.sleep(0.2)


async def test_members_speak_with_members_only(guarded: Guarded) -> None:
    """A storage node, the orchestrator and the gateway's inner frontend refuse who has no certificate of theirs."""
    for name in ("storage-0", "orchestrator", "gateway", "scheduler"):
        address = guarded.cluster.address(name)
        for tls in (None, Tls(guarded.public.ca, server_name=MEMBER_NAME)):
            async with AsyncClient(address, tls=tls, token="any", timeout_s=20) as client:
                with pytest.raises(NodeUnavailable):
                    await client.status()


async def test_a_certificate_is_of_one_service(guarded: Guarded) -> None:
    """It opens what that service needs, and nothing joins as another one."""
    address = guarded.cluster.address("storage-0")
    for holder, refused in (("operator", NotAllowed), ("scheduler", NotAllowed), ("storage", LeaseForged)):
        pool = ChannelPool(guarded.shown_by(holder))
        stub: StorageServiceStub = StorageServiceStub(pool.get(address))
        with pytest.raises(refused):
            await call(stub.Describe, storage_pb2.DescribeRequest(chunk_keys=bytes(32)), timeout_s=10)
        await pool.close()
    pool = ChannelPool(guarded.shown_by("decoder"))
    orchestrator: OrchestratorServiceStub = OrchestratorServiceStub(pool.get(guarded.cluster.address("orchestrator")))
    node = Node(node_id="storage-9", about=StorageInfo(), protocol_version=PROTOCOL_VERSION)
    request = orchestrator_pb2.HeartbeatRequest(
        node=convert.node_to(node), proof=proof("storage-9", "", guarded.cluster.secret.encode())
    )
    with pytest.raises(NotAllowed, match="not of a storage"):
        await call(orchestrator.Heartbeat, request, timeout_s=10)
    await pool.close()
    with pytest.raises(NotAllowed):
        async with AdminClient(
            guarded.cluster.admin_address, guarded.cluster.secret, tls=guarded.shown_by("storage")
        ) as admin:
            await admin.policies()


def test_images_over_https(guarded: Guarded) -> None:
    """The same bearer tokens, the same certificate as gRPC over TLS; it is replaced without a restart."""
    assert guarded.public.ca is not None
    context = ssl.create_default_context(cafile=str(guarded.public.ca))
    url = f"https://{HTTPS_ADDRESS}/v1/images"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=10, context=context)
    assert caught.value.code == 401
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {guarded.tenant('another').token}"})
    assert json.load(urllib.request.urlopen(request, timeout=10, context=context)) == {"images": [], "next": None}
    host, _, port = HTTPS_ADDRESS.rpartition(":")
    before = ssl.get_server_certificate((host, int(port)), timeout=10)
    certs.make(guarded.cluster.folder / "certs", [], days=30)
    deadline = time.monotonic() + 20
    while ssl.get_server_certificate((host, int(port)), timeout=10) == before:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_command_line_works_by_what_certs_prints(guarded: Guarded) -> None:
    """`quire tenant` at the admin frontend, `quire status` at the clients', under mutual TLS."""
    printed = fork_server.run(fork_server.quire("certs", guarded.cluster.folder / "certs"), timeout=60).stdout
    said = dict(line.split("=", 1) for line in printed.splitlines() if line.startswith("QUIRE_CLIENT_"))
    assert said.keys() == {"QUIRE_CLIENT_CA", "QUIRE_CLIENT_CERT", "QUIRE_CLIENT_KEY"}
    environment = {**os.environ, **said, "QUIRE_CLUSTER_SECRET": guarded.cluster.secret}
    command = fork_server.quire("tenant", "ls", "--admin", guarded.cluster.admin_address)
    listed = fork_server.run(command, env=environment, timeout=60)
    assert listed.returncode == 0 and "weight" in listed.stdout, listed.stderr


async def test_an_operator_sees_spans_of_every_member(guarded: Guarded) -> None:
    """Though the scheduler answers storage nodes alone; a node's certificate without the cluster's secret is no key."""
    namespace = guarded.tenant("traced").namespace()
    async with guarded.client(guarded.tenant("traced").token) as client:
        await store(client, namespace, some_keys(namespace, 2), random_payload(namespace, 2))
        await fetch_all(client, await client.lookup(namespace, some_keys(namespace, 2)))
    secret, admin = guarded.cluster.secret, guarded.cluster.admin_address
    async with AdminClient(admin, secret, tls=guarded.members) as operator:
        told = [each async for each in operator.spans()]
    assert not [each for each in told if each.error]
    orchestrator = f"orchestrator at {guarded.cluster.address('orchestrator')}"
    assert {each.member for each in told} == {orchestrator, "gateway-0", "scheduler", "storage-0"}
    assert {json.loads(span)["service"] for each in told for span in each.spans} >= {"gateway", "scheduler", "storage"}
    pool = ChannelPool(guarded.shown_by("gateway"))
    stub: TraceServiceStub = TraceServiceStub(pool.get(guarded.cluster.address("scheduler")))
    with pytest.raises(Unauthenticated):
        await anext(stream(stub.ListSpans, trace_pb2.ListSpansRequest(), timeout_s=10))
    await pool.close()


async def test_a_stranger_to_the_authority_is_not_believed(guarded: Guarded, tmp_path: Path) -> None:
    other = certs.make(tmp_path, [], days=1)
    async with AsyncClient(guarded.cluster.tls_address, tls=Tls(other.ca), token="x", timeout_s=20) as client:
        with pytest.raises(NodeUnavailable):
            await client.status()


async def test_what_a_key_may_not_do(guarded: Guarded) -> None:
    """Read-only keys store nothing; a salt is its tenant's; a lease is its tenant's."""
    honest, curious, reader = guarded.tenant("one"), guarded.tenant("two"), guarded.tenant("one", "--read-only")
    assert honest.salt == reader.salt != curious.salt
    namespace = honest.namespace()
    keys, payload = some_keys(namespace, 2), random_payload(namespace, 2)
    async with guarded.client(honest.token) as client:
        await store(client, namespace, keys, payload)
        found = await client.lookup(namespace, keys)
    async with guarded.client(reader.token) as client:
        assert np.array_equal((await fetch_all(client, await client.lookup(namespace, keys)))[0], payload)
        with pytest.raises(NotAllowed):
            await store(client, namespace, keys, payload)
        with pytest.raises(NotAllowed):
            await client.evict(namespace, keys)
    async with guarded.client(curious.token) as client:
        with pytest.raises(NotAllowed, match="salt"):
            await client.lookup(namespace, keys)
        buffer = client.allocate(payload.nbytes)
        delivery = await client.fetch(found, buffer)
        with pytest.raises(NotAllowed, match="lease"):
            await delivery.summary()
        with pytest.raises(NotAllowed):
            await client.release(found)


async def test_a_storage_node_does_nothing_that_no_member_has_signed(guarded: Guarded) -> None:
    """A caller with a member's certificate and a good lease, but no permit, or another transfer's."""
    tenant = guarded.tenant("honest")
    async with guarded.client(tenant.token) as client:
        namespace = tenant.namespace()
        keys, payload = some_keys(namespace, 2), random_payload(namespace, 2)
        await store(client, namespace, keys, payload)
        found = await client.lookup(namespace, keys)
        buffer = client.allocate(payload.nbytes)
        pools = {role: ChannelPool(guarded.shown_by(role)) for role in ("gateway", "orchestrator", "storage")}
        address, layout = guarded.cluster.address(found.ranges[0].node_id), namespace.layout
        stubs = {each: _Storage(pool.get(address)) for each, pool in pools.items()}
        sized = layout.num_layers, layout.chunk_tokens, layout.slice_bytes
        descriptor = Descriptor(found.keys, *sized, DeliveryOrder.AUTO, buffer.target())
        for permit in (b"", os.urandom(48)):
            request = storage_pb2.DeliverRequest(
                lease=found.lease,
                delivery_id=os.urandom(16),
                descriptor=convert.descriptor_to(descriptor),
                ranges=convert.ranges_to(found.ranges),
                permit=permit,
            )
            with pytest.raises(LeaseForged, match="permit"):
                async for _ in stream(stubs["gateway"].Deliver, request, timeout_s=10):
                    pass
        key, level = found.keys.packed, common_pb2.DURABILITY_LOCAL
        for method, unsigned in (
            (stubs["orchestrator"].Drop, storage_pb2.DropRequest(chunk_keys=found.keys.at(0), generations=[0])),
            (stubs["orchestrator"].DeleteObjects, storage_pb2.DeleteObjectsRequest(chunk_keys=key, until_ms=2**62)),
            (stubs["orchestrator"].Raise, storage_pb2.RaiseRequest(chunk_keys=key, durability=level)),
            (stubs["storage"].Describe, storage_pb2.DescribeRequest(chunk_keys=key)),
            (stubs["gateway"].Prefetch, storage_pb2.PrefetchChunksRequest(chunk_keys=key)),
            (stubs["storage"].Replicate, storage_pb2.ReplicateRequest(chunk_keys=key)),
        ):
            with pytest.raises(LeaseForged, match="permit"):
                await call(method, unsigned, timeout_s=10)
        await asyncio.gather(*(pool.close() for pool in pools.values()))
        assert (await client.lookup(namespace, keys)).matched_chunks == len(keys), "nothing was dropped"
        assert buffer.view is not None and not buffer.view.any(), "nothing was written"


async def test_certificates_change_without_a_restart(guarded: Guarded) -> None:
    """New ones are shown to who connects from then on, members among themselves use them, and no request fails."""
    host, _, port = guarded.cluster.tls_address.rpartition(":")

    def shown() -> str:
        return ssl.get_server_certificate((host, int(port)), timeout=10)

    tenant = guarded.tenant("honest")
    before = await asyncio.to_thread(shown)
    async with guarded.client(tenant.token) as client:
        namespace = tenant.namespace()
        keys, payload = some_keys(namespace, 2), random_payload(namespace, 2)
        await store(client, namespace, keys, payload)
        certs.make(guarded.cluster.folder / "certs", [], days=30)
        assert await asyncio.to_thread(shown) != before
        for _ in range(3):
            assert np.array_equal((await fetch_all(client, await client.lookup(namespace, keys)))[0], payload)
    async with guarded.client(tenant.token) as client:
        assert np.array_equal((await fetch_all(client, await client.lookup(namespace, keys)))[0], payload)


async def test_a_tenant_over_its_limit_is_told_when_to_come_again(guarded: Guarded) -> None:
    """The second delivery at the same time is turned away at once; another tenant's is not; later it goes."""
    greedy, modest = guarded.tenant("greedy"), guarded.tenant("modest")
    async with guarded.client(greedy.token) as client, guarded.client(modest.token) as other:
        namespace, theirs = greedy.namespace(), modest.namespace()
        keys, payload = some_keys(namespace, CHUNKS), random_payload(namespace, CHUNKS)
        await store(client, namespace, keys, payload, durability=Durability.MEMORY)
        await store(other, theirs, some_keys(theirs, 1), random_payload(theirs, 1))
        found = await client.lookup(namespace, keys)
        buffer, retry_after_s = client.allocate(payload.nbytes), 0.0
        while not retry_after_s:  # a test that is held up may come when the first is over
            delivery = await client.fetch(found, buffer)
            await delivery.layer(0)
            try:
                await (await client.fetch(found, client.allocate(payload.nbytes))).summary()
            except TooManyRequests as error:
                retry_after_s = error.retry_after_s
            got, _ = await fetch_all(other, await other.lookup(theirs, some_keys(theirs, 1)))
            assert np.array_equal(got, random_payload(theirs, 1))
            await delivery.summary()
            await delivery.quiesced(10)
        assert (await fetch_all(client, found))[1].usable_chunks == CHUNKS


async def test_what_a_tenant_has_stored_is_limited(guarded: Guarded) -> None:
    """Over S3, images and two namespaces: objects and images beyond the limit are refused, chunks go, the coldest
    first, and other tenants do not notice.
    """
    tenant, other = guarded.tenant("hoarder"), guarded.tenant("neighbour")
    (name, secret_key), url = tenant.token.split(":"), f"http://{guarded.cluster.s3_address}/hoard"
    spaces = [tenant.namespace(), tenant.namespace(), other.namespace()]
    keys, key = [some_keys(space, CHUNKS) for space in spaces], (name, secret_key)
    size = CHUNKS * LAYOUT.chunk_bytes
    address, secret = guarded.cluster.admin_address, guarded.cluster.secret
    async with (
        guarded.client(tenant.token) as client,
        guarded.client(other.token) as neighbour,
        AdminClient(address, secret, tls=guarded.members) as operator,
    ):
        for at, each in enumerate((client, client, neighbour)):
            await store(each, spaces[at], keys[at], random_payload(spaces[at], CHUNKS))
        assert (await s3_signing.request("PUT", url, key))[0] == 200
        assert (await s3_signing.request("PUT", f"{url}/kept", key, body=bytes(size // 4)))[0] == 200
        await operator.set_tenant(name="hoarder", stored_bytes_max=size)

        async def matched(at: int, each: AsyncClient) -> int:
            return (await each.lookup(spaces[at], keys[at], lease_ttl_ms=0)).matched_chunks

        async with asyncio.timeout(30):
            while await matched(0, client) + await matched(1, client) > 3 * CHUNKS // 4:
                await asyncio.sleep(0.1)
        assert await matched(1, client) > await matched(0, client), "the coldest went first"
        (state,) = [tenant for tenant in (await operator.policies()).tenants if tenant.policy.stored_bytes_max]
        assert (state.kept_bytes, len(state.namespaces)) == (size // 4 + 2 * ENTRY_BYTES, 2), "a bucket and an object"
        answer = await s3_signing.answered(403, "PUT", f"{url}/more", key, body=bytes(size))
        assert b"<Code>QuotaExceeded</Code>" in answer
        (state,) = [tenant for tenant in (await operator.policies()).tenants if tenant.policy.stored_bytes_max]
        room = state.kept_bytes + 3 * size // 4 + ENTRY_BYTES
        await operator.set_tenant(name="hoarder", stored_bytes_max=room)
        await s3_signing.answered(200, "PUT", f"{url}/kept2", key, body=bytes(3 * size // 4))
        info = LatentInfo((4, 8, 8), "float16", Vae("v"), 64, 64, Normalisation())
        with pytest.raises(QuotaExceeded):
            await ImageClient(client).put("cat", np.zeros((4, 8, 8), np.float16), info, allow_unknown_vae=True)
        assert await matched(2, neighbour) == CHUNKS
        await operator.set_tenant(name="hoarder", stored_bytes_max=0)


async def test_the_admin_frontend_is_the_operators(guarded: Guarded) -> None:
    """It opens for the cluster's secret; the public one does not know its requests."""
    address = guarded.cluster.admin_address
    async with AdminClient(address, guarded.cluster.secret, tls=guarded.members) as operator:
        await operator.set_tenant(b"some tenant's salt", weight=2.0)
    async with AdminClient(address, "another secret", tls=guarded.members) as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.set_tenant(b"some tenant's salt", weight=100.0)
    async with AdminClient(guarded.cluster.address("gateway"), guarded.cluster.secret, tls=guarded.members) as lost:
        with pytest.raises(QuireError, match=r"(?i)unimplemented|not found"):
            await lost.set_tenant(b"some tenant's salt", weight=2.0)


async def test_a_secret_is_in_no_log(guarded: Guarded) -> None:
    async with guarded.client(token := guarded.tenant("discreet").token) as client:
        await client.status()
    logs = "".join(file.read_text() for file in (guarded.cluster.folder / "logs").glob("*.log"))
    assert '"serves"' in logs and guarded.cluster.secret not in logs and token.partition(":")[2] not in logs
