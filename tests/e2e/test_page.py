"""The gateway's web page: closed to strangers, and what a real browser shows of a cluster at work."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.client import ImageClient, QuireClient
from quire.wire.credentials import member_token, page_token
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import encode, pictures
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """With a prefix that was fetched, and a picture."""
    with LocalCluster(tmp_path_factory.mktemp("page"), storage_nodes=2, arena_bytes=96 << 20) as running:
        asyncio.run(_work(running))
        yield running


async def _work(cluster: LocalCluster) -> None:
    async with QuireClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        await store(client, namespace, some_keys(namespace, 40), random_payload(namespace, 40))
        await fetch_all(client, await client.lookup(namespace, some_keys(namespace, 40)))
        ((latent, info),) = encode(pictures(1, 64))
        await ImageClient(client).put("a/cat & co", latent, info)
        await asyncio.sleep(1.5)  # what is shown comes with heartbeats


def _get(cluster: LocalCluster, path: str, password: str) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://{cluster.page_address}{path}")
    request.add_header("Authorization", "Basic " + b64encode(f"any:{password}".encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()


def test_strangers_see_nothing(cluster: LocalCluster) -> None:
    """Nor do those who know another token of the cluster."""
    for path in ("/", "/page.js", "/cluster.json", "/images.json", "/images/a"):
        for password in ("", "wrong", member_token(cluster.secret), cluster.secret):
            status, body = _get(cluster, path, password)
            assert status == 401 and b"storage-0" not in body, path


def test_what_is_told_is_the_cluster(cluster: LocalCluster) -> None:
    token = page_token(cluster.secret.encode())
    status, body = _get(cluster, "/cluster.json", token)
    told = json.loads(body)
    assert status == 200 and {node["role"] for node in told["nodes"]} >= {"storage", "gateway", "scheduler", "decoder"}
    assert sum(node["stats"].get("chunks", 0) for node in told["nodes"]) == 41, "forty, and the picture's record"
    assert [each["hit"] for each in told["namespaces"].values()].count(40) == 1
    assert cluster.secret not in body.decode()
    assert json.loads(_get(cluster, "/images.json", token)[1])[0]["id"] == "a/cat & co"
    status, body = _get(cluster, "/images/a/cat%20%26%20co", token)
    assert status == 200 and body[8:12] == b"WEBP"
    assert _get(cluster, "/images/none", token)[0] == 404
    assert _get(cluster, "/nothing", token)[0] == 404


def test_nothing_is_asked_of_other_places() -> None:
    import quire_gateway.page as page

    for file in Path(page.__file__).parent.glob("*.*"):
        if file.suffix in (".html", ".css", ".js"):
            assert set(re.findall(r"https?://[^\"']+", file.read_text())) <= {"http://www.w3.org/2000/svg"}


def test_a_browser_shows_it(cluster: LocalCluster, tmp_path: Path) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    url = f"http://operator:{page_token(cluster.secret.encode())}@{cluster.page_address}/"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    shown = subprocess.run(
        [program, *flags, "--virtual-time-budget=6000", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    ).stdout
    assert re.search(r"5 members, 41 chunks", shown), shown[:3000]
    assert "<td>storage-0</td>" in shown and "<td>storage-1</td>" in shown
    assert "a/cat &amp; co, latent of" in shown
    assert "does not answer" not in shown
