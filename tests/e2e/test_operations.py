"""As an operator meets the services: what is wrong with a configuration, log lines, members that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

from quire.client import AsyncClient, Client
from quire.model.durability import Durability
from quire.model.errors import PeerLost, Unavailable
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.outcome import FetchSummary
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from tests import fork_server
from tests.e2e.helpers import fetch_all, fresh_namespace, metric, random_payload, some_keys, store, text_of

ROOT = Path(__file__).resolve().parents[2]
SECRET = secrets.token_hex(32)


def run(service: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """On free ports, because a cluster may run on the usual ones."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    environment |= {f"QUIRE_{each}_LISTEN": "127.0.0.1:0" for each in (service.upper(), "GATEWAY_HTTP", "GATEWAY_S3")}
    command = [sys.executable, "-m", f"quire_{service}.server", *arguments]
    return fork_server.run(command, env=environment | settings, timeout=60)


def problems(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Of a service that has ended with status 2, by the last line of its log; all lines are JSON."""
    assert done.returncode == 2, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["event"] == "cannot start"
    found: list[str] = lines[-1]["problems"]
    return found


@pytest.mark.parametrize("service", ["gateway", "orchestrator", "storage", "scheduler", "decoder"])
def test_help_and_check_never_start_the_service(service: str) -> None:
    helped = run(service, "--help")
    assert helped.returncode == 0 and f"QUIRE_{service.upper()}_LISTEN" in helped.stdout
    checked = run(service, "--check", QUIRE_CLUSTER_SECRET=SECRET)
    assert (checked.returncode, checked.stdout) == (0, "the configuration can be used\n"), checked.stdout
    refused = run(service, "--check", QUIRE_CLUSTER_SECRET="short", QUIRE_NOTHING="1")
    assert refused.returncode == 2
    assert [line.partition(":")[0].partition("=")[0] for line in refused.stdout.splitlines()] == [
        "QUIRE_NOTHING",
        "QUIRE_CLUSTER_SECRET",
    ]
    assert "short" not in refused.stdout.replace("shorter", "")


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    """Of the values, and of where they lead: an address in use, a Redis that is none, a folder that is a file."""
    file = tmp_path / "file"
    file.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(
            "gateway",
            QUIRE_CLUSTER_SECRET=SECRET,
            QUIRE_GATEWAY_LISTEN=f"127.0.0.1:{taken.getsockname()[1]}",
            QUIRE_GATEWAY_HTTP_LISTEN="off",
            QUIRE_GATEWAY_S3_LISTEN="off",
            QUIRE_REDIS_URL="http://user:hush@host:1",
            QUIRE_GATEWAY_OBJECT_URL=str(file / "objects"),
            QUIRE_GATEWAY_AUTH="maybe",
        )
    found = problems(done)
    assert [each.partition("=")[0].partition(":")[0] for each in found] == [
        *("QUIRE_GATEWAY_AUTH", "QUIRE_GATEWAY_LISTEN", "QUIRE_GATEWAY_OBJECT_URL", "QUIRE_REDIS_URL")
    ], found
    assert "cannot listen" in found[1] and "is no folder" in found[2] and "hush" not in done.stderr


@pytest.mark.parametrize(
    ("service", "settings", "why"),
    [
        ("storage", {"QUIRE_STORAGE_UCX_TLS": "rc"}, "UCX cannot start with UCX_TLS=rc"),
        ("decoder", {"QUIRE_DECODER_DEVICE": "cuda"}, "no CUDA device"),
    ],
)
def test_what_is_found_later_is_told_in_the_same_way(service: str, settings: dict[str, str], why: str) -> None:
    import torch

    if service == "decoder" and torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    listen = {f"QUIRE_{service.upper()}_LISTEN": f"127.0.0.1:{free_ports(1)[0]}"}
    assert why in problems(run(service, QUIRE_CLUSTER_SECRET=SECRET, **listen, **settings))[0]


def test_memory_that_rdma_could_not_pin_is_told_at_the_start() -> None:
    """And not as UCX's error in the middle of the start. Without RDMA nothing is said."""
    root = os.geteuid() == 0
    if root and shutil.which("setpriv") is None:
        pytest.skip("no setpriv here, to give up CAP_IPC_LOCK")
    without = "setpriv --bounding-set -ipc_lock" if root else ""
    check = shlex.join([sys.executable, "-m", "quire_storage.server", "--check"])
    told = {}
    for transports in ("rc,sm", "tcp,sm"):
        command = f"ulimit -l 1024; exec {without} {check}"
        environment = {**os.environ, "QUIRE_CLUSTER_SECRET": SECRET, "UCX_TLS": transports}
        done = subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        told[transports] = "may pin 1048576 bytes" in done.stdout + done.stderr
    assert told == {"rc,sm": True, "tcp,sm": False}


async def _fetch_from_the_living(
    client: AsyncClient, namespace: Namespace, keys: ChunkKeys
) -> tuple[npt.NDArray[np.uint8], FetchSummary]:
    """Fetch all chunks; a look-up may name a node that has just died once more."""
    async with asyncio.timeout(30):
        while True:
            found = await client.lookup(namespace, keys)
            if found.matched_chunks == len(keys):
                with contextlib.suppress(PeerLost, Unavailable):
                    return await fetch_all(client, found)
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_roll_waits_until_copies_are_there_again(tmp_path: Path) -> None:
    """A node that comes back empty serves, and is not ready for a roll: another one that went now would take chunks
    with it whose second copy it had. Once it is, each of the others may go.
    """
    slow = {"QUIRE_STORAGE_REPLICATION_BYTES_PER_S": str(2 << 20), "QUIRE_STORAGE_OBJECT_URL": ""}
    cluster = LocalCluster(tmp_path / "c", storage_nodes=3, schedulers=0, arena_bytes=96 << 20, settings=slow)

    def gate(name: str, probe: str = "redundancy") -> str:
        """Empty when it is open."""
        try:
            with urllib.request.urlopen(f"http://{cluster.metrics[name]}/{probe}", timeout=5):
                return ""
        except urllib.error.HTTPError as closed:
            return closed.read().decode()

    async def opened(name: str) -> None:
        async with asyncio.timeout(90):
            while await asyncio.to_thread(gate, name):
                await asyncio.sleep(0.2)

    with cluster:
        async with AsyncClient(cluster.gateway_address, timeout_s=10) as client:
            stored = []
            for _ in range(24):
                namespace = fresh_namespace()
                keys, payload = some_keys(namespace, 16), random_payload(namespace, 16)
                await store(client, namespace, keys, payload, durability=Durability.REPLICATED)
                stored.append((namespace, keys, payload))
            for name in ("storage-0", "storage-1", "storage-2"):
                await opened(name)
            await asyncio.to_thread(cluster.kill, "storage-2")
            shutil.rmtree(tmp_path / "c" / "storage-2")
            await asyncio.to_thread(cluster.restart, "storage-2")
            assert not await asyncio.to_thread(gate, "storage-2", "readyz"), "it serves"
            why = await asyncio.to_thread(gate, "storage-2")
            assert why, "copies are missing"
            await opened("storage-2")
            for name in ("storage-0", "storage-1"):
                assert metric(cluster.metrics[name], "quire_storage_alone") == 0
            await asyncio.to_thread(cluster.kill, "storage-1")
            for namespace, keys, payload in stored:
                got, summary = await _fetch_from_the_living(client, namespace, keys)
                assert summary.usable_chunks == 16 and np.array_equal(got, payload)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("operated")
    with LocalCluster(folder, arena_bytes=64 << 20) as running:
        yield running


def lines_of(cluster: LocalCluster, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cluster.folder / "logs" / f"{name}.log").read_text().splitlines()]


