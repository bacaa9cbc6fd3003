"""The gateway's web page: closed to strangers, and what a real browser shows of a cluster at work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.client import AsyncClient, ImageClient
from quire.model.descriptor import DeliveryOrder
from quire.model.layout import Dtype, KvLayout
from quire.wire.credentials import operator_token, page_token
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import encode, pictures
from tests import fork_server
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store
from tests.polling import until

_LINK = 4_000_000
_LAYOUT = KvLayout(16, 16, 4, 64, Dtype.BF16)
_STORED = 41  # forty chunks, and the picture's record


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """With a prefix that was fetched, a picture, and a slow link."""
    settings = {
        "QUIRE_SCHEDULER_LINKS": f"default={_LINK}",
        "QUIRE_STORAGE_LINK_BYTES_PER_S": str(_LINK),
        "QUIRE_TRACE_RECENT": "2000",
    }
    with LocalCluster(
        tmp_path_factory.mktemp("page"), decoders=1, storage_nodes=2, arena_bytes=96 << 20, settings=settings
    ) as running:
        asyncio.run(_work(running))
        yield running


@pytest.fixture(scope="module")
def slow_delivery(cluster: LocalCluster) -> Iterator[None]:
    """A prefix of 16 layers is under way: its delivery takes eight seconds, and begins again."""
    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        delivering = threads.submit(lambda: asyncio.run(_deliver(cluster, over)))
        try:
            deadline_s = time.monotonic() + 30
            while not _only_slow(running := _running(cluster)):
                assert time.monotonic() < deadline_s and not delivering.done(), running
                time.sleep(0.1)
            yield
        finally:
            over.set()
            delivering.result(60)


async def _deliver(cluster: LocalCluster, over: threading.Event) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace(_LAYOUT)
        await store(client, namespace, some_keys(namespace, 128), random_payload(namespace, 128))
        found = await client.lookup(namespace, some_keys(namespace, 128))
        while not over.is_set():
            buffer = client.allocate(namespace.layout.payload_bytes(128))
            delivery = await client.fetch(found, buffer, order=DeliveryOrder.LAYERWISE)
            ended = asyncio.ensure_future(delivery.summary())
            while not (over.is_set() or ended.done()):
                await asyncio.sleep(0.05)
            await delivery.cancel()
            await asyncio.gather(ended, return_exceptions=True)
            await delivery.quiesced(10)
            buffer.close()


def _told(cluster: LocalCluster) -> Any:
    return json.loads(_get(cluster, "/cluster.json", page_token(cluster.secret.encode()))[1])


def _running(cluster: LocalCluster) -> list[dict[str, Any]]:
    return [each for node in _told(cluster)["nodes"] for each in node["running"]]


def _only_slow(running: list[dict[str, Any]]) -> bool:
    """A node's last heartbeat may still name a delivery that has ended."""
    return bool(running) and all(delivery["layers"] == _LAYOUT.num_layers for delivery in running)


async def _work(cluster: LocalCluster) -> None:
    await _store_and_fetch(cluster, 40)
    async with AsyncClient(cluster.gateway_address) as client:
        ((latent, info),) = encode(pictures(1, 64))
        await ImageClient(client).put("a/cat & co", latent, info)
        deadline_s = time.monotonic() + 30
        while not _shows_the_work(_told(cluster)):  # what is shown comes with heartbeats
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)


async def _store_and_fetch(cluster: LocalCluster, chunks: int) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        await store(client, namespace, some_keys(namespace, chunks), random_payload(namespace, chunks))
        await fetch_all(client, await client.lookup(namespace, some_keys(namespace, chunks)))


def _shows_the_work(told: Any) -> bool:
    chunks = sum(node["stats"].get("chunks", 0) for node in told["nodes"])
    return chunks == _STORED and [each["hit"] for each in told["namespaces"].values()].count(40) == 1


