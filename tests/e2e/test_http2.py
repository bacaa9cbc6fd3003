"""HTTP/2 by the proxy of `examples/proxies`, where nginx and a curl with HTTP/2 are installed."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import numpy as np
import pytest
import trustme
from botocore.config import Config

from quire.client import AsyncClient, ImageClient
from quire.model.latents import LatentInfo, Vae
from quire_decoder.adapters.weights import weights_digest
from quire_server.redis import AccessKeys, connect
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from tests.polling import until

_CONFIGURATION = Path(__file__).parents[2] / "examples" / "proxies" / "nginx.conf"
_CURL = shutil.which("curl")
_NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")


def _has_http2() -> bool:
    return bool(_CURL) and b"HTTP2" in subprocess.run(["curl", "--version"], capture_output=True, check=True).stdout


pytestmark = pytest.mark.skipif(not _NGINX or not _has_http2(), reason="needs nginx, and curl with HTTP/2")


@dataclass(frozen=True)
class _Proxy:
    images: str
    s3: str
    ca: Path
    key: tuple[str, str]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, vae: Path) -> Iterator[_Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    settings = {"QUIRE_DECODER_MODELS": str(vae)}
    with LocalCluster(folder / "c", decoders=1, arena_bytes=128 << 20, settings=settings) as cluster:
        ports = free_ports(2)
        text = _CONFIGURATION.read_text()
        for old, new in (
            ("127.0.0.1:7480", cluster.http_address),
            ("127.0.0.1:7481", cluster.s3_address),
            ("listen 8443", f"listen 127.0.0.1:{ports[0]}"),
            ("listen 8444", f"listen 127.0.0.1:{ports[1]}"),
        ):
            assert old in text
            text = text.replace(old, new)
        (folder / "nginx.conf").write_text(text)
        with subprocess.Popen([str(_NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")]) as nginx:
            try:
                images = f"https://localhost:{ports[0]}"
                until(lambda: _curl(folder / "ca.pem", f"{images}/healthz")[0] == "200", "nginx answers")
                key = _prepare(cluster, vae)
                yield _Proxy(images, f"https://localhost:{ports[1]}", folder / "ca.pem", key)
            finally:
                nginx.terminate()
                nginx.wait(30)


def _prepare(cluster: LocalCluster, vae: Path) -> tuple[str, str]:
    """Store an image, and return an access key of S3."""

    async def prepare() -> tuple[str, str]:
        values = np.random.default_rng(1).normal(size=(4, 16, 16)).astype(np.float16)
        info = LatentInfo((4, 16, 16), "float16", Vae("tiny", "", weights_digest(vae)), 64, 64)
        async with AsyncClient(cluster.gateway_address) as client:
            await ImageClient(client).put("cat", values, info)
        redis = connect(cluster.redis_url)
        keys = AccessKeys(redis, cluster.secret.encode())
        key = await keys.create("alice", ())
        await redis.aclose()
        return key.name, keys.secret(key)

    return asyncio.run(prepare())


def _curl(ca: Path, url: str, *arguments: str) -> tuple[str, str]:
    """Return status and version of an answer."""
    written = "%{http_code} %{http_version}"
    command = ["curl", "--silent", "--max-time", "60", "--cacert", str(ca), "--http2", "-o", "-", "-w", f"\n{written}"]
    done = subprocess.run([*command, *arguments, url], capture_output=True, check=False)
    status, _, version = done.stdout.rpartition(b"\n")[2].decode().partition(" ")
    return status, version


def test_pictures_by_http_2(proxy: _Proxy) -> None:
    assert _curl(proxy.ca, f"{proxy.images}/v1/images/cat?format=webp") == ("200", "2")
    assert _curl(proxy.ca, f"{proxy.images}/v1/images/cat", "-r", "0-9") == ("206", "2")
    assert _curl(proxy.ca, f"{proxy.images}/v1/images/nobody") == ("404", "2")
    assert _curl(proxy.ca, f"{proxy.images}/healthz", "-H", "X-Long: " + "a" * 12_000) == ("431", "2")


def test_signed_requests_pass(proxy: _Proxy) -> None:
    """The signature covers the host: the proxy passes it on."""
    client = boto3.client(
        "s3",
        endpoint_url=proxy.s3,
        aws_access_key_id=proxy.key[0],
        aws_secret_access_key=proxy.key[1],
        region_name="us-east-1",
        verify=str(proxy.ca),
        config=Config(s3={"addressing_style": "path"}, signature_version="s3v4"),
    )
    client.create_bucket(Bucket="proxied")
    body = np.random.default_rng(2).bytes(6 << 20)
    client.put_object(Bucket="proxied", Key="a key", Body=body)
    url = client.generate_presigned_url("get_object", Params={"Bucket": "proxied", "Key": "a key"})
    assert client.get_object(Bucket="proxied", Key="a key")["Body"].read() == body
    assert _curl(proxy.ca, url) == ("200", "2")
