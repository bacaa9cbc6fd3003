"""The S3 frontend's other half: KV chunks as objects, and requests whose bytes go by RDMA."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from quire.client import AsyncClient, ImageClient
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.latents import LatentInfo, Vae, encode_record
from quire.model.layout import Dtype, KvLayout
from quire_gateway.s3.reserved import WHOLE_BODIES
from quire_server.redis import AccessKeys, connect
from quire_server.redis.keys.access import AccessGrant, AccessLevel
from quire_tools.local import LocalCluster

from .s3_signing import request

LAYOUT = KvLayout(4, 16, 2, 64, Dtype.FP16)
SPACE = Namespace("s3-test", "1", LAYOUT)
CHUNKS = 12


@dataclass
class Scene:
    cluster: LocalCluster
    url: str
    key: tuple[str, str]
    stranger: tuple[str, str]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder: Path = tmp_path_factory.mktemp("s3rdma")
    with LocalCluster(folder, decoders=1, storage_nodes=2, arena_bytes=64 << 20, drive_bytes=128 << 20) as cluster:

        async def keys() -> list[tuple[str, str]]:
            client = connect(cluster.redis_url)
            made = AccessKeys(client, cluster.secret.encode())
            with pytest.raises(InvalidRequest, match="Quire's own"):
                await made.create("quire")
            grants = (
                AccessGrant("quire", "quire-kv", f"{SPACE.tag.hex()}/", AccessLevel.ADMIN),
                AccessGrant("quire", "quire-latents", "", AccessLevel.ADMIN),
            )
            found = [await made.create("alice", grants, rdma=True), await made.create("mallory", grants)]
            await client.aclose()
            return [(key.name, made.secret(key)) for key in found]

        key, stranger = asyncio.run(keys())
        yield Scene(cluster, f"http://{cluster.s3_address}", key, stranger)


@pytest.fixture
async def client(scene: Scene) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(scene.cluster.gateway_address) as made:
        yield made


def _keys(seed: int) -> ChunkKeys:
    rng = np.random.default_rng(seed)
    return ChunkKeys(rng.bytes(32 * CHUNKS))


def _name(key: bytes) -> str:
    return f"{SPACE.tag.hex()}/{key.hex()}"


def _headers(namespace: Namespace = SPACE) -> dict[str, str]:
    return {"x-quire-namespace": base64.urlsafe_b64encode(namespace.to_json().encode()).decode()}


def _descriptor(keys: ChunkKeys, order: DeliveryOrder, target: object) -> Descriptor:
    return Descriptor(keys, LAYOUT.num_layers, LAYOUT.chunk_tokens, LAYOUT.slice_bytes, order, target)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [DeliveryOrder.CHUNKWISE, DeliveryOrder.LAYERWISE])
async def test_a_prefix_by_descriptor(scene: Scene, client: AsyncClient, order: DeliveryOrder) -> None:
    """Stored out of this process's memory, fetched into it; layers are told in the answer's lines."""
    keys = _keys(order.value)
    source, target = client.allocate(LAYOUT.payload_bytes(CHUNKS)), client.allocate(LAYOUT.payload_bytes(CHUNKS))
    assert source.view is not None and target.view is not None
    source.view[:] = np.random.default_rng(9).integers(0, 256, source.length, dtype=np.uint8)
    there = _descriptor(keys, DeliveryOrder.AUTO, source.target()).to_header()
    status, headers, _ = await request(
        "PUT", f"{scene.url}/quire-kv", scene.key, _headers() | {"x-quire-descriptor": there}
    )
    assert (status, headers["x-amz-rdma-reply"], headers["x-quire-stored"]) == (200, "200", str(CHUNKS))

    here = _descriptor(keys, order, target.target()).to_header()
    for method, extra, body in (("GET", {"x-quire-descriptor": here}, b""), ("POST", {}, here.encode())):
        target.view[:] = 0
        status, headers, raw = await request(method, f"{scene.url}/quire-kv", scene.key, _headers() | extra, body)
        lines = [json.loads(line) for line in raw.splitlines()]
        assert (status, headers["x-amz-rdma-reply"]) == (200, "200")
        assert lines[-1] == {"delivered": CHUNKS, "usable": CHUNKS, "bytes": LAYOUT.payload_bytes(CHUNKS)}
        assert np.array_equal(target.view, source.view)
        if order is DeliveryOrder.LAYERWISE:
            assert [line["layer"] for line in lines if "layer" in line][-1] == LAYOUT.num_layers - 1

    urgency = {"x-quire-descriptor": here, "x-quire-urgency": "compute-window-us=500, first-layer-us=2000, priority=-1"}
    status, _, _ = await request("GET", f"{scene.url}/quire-kv", scene.key, _headers() | urgency)
    assert status == 200
    for text in ("priority", "priority=1.5", "priority=1, priority=2", "deadline=3", "priority=99"):
        urgency["x-quire-urgency"] = text
        status, _, raw = await request("GET", f"{scene.url}/quire-kv", scene.key, _headers() | urgency)
        assert status == 400 and (b"x-quire-urgency" in raw or b"priority" in raw)

    longer = ChunkKeys(keys.packed + b"x" * 32)
    room = client.allocate(LAYOUT.payload_bytes(CHUNKS + 1))
    part = replace(_descriptor(longer, order, room.target()))
    status, headers, raw = await request(
        "GET", f"{scene.url}/quire-kv", scene.key, _headers() | {"x-quire-descriptor": part.to_header()}
    )
    assert (status, headers["x-quire-matched"]) == (206, str(CHUNKS))
    status, _, raw = await request(
        "GET", f"{scene.url}/quire-kv", scene.stranger, _headers() | {"x-quire-descriptor": here}
    )
    assert status == 403 and b"AccessDenied" in raw, "a key that may read, but not name memory"
    foreign = _headers(replace(SPACE, tenant_salt=bytes(16)))
    for method in ("GET", "PUT"):
        asked = foreign | {"x-quire-descriptor": here}
        status, _, raw = await request(method, f"{scene.url}/quire-kv", scene.key, asked)
        assert status == 403 and b"not this tenant" in raw


async def test_one_chunk_directly_and_one_object_staged(scene: Scene, client: AsyncClient) -> None:
    name = _name(_keys(77).at(0))
    source, target = client.allocate(LAYOUT.chunk_bytes), client.allocate(LAYOUT.chunk_bytes)
    assert source.view is not None and target.view is not None
    source.view[:] = np.random.default_rng(3).integers(0, 256, source.length, dtype=np.uint8)
    token = {"x-amz-rdma-token": source.target().to_token()}
    status, headers, raw = await request("PUT", f"{scene.url}/quire-kv/{name}", scene.key, _headers() | token)
    assert (status, headers.get("x-quire-stored")) == (200, "1"), raw
    token = {"x-amz-rdma-token": target.target().to_token()}
    status, headers, _ = await request("GET", f"{scene.url}/quire-kv/{name}", scene.key, _headers() | token)
    assert (status, headers["x-amz-rdma-bytes-transferred"]) == (200, str(LAYOUT.chunk_bytes))
    assert np.array_equal(target.view, source.view)

    assert (await request("PUT", f"{scene.url}/staged", scene.key))[0] == 200
    token = {"x-amz-rdma-token": source.target().to_token()}
    assert (await request("PUT", f"{scene.url}/staged/a", scene.key, token))[0] == 200
    status, _, raw = await request("GET", f"{scene.url}/staged/a", scene.key)
    assert raw == source.view.tobytes()
    target.view[:] = 0
    token = {"x-amz-rdma-token": target.target().to_token(), "Range": "bytes=10-19"}
    status, headers, raw = await request("GET", f"{scene.url}/staged/a", scene.key, token)
    assert (status, raw, headers["x-amz-rdma-reply"]) == (206, b"", "206")
    assert target.view[:10].tobytes() == source.view[10:20].tobytes()


async def test_a_version_by_its_id(scene: Scene, client: AsyncClient) -> None:
    """The current version came whatever version was asked for, and the whole object for a part."""
    target = client.allocate(5)
    assert target.view is not None
    url = f"{scene.url}/versioned"
    assert (await request("PUT", url, scene.key))[0] == 200
    enable = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    assert (await request("PUT", f"{url}?versioning", scene.key, body=enable))[0] == 200
    bodies = (b"first", b"later")
    puts = [await request("PUT", f"{url}/a", scene.key, body=body) for body in bodies]
    ids = [headers["x-amz-version-id"] for _, headers, _ in puts]
    token = {"x-amz-rdma-token": target.target().to_token()}
    for version_id, body in zip(ids, bodies, strict=True):
        status, headers, _ = await request("GET", f"{url}/a?versionId={version_id}", scene.key, token)
        assert (status, headers["x-amz-version-id"], target.view.tobytes()) == (200, version_id, body)
    assert (await request("GET", f"{url}/a?partNumber=1", scene.key, token))[0] == 501


async def test_chunks_and_latents_are_objects(scene: Scene, client: AsyncClient) -> None:
    """What a storage node has put into the object tier is read with plain requests; only what fits its key is taken."""
    keys = _keys(5).run(0, 2)
    source = client.allocate(LAYOUT.payload_bytes(2))
    assert source.view is not None
    source.view[:] = np.random.default_rng(4).integers(0, 256, source.length, dtype=np.uint8)
    session = await client.store(SPACE, keys, 0, source, durability=Durability.OBJECT)
    for layer in range(LAYOUT.num_layers):
        session.layer_ready(layer)
    await session.commit()
    first, second = _name(keys.at(0)), _name(keys.at(1))
    status, _, whole = await request("GET", f"{scene.url}/quire-kv/{first}", scene.key)
    assert status == 200
    layers = source.layers(LAYOUT.num_layers, 2, LAYOUT.slice_bytes)
    assert whole[: LAYOUT.chunk_bytes] == layers[:, 0].tobytes()
    span = {"Range": f"bytes={LAYOUT.slice_bytes}-{2 * LAYOUT.slice_bytes - 1}"}
    assert (await request("GET", f"{scene.url}/quire-kv/{first}", scene.key, span))[2] == layers[1, 0].tobytes()
    query = f"list-type=2&prefix={first[:36].replace('/', '%2F')}"
    _, _, listed = await request("GET", f"{scene.url}/quire-kv?{query}", scene.key)
    assert first.encode() in listed and second.encode() not in listed
    assert (await request("DELETE", f"{scene.url}/quire-kv/{first}", scene.key))[0] == 409, "the second extends it"
    for name in (second, first):
        assert (await request("DELETE", f"{scene.url}/quire-kv/{name}", scene.key))[0] == 204
        assert (await request("GET", f"{scene.url}/quire-kv/{name}", scene.key))[0] == 404
    flipped = bytearray(whole)
    flipped[100] ^= 1
    for name, body in ((second, whole), (first, bytes(flipped)), (first, whole[:-1])):
        assert (await request("PUT", f"{scene.url}/quire-kv/{name}", scene.key, body=body))[0] == 400
    assert (await request("PUT", f"{scene.url}/quire-kv/{first}", scene.key, body=whole))[0] == 200
    found = await client.lookup(SPACE, keys)
    assert found.matched_chunks == 1
    await client.release(found)

    values = np.random.default_rng(1).normal(size=(4, 8, 8)).astype(np.float16)
    record = encode_record(values, LatentInfo((4, 8, 8), "float16", Vae("x"), 32, 32))
    status, _, why = await request("PUT", f"{scene.url}/quire-latents/cat", scene.key, body=record)
    assert (status, b"VAE" in why) == (400, True), "no decoder decodes it"
    archive = {"x-amz-meta-allow-unknown-vae": "1"}
    assert (await request("PUT", f"{scene.url}/quire-latents/cat", scene.key, archive, record))[0] == 200
    assert (await request("GET", f"{scene.url}/quire-latents/cat", scene.key))[2] == record
    assert np.array_equal((await ImageClient(client).get_latent("cat"))[0], values)
    assert (await request("PUT", f"{scene.url}/quire-latents/dog", scene.key, body=record[:-1]))[0] == 400


async def test_latents_go_by_rdma_at_the_same_time(scene: Scene, client: AsyncClient) -> None:
    """More of them than there are turns to hold an object in memory."""
    values = np.random.default_rng(2).normal(size=(4, 8, 8)).astype(np.float16)
    record = encode_record(values, LatentInfo((4, 8, 8), "float16", Vae("x"), 32, 32))
    archive = {"x-amz-meta-allow-unknown-vae": "1"}
    assert (await request("PUT", f"{scene.url}/quire-latents/fox", scene.key, archive, record))[0] == 200
    targets = [client.allocate(len(record)) for _ in range(3 * WHOLE_BODIES)]
    tokens = [{"x-amz-rdma-token": target.target().to_token()} for target in targets]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(
            *(request("GET", f"{scene.url}/quire-latents/fox", scene.key, token) for token in tokens)
        )
    assert [status for status, _, _ in answers] == [200] * len(targets)
    assert all(target.view is not None and target.view.tobytes() == record for target in targets)


async def test_bad_descriptors_are_told(scene: Scene, client: AsyncClient) -> None:
    url, buffer = f"{scene.url}/quire-kv", client.allocate(LAYOUT.payload_bytes(CHUNKS))
    good = _descriptor(_keys(1), DeliveryOrder.AUTO, buffer.target()).to_header()
    other = replace(SPACE, layout=KvLayout(8, 16, 2, 64, Dtype.FP16))
    for headers in (
        {"x-quire-descriptor": "!!!"} | _headers(),
        {"x-quire-descriptor": good[:-8]} | _headers(),
        {"x-quire-descriptor": good},
        {"x-quire-descriptor": good, "x-quire-namespace": "e30="},
        {"x-quire-descriptor": good} | _headers(other),
        {"x-quire-descriptor": good, "x-quire-delivery": "zz"} | _headers(),
    ):
        status, _, raw = await request("GET", url, scene.key, headers)
        assert status in (400, 404), raw
        assert b"<Code>" in raw and b"Traceback" not in raw
    wild = replace(buffer.target(), worker_address=b"\xff" * 200).to_token()
    flipped = bytearray(buffer.target().worker_address)
    flipped[20] ^= 1
    damaged = replace(buffer.target(), worker_address=bytes(flipped)).to_token()
    for token in ("", "ucx1.", "cuobj.AAAA", "ucx1.AAAA", wild, damaged):
        status, _, raw = await request(
            "GET", f"{url}/{_name(bytes(32))}", scene.key, {"x-amz-rdma-token": token} | _headers()
        )
        assert status in (400, 404), raw
    assert (await request("PUT", f"{scene.url}/wild", scene.key))[0] in (200, 409)
    assert (await request("PUT", f"{scene.url}/wild/a", scene.key, body=b"bytes"))[0] == 200
    for token in (wild, damaged):
        assert (await request("GET", f"{scene.url}/wild/a", scene.key, {"x-amz-rdma-token": token}))[0] == 400
        far = _descriptor(_keys(1), DeliveryOrder.AUTO, RdmaTarget.from_token(token))
        asked = {"x-quire-descriptor": far.to_header()} | _headers()
        assert (await request("PUT", url, scene.key, asked))[0] >= 400
    assert (await request("GET", f"{scene.url}/wild/a", scene.key))[2] == b"bytes", "the service is still there"
    assert len(await client.status()) >= 4