def test_what_alerts_count_stands_at_zero_before_it_happens(cluster: LocalCluster) -> None:
    """Prometheus sees no increase in a series that begins at one. Histograms have no zero: those that may be empty."""
    rules = yaml.safe_load((ROOT / "observability/alerts.yaml").read_text())["groups"]
    asked = {name for group in rules for rule in group["rules"] for name in re.findall(r"\bquire_\w+", rule["expr"])}
    told = "".join(text_of(address) for address in cluster.metrics.values())
    series = {line.partition("{")[0].partition(" ")[0] for line in told.splitlines() if not line.startswith("#")}
    names_of_labels, of_tls = {"quire_frontend"}, {"quire_certificate_expiry_seconds"}
    empty = {"quire_storage_stall_seconds_bucket", "quire_storage_stall_seconds_count"}
    assert len(asked) > 15
    assert asked - names_of_labels - of_tls - empty <= series, sorted(asked - series)
    gateway = cluster.metrics["gateway"]
    for each in ("2xx", "4xx", "5xx"):
        labels = {"quire_frontend": "s3", "class": each}
        assert metric(gateway, "quire_http_requests_total", **labels) == 0
    method = "quire.v1.GatewayService/Lookup"
    assert metric(gateway, "quire_rpc_requests_total", rpc_method=method, outcome="failed") == 0


