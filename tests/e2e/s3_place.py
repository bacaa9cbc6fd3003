"""An S3 endpoint for tests: a cluster, an access key, and a KV chunk in the object tier."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import trustme
from botocore.config import Config

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_server.redis import AccessKeys, connect
from quire_server.redis.keys.access import AccessGrant, AccessLevel
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports

LAYOUT = KvLayout(4, 16, 2, 64, Dtype.FP16)
SPACE = Namespace("m", "1", LAYOUT)


@dataclass(frozen=True)
class Place:
    """An endpoint with an access key and a KV chunk."""

    http: str
    https: str
    ca: Path
    key: str
    secret: str
    chunk_key: str
    chunk: bytes

    def url(self, tls: bool) -> str:
        return self.https if tls else self.http


@contextlib.contextmanager
def s3_place(folder: Path, **settings: str) -> Iterator[Place]:
    """Start the cluster of an endpoint, with and without TLS. `settings`: further ones of the services."""
    chain, private, trusted = folder / "chain.pem", folder / "key.pem", folder / "ca.pem"
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    chain.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(private))
    authority.cert_pem.write_to_path(str(trusted))
    port = free_ports(1)[0]
    environment = {
        "QUIRE_GATEWAY_S3_TLS_LISTEN": f"127.0.0.1:{port}",
        "QUIRE_GATEWAY_TLS_CERT": str(chain),
        "QUIRE_GATEWAY_TLS_KEY": str(private),
        "QUIRE_GATEWAY_S3_DOMAIN": "localhost",
        **settings,
    }
    with LocalCluster(folder / "c", arena_bytes=64 << 20, drive_bytes=128 << 20, settings=environment) as cluster:
        access, name, chunk = asyncio.run(_prepare(cluster))
        endpoint = Place(f"http://{cluster.s3_address}", f"https://127.0.0.1:{port}", trusted, *access, name, chunk)
        yield endpoint


async def _prepare(cluster: LocalCluster) -> tuple[tuple[str, str], str, bytes]:
    """A key, and a KV chunk in the object tier."""
    redis = connect(cluster.redis_url)
    keys = AccessKeys(redis, cluster.secret.encode())
    key = await keys.create("alice", (AccessGrant("quire", "quire-kv", f"{SPACE.tag.hex()}/", AccessLevel.READ),))
    await redis.aclose()
    chunks = ChunkKeys(hashlib.sha256(b"a chunk").digest())
    async with AsyncClient(cluster.gateway_address) as client:
        buffer = client.allocate(LAYOUT.chunk_bytes)
        assert buffer.view is not None
        buffer.view[:] = np.random.default_rng(1).integers(0, 256, buffer.length, dtype=np.uint8)
        session = await client.store(SPACE, chunks, 0, buffer, durability=Durability.OBJECT)
        for layer in range(LAYOUT.num_layers):
            session.layer_ready(layer)
        await session.commit()
        return (key.name, keys.secret(key)), f"{SPACE.tag.hex()}/{chunks.at(0).hex()}", buffer.view.tobytes()


def boto(place: Place, tls: bool, **config: Any) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=place.url(tls),
        aws_access_key_id=place.key,
        aws_secret_access_key=place.secret,
        region_name="us-east-1",
        verify=str(place.ca) if tls else None,
        config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}, **config),
    )


def refused(method: Any, code: str, **arguments: Any) -> None:
    with pytest.raises(Exception) as failed:
        method(**arguments)
    assert failed.value.response["Error"]["Code"] == code  # type: ignore[attr-defined]