def _get(
    cluster: LocalCluster, path: str, password: str, timeout_s: float = 10, method: str = "GET"
) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://{cluster.page_address}{path}", method=method)
    request.add_header("Authorization", "Basic " + b64encode(f"any:{password}".encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()


def test_strangers_see_nothing(cluster: LocalCluster) -> None:
    """Nor do those who know another token of the cluster."""
    for path in ("/", "/page.js", "/cluster.json", "/history.json", "/images.json", "/images/a"):
        for password in ("", "wrong", operator_token(cluster.secret), cluster.secret):
            status, body = _get(cluster, path, password)
            assert status == 401 and b"storage-0" not in body, path


def test_what_is_told_is_the_cluster(cluster: LocalCluster) -> None:
    token = page_token(cluster.secret.encode())
    status, body = _get(cluster, "/cluster.json", token)
    told = json.loads(body)
    assert status == 200 and {node["role"] for node in told["nodes"]} >= {"storage", "gateway", "scheduler", "decoder"}
    assert _shows_the_work(told)
    checks = {check["code"]: check for check in told["health"]["checks"]}
    assert told["version"] == quire.__version__
    assert told["health"]["verdict"] == max((check["verdict"] for check in checks.values()), default="OK")
    assert all(check["advice"] and check["problem"] for check in checks.values())
    assert "NO_STORAGE" not in checks and "NO_SCHEDULER" not in checks
    assert cluster.secret not in body.decode()
    assert json.loads(_get(cluster, "/images.json", token)[1])[0]["id"] == "a/cat & co"
    status, body = _get(cluster, "/images/a/cat%20%26%20co", token)
    assert status == 200 and body[8:12] == b"WEBP"
    assert _get(cluster, "/images/none", token)[0] == 404
    assert _get(cluster, "/nothing", token)[0] == 404


def test_time_series_are_kept_at_the_gateway(cluster: LocalCluster) -> None:
    """The series begin with the gateway; a page that is opened later shows them, too."""
    token = page_token(cluster.secret.encode())

    def series() -> Any:
        history = json.loads(_get(cluster, "/history.json", token)[1])
        assert all(len(values) == len(history["times_ms"]) for values in history["series"].values())
        return history["series"]

    def shows_work() -> bool:  # new at each look: what is done before the first sample is in none
        asyncio.run(_store_and_fetch(cluster, 1))
        return any(series()["delivered"]) and any(series()["stored"])

    until(shows_work, "no sample shows the work", timeout_s=60, pause_s=0.5)
    assert {value for value in series()["hit_rate"] if value is not None} <= {0.0, 1.0}
    assert json.loads(_get(cluster, "/history.json?range=day", token)[1])["times_ms"] == [], "two minutes each"


def test_namespaces_are_named(cluster: LocalCluster) -> None:
    (namespace,) = [row for row in _told(cluster)["namespaces"].values() if row["hit"] == 40]
    expected = fresh_namespace()
    assert namespace["model"] == expected.model_id and namespace["version"]
    assert (namespace["tenant"], namespace["adapter"]) == (expected.tenant, "")


def test_a_recent_request_opens_into_its_spans(cluster: LocalCluster) -> None:
    """Spans of all members have the times of layers, and no other attributes; reading spans makes none."""
    token = page_token(cluster.secret.encode())
    requests = json.loads(_get(cluster, "/requests.json", token)[1])
    assert len(requests) <= 20 and all(request["ms"] > 0 and request["ok"] for request in requests)
    ids = [request["trace"] for request in requests if "Fetch" in request["name"]]
    traces = [json.loads(_get(cluster, f"/traces/{trace_id}", token)[1]) for trace_id in ids]
    assert traces and not any(trace["missing"] or trace["cut"] for trace in traces)
    spans = [span for trace in traces for span in trace["spans"]]
    assert {"gateway", "storage"} <= {span["service"] for span in spans}, requests
    attributes = {name for span in spans for name in span["attributes"]}
    assert all(name == "quire.layer" or name.endswith("_us") for name in attributes), "others name images and chunks"
    assert any("quire.layer" in span["attributes"] for span in spans)
    assert json.loads(_get(cluster, "/requests.json", token)[1])[0] == requests[0]
    assert _get(cluster, "/traces/unknown", token)[0] == 404
    assert json.loads(_get(cluster, f"/traces/{32 * '0'}", token)[1])["spans"] == []


@pytest.mark.usefixtures("slow_delivery")
def test_deliveries_that_run_are_told_with_their_layers(cluster: LocalCluster) -> None:
    seen: list[int] = []
    deadline_s = time.monotonic() + 30
    while len(set(seen)) < 2:
        assert time.monotonic() < deadline_s, seen
        for each in _running(cluster):
            assert each["layers"] == _LAYOUT.num_layers and each["bytes_per_layer"] % _LAYOUT.slice_bytes == 0, each
            seen.append(each["layers_sent"])
        time.sleep(0.2)
    assert max(seen) <= _LAYOUT.num_layers
    line = r"[0-9a-f]{8} [█░]+ +\d+ of 16 layers · storage-\d · \d+\.\d s · (\d+ MB/s|no rate)"
    command = fork_server.quire("top", "--gateway", cluster.gateway_address, "--rounds", "1")
    shown, looks = "", 0
    while not re.search(line, shown):  # between two deliveries there is none
        assert looks < 5, shown
        shown = fork_server.run(command, timeout=60).stdout
        looks += 1


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_is_only_read(cluster: LocalCluster, method: str) -> None:
    for path in ("/", "/cluster.json", "/images/a/cat%20%26%20co"):
        assert _get(cluster, path, page_token(cluster.secret.encode()), method=method)[0] == 405


def test_nothing_is_asked_of_other_places() -> None:
    import quire_gateway.page as page

    for file in Path(page.__file__).parent.glob("*.*"):
        if file.suffix in (".html", ".css", ".js", ".svg"):
            assert set(re.findall(r"https?://[^\"']+", file.read_text())) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.usefixtures("slow_delivery")
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
    command = [program, *flags, "--virtual-time-budget=6000", "--dump-dom", url]
    shown, looks = "", 0
    shared = (
        r"<td>default</td><td><progress[^>]*></progress></td><td>[^<]+/s</td><td>3.8 MiB/s</td><td>no name 100 %</td>"
    )
    while not (re.search(r"<td>\d+ of 16</td>", shown) and re.search(shared, shown)):  # between two there is none
        assert looks < 5, shown[:3000]
        shown += subprocess.run(command, capture_output=True, text=True, timeout=90, check=False).stdout
        looks += 1
    chunks = re.search(r"version [\d.]+, 5 members, (\d+) chunks", shown)
    assert chunks and int(chunks[1]) >= 41 + 128, shown[:3000]  # more where hot ones have got another copy
    assert "<td>storage-0</td>" in shown and "<td>storage-1</td>" in shown
    assert "a/cat &amp; co, latent of" in shown
    hits = re.search(r"<td>memory</td><td><progress[^>]*></progress></td><td>(\d+)</td>", shown)
    assert hits and int(hits[1]) >= 40, shown[:3000]
    assert re.search(r"<td><progress[^>]*></progress></td><td>100 %</td><td>\d+</td>", shown), "hits by namespace"
    assert "does not answer" not in shown
    assert re.search(r'<polyline class="delivered" points="[\d., ]+">', shown), "a line of what was delivered"
    assert re.search(r"<text [^>]*>[\d.]+ [KMG]?i?B/s</text>", shown) and shown.count("aria-pressed") == 3 * looks
    assert re.search(r'<p id="verdict" role="status" class="(OK|WARN)">(healthy|degraded)</p>', shown)
    assert len(re.findall(r"<dd>[\d.]+ (?:%|[KMG]?i?B/s)</dd>|<dd>[\d.]+</dd>", shown)) == 4 * looks
    (trace, *_) = re.findall(r'<a href="#([0-9a-f]{32})">(?:Fetch|Lookup)</a>', shown)
    opened = subprocess.run([*command[:-1], f"{url}#{trace}"], capture_output=True, text=True, timeout=90, check=False)
    assert re.search(r'<rect [^>]*class="service\d"[^>]*><title>\w+: [^<]+</title>', opened.stdout), "its waterfall"