def test_a_service_says_what_it_is_when_it_serves_and_why_it_stops(cluster: LocalCluster) -> None:
    for name in (name for name in cluster.names if name != "redis"):
        lines = lines_of(cluster, name)
        starts, ready = (next(line for line in lines if line["event"] == event) for event in ("starts", "serves"))
        assert {"version", "protocol", "kernel", "listen", "role"} <= starts.keys()
        assert ready["address"] == cluster.address(name)
        assert metric(cluster.metrics[name], "quire_build_info", version=starts["version"]) == 1
    ready = next(line for line in lines_of(cluster, "storage-0") if line["event"] == "serves")
    assert {"io", "data plane"} <= ready.keys()
    text = text_of(cluster.metrics["storage-0"])
    assert 'service_instance_id="storage-0"' in text and "otel_scope" not in text
    for name in ("gateway", "orchestrator", "scheduler"):
        assert metric(cluster.metrics[name], "quire_redis_round_trip_seconds_count") >= 1
    cluster.renew("scheduler")
    assert [line["reason"] for line in lines_of(cluster, "scheduler") if line["event"] == "stops"] == ["SIGTERM"]


def test_a_node_that_leaves_is_no_warning(cluster: LocalCluster) -> None:
    def warnings() -> list[str]:
        lines = lines_of(cluster, "orchestrator")
        return [line["event"] for line in lines if "broke" in line["event"] and line["level"] == "warning"]

    cluster.renew("storage-0")
    time.sleep(1)
    assert not warnings()
    cluster.kill("storage-0", signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not warnings():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster.restart("storage-0")


@contextlib.contextmanager
def _stranger(cluster: LocalCluster, folder: Path, **settings: str) -> Iterator[tuple[str, Path]]:
    """A storage node that wants to join: where its metrics are, and its log."""
    listen, metrics = (f"127.0.0.1:{port}" for port in free_ports(2))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")} | {
        "QUIRE_CLUSTER_SECRET": cluster.secret,
        "QUIRE_ORCHESTRATOR_ADDRESS": cluster.address("orchestrator"),
        "QUIRE_STORAGE_LISTEN": listen,
        "QUIRE_STORAGE_METRICS_LISTEN": metrics,
        "QUIRE_STORAGE_ARENA_BYTES": str(64 << 20),
        "QUIRE_STORAGE_DRAIN_S": "0",
        **settings,
    }
    log = folder / "log"
    with log.open("wb") as out:
        running = subprocess.Popen([sys.executable, "-m", "quire_storage.server"], env=environment, stderr=out)
        try:
            yield metrics, log
        finally:
            running.terminate()
            running.wait(30)


@pytest.mark.parametrize(
    ("settings", "reason", "why"),
    [
        ({"QUIRE_STORAGE_NODE_ID": "storage-0"}, "NameTaken", "another name"),
        ({"QUIRE_STORAGE_NODE_ID": "x", "QUIRE_CLUSTER_SECRET": "s" * 32}, "SecretDiffers", "not that of this cluster"),
    ],
)
def test_a_member_that_cannot_be_is_refused_and_says_so(
    cluster: LocalCluster, tmp_path: Path, settings: dict[str, str], reason: str, why: str
) -> None:
    """Of its name there is one that is alive, or it signs with another secret: once in its log, and as a metric."""
    with _stranger(cluster, tmp_path, **settings) as (metrics, log):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, AssertionError):
                if metric(metrics, "quire_member_refused_total", reason=reason) > 3:
                    break
            time.sleep(0.1)
        refused = [json.loads(line) for line in log.read_text().splitlines() if "does not use this node" in line]
        assert len(refused) == 1 and why in refused[0]["error"] and refused[0]["level"] == "error"
        with Client(cluster.gateway_address) as client:
            nodes = [node.node_id for node in client.status() if node.node_id in ("storage-0", "x")]
        assert nodes == ["storage-0"]


@pytest.mark.long
def test_secrets_are_replaced_one_by_the_other(tmp_path: Path) -> None:
    """Members with the old and with the new one work together while both are believed."""
    with LocalCluster(tmp_path / "c", schedulers=0, arena_bytes=64 << 20) as cluster:
        assert metric(cluster.metrics["storage-0"], "quire_member_refused_total", reason="SecretDiffers") == 0
        old, new = cluster.secret, secrets.token_hex(32)
        also = {"QUIRE_CLUSTER_SECRET_ALSO": new}
        for name in ("orchestrator", "gateway", "storage-0"):  # believe the new one, too
            cluster.kill(name)
            cluster.restart(name, environment=also)
        cluster.kill("storage-0")
        cluster.restart("storage-0", environment={"QUIRE_CLUSTER_SECRET": new, "QUIRE_CLUSTER_SECRET_ALSO": old})
        with Client(cluster.gateway_address) as client:
            assert {"storage-0"} <= {node.node_id for node in client.status()}
