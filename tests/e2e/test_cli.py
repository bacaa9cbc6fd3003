"""The commands as a person types them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from safetensors.torch import save

from quire import __version__ as quire_version
from quire.client import AsyncClient, Client
from quire.model.errors import ConfigInvalid, QuireError, Unauthenticated
from quire.model.hashing import tenant_name
from quire.wire.credentials import operator_token
from quire_decoder.adapters.weights import weights_digest
from quire_tools.cli.cluster import moved, write_namespace
from quire_tools.local import LocalCluster, read_state
from quire_tools.local.ports import free_ports
from tests import fork_server
from tests.e2e.helpers import fresh_namespace, random_payload, some_keys, store
from tests.polling import until

_REQUEST: Any = reflection_pb2.ServerReflectionRequest
QUIRE = [sys.executable, "-c", "from quire_tools.cli import main; main()"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One of each service, which commands ask; three storage nodes."""
    folder = tmp_path_factory.mktemp("cluster")
    settings = {"QUIRE_SHARED_MEMORY": str(folder / "sockets")}
    with LocalCluster(folder, decoders=1, storage_nodes=3, arena_bytes=192 << 20, settings=settings) as running:
        yield running


def quire(*arguments: str, timeout_s: float = 60, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160"}
    kind = "torch" if arguments[0] in ("demo", "profile", "calibrate") else "plain"
    return fork_server.run(fork_server.quire(*arguments), timeout=timeout_s, env=environment, cwd=folder, kind=kind)


def children_of(folder: Path) -> list[str]:
    """Command lines of running processes that name `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                environment = (process / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if process.name != str(os.getpid()) and (str(folder) in command or f"={folder}" in environment):
                found.append(command)
    return found


def test_up_status_and_ctrl_c(tmp_path: Path) -> None:
    """`quire up` serves until Ctrl-C and leaves no process, lock or state behind; errors are one line."""
    folder = tmp_path / "data"
    up = subprocess.Popen(
        [*QUIRE, "up", "--folder", str(folder), "--arena-mib", "64"], stdout=subprocess.PIPE, text=True
    )
    try:
        roles: set[str] = set()
        deadline = time.monotonic() + 90
        while roles != {"storage", "gateway", "scheduler", "decoder"}:
            assert time.monotonic() < deadline, roles
            time.sleep(0.2)
            told = quire("status", "--folder", str(folder), "--json")
            roles = {node["role"] for node in json.loads(told.stdout)} if told.returncode == 0 else set()
        status = quire("status", "--folder", str(folder))
        assert "gateway-0" in status.stdout and "1 storage" in status.stdout, status.stdout + status.stderr
        assert all(len(line) <= 80 for line in status.stdout.splitlines())
        assert re.search(r"storage-0 +address +127\.0\.0\.1", quire("status", "--folder", str(folder), "-v").stdout)
        with pytest.raises(ConfigInvalid, match="already runs"):
            LocalCluster(folder).start()
        up.send_signal(signal.SIGINT)
        assert up.wait(30) == 0
    finally:
        up.kill()
        up.wait()
    assert not (folder / "cluster.lock").exists() and not (folder / "cluster.json").exists()
    assert children_of(folder) == []
    gone = quire("status", "--folder", str(folder))
    assert gone.returncode == 1 and "quire up" in gone.stderr and "Traceback" not in gone.stderr
    away = quire("status", "--gateway", f"127.0.0.1:{free_ports(1)[0]}")
    assert away.returncode == 1 and "does it run, and is that its address?" in away.stderr


@pytest.mark.slow
def test_up_starts_again_what_dies_and_keeps_its_ports(tmp_path: Path, vae: Path) -> None:
    """Each service, Redis too, killed; images are at the port that was asked for, with the VAE that was given."""
    (http_port,) = free_ports(1)
    url, folder, said = f"http://127.0.0.1:{http_port}/v1/vaes", tmp_path / "data", tmp_path / "said"
    command = [*QUIRE, "up", "--folder", str(folder), "--arena-mib", "64", "--http", str(http_port)]

    def run(options: list[str], look: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        with said.open("w") as out:
            up = subprocess.Popen([*command, *options], stdout=out)
        try:
            running: dict[str, Any] = until(
                lambda: read_state(folder)["processes"], ignored=(QuireError, OSError), timeout_s=60
            )
            until(lambda: "decoder-0" in said.read_text(), timeout_s=60)
            look(running)
            up.send_signal(signal.SIGINT)
            assert up.wait(60) == 0
        finally:
            up.kill()
            up.wait()
        return {name: address for name, (_, address) in running.items() if not name.startswith(("redis", "storage"))}

    def kill_all(running: dict[str, Any]) -> None:
        for pid, _ in running.values():
            os.kill(pid, signal.SIGKILL)
        until(
            lambda: said.read_text().count("was started again") >= len(running),
            ignored=(QuireError, OSError),
            timeout_s=60,
        )
        known = until(
            lambda: json.load(urllib.request.urlopen(url, timeout=5))["vaes"],
            ignored=(QuireError, OSError),
            timeout_s=60,
        )
        assert weights_digest(vae) in {each["weights_sha256"] for each in known}

    assert run(["--models", str(vae.parent)], kill_all) == run([], lambda running: None)


def test_a_killed_launcher_takes_its_cluster_with_it(tmp_path: Path) -> None:
    up = subprocess.Popen([*QUIRE, "up", "--folder", str(tmp_path), "--arena-mib", "64"], stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "cluster.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert children_of(tmp_path)
    finally:
        up.kill()
        up.wait()
    deadline = time.monotonic() + 10
    while children_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children_of(tmp_path) == []


@pytest.mark.slow
def test_demo_runs_and_shows(tmp_path: Path) -> None:
    """The demonstration: reuse is bit-identical, a killed node costs a recompute, picture and trace are there."""
    done = quire("demo", "--folder", str(tmp_path / "demo"), timeout_s=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical to the KV kept in memory: yes" in done.stdout
    assert "the request finished all the same" in done.stdout
    summary = done.stdout.rpartition("\n\n")[2].splitlines()
    assert 5 < len(summary) < 24, "it fits a screen"
    assert (tmp_path / "demo" / "timeline.png").stat().st_size > 5000
    assert (tmp_path / "demo" / "cache.png").stat().st_size > 5000
    assert (tmp_path / "demo" / "images.png").stat().st_size > 5000
    spans = [json.loads(line) for line in (tmp_path / "demo" / "trace.jsonl").read_text().splitlines()]
    assert {"gateway", "orchestrator", "storage", "scheduler"} <= {span["service"] for span in spans}
    assert children_of(tmp_path) == []


@pytest.mark.long
def test_the_demo_on_a_running_cluster(tmp_path: Path, cluster: LocalCluster) -> None:
    """`quire demo --gateway`, twice: the second must not stumble over what the first stored."""
    for _ in range(2):
        done = quire("demo", "--folder", str(tmp_path), "--gateway", cluster.gateway_address, timeout_s=110)
        assert done.returncode == 0, done.stdout + done.stderr
    text = tmp_path / "prompt.txt"
    from quire_tools.cli.demos.kv import demo_prompts

    text.write_bytes(bytes(demo_prompts()[0][0].tolist()))
    arguments = [str(text), "--namespace", str(tmp_path / "namespace.json"), "--gateway", cluster.gateway_address]
    found = quire("cache", "lookup", *arguments)
    told = json.loads(quire("cache", "lookup", *arguments, "--json").stdout)
    assert told["matched_chunks"] > 0 and told["ranges"][0]["node_id"].startswith("storage-")
    assert "3184 of 3184 tokens" in found.stdout, found.stdout + found.stderr


def test_a_prefix_by_hand(tmp_path: Path, cluster: LocalCluster) -> None:
    """What is stored of a text is found, retained, brought into memory, and dropped once it is not retained."""
    text, file = tmp_path / "prompt.txt", tmp_path / "namespace.json"
    text.write_bytes(bytes(range(160)))
    namespace = fresh_namespace()
    write_namespace(file, namespace)
    payload = random_payload(namespace, 10)

    async def stored() -> None:
        async with AsyncClient(cluster.gateway_address) as client:
            await store(client, namespace, some_keys(namespace, 10), payload)

    asyncio.run(stored())

    def said(command: str, *arguments: str) -> str:
        done = quire(
            "cache", command, str(text), "--namespace", str(file), "--gateway", cluster.gateway_address, *arguments
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "160 of 160 tokens" in said("lookup")
    assert "10 of 10 chunks" in said("retain", "--hours", "1")
    assert "0 of 10 chunks" in said("drop")
    assert "10 of 10 chunks" in said("prefetch")
    said("retain", "--hours", "0")
    assert "7 of 10 chunks" in said("drop", "--keep-chunks", "3")
    assert "48 of 160 tokens" in said("lookup")
    bad = quire("cache", "lookup", str(text), "--namespace", str(text), "--gateway", cluster.gateway_address)
    assert bad.returncode == 1 and "InvalidRequest" in bad.stderr


@pytest.mark.parametrize("name", ["gateway", "orchestrator", "scheduler", "decoder-0", "storage-0"])
def test_every_service_has_health_and_reflection(cluster: LocalCluster, name: str) -> None:
    with grpc.insecure_channel(cluster.address(name)) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        service = f"quire.v1.{name.split('-')[0].capitalize()}Service"
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        request = _REQUEST(list_services="")
        listed = next(iter(reflection.ServerReflectionInfo(iter([request]), timeout=5)))
        assert service in {entry.name for entry in listed.list_services_response.service}


def test_wrong_configuration_stops_the_start_with_one_line() -> None:
    environment = {**os.environ, "QUIRE_STORAGE_ARENA_BYTES": "12", "QUIRE_STORAGE_THETA_BYTES": "many"}
    done = fork_server.run([sys.executable, "-m", "quire_storage.server"], env=environment, timeout=30)
    assert done.returncode == 2
    assert "QUIRE_STORAGE_ARENA_BYTES" in done.stderr and "QUIRE_STORAGE_THETA_BYTES" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_benchmarks_write_their_json_and_figure(tmp_path: Path) -> None:
    """The short form of each: the shape that tools read, and a picture."""
    small = ["--context", "512", "--chunk-tokens", "16", "--layers", "4", "--rounds", "2"]
    commands = (
        ("lookup", ["--context", "4096", "--rounds", "20"]),
        ("delivery", small),
        ("delivery", [*small, "--transport", "shm"]),
        ("store", ["--level", "local", "--chunk-kib", "64", "--mib", "4", "--rounds", "2"]),
    )

    def run(at: int) -> None:
        name, extra = commands[at]
        files = tmp_path / f"{at}.json", tmp_path / f"{at}.png"
        done = quire("bench", name, *extra, "--json", str(files[0]), "--plot", str(files[1]), timeout_s=100)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(files[0].read_text())
        assert {"bench", "version", "machine", "baseline", "rows"} <= report.keys()
        assert {"name", "unit"} <= report["baseline"].keys()
        assert len(report["rows"]) == (2 if name == "lookup" else 1), "look-ups are measured with and without tokens"
        for row in report["rows"]:
            assert {"params", "measured", "baseline", "ratio"} == row.keys() and row["ratio"] > 0
        assert files[1].stat().st_size > 2000

    for at in range(len(commands)):  # not at once: they would draw the same ports
        run(at)


def test_a_gateway_is_where_it_usually_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each port where it is free; an operator needs no token on the folder of a cluster that asks for them."""
    usual = dict(zip(("gateway", "http", "s3"), free_ports(3), strict=True))
    monkeypatch.setattr("quire_tools.local.ports.USUAL", usual)
    tokens = {"QUIRE_GATEWAY_AUTH": "tokens"}
    with (
        socket.create_server(("127.0.0.1", usual["s3"])),
        LocalCluster(tmp_path, usual_ports=True, arena_bytes=64 << 20, settings=tokens) as cluster,
    ):
        assert cluster.gateway_address == f"127.0.0.1:{usual['gateway']}"
        assert cluster.http_address == f"127.0.0.1:{usual['http']}"
        assert cluster.s3_address != f"127.0.0.1:{usual['s3']}"
        moved_to = int(cluster.s3_address.rpartition(":")[2])
        assert moved(cluster) == [f"[yellow]port {usual['s3']} is taken[/]: {moved_to} in its place"]
        shown = quire("status", "--folder", str(tmp_path))
        assert "storage-0" in shown.stdout, shown.stderr
        refused = quire("status", "--gateway", cluster.gateway_address)
        assert refused.returncode == 1 and "Unauthenticated" in refused.stderr
        monkeypatch.setenv("QUIRE_CLUSTER_SECRET", cluster.secret)  # as in a service's container
        assert "storage-0" in quire("status", "--admin", cluster.admin_address).stdout
        as_operator = Client(cluster.gateway_address, token=operator_token(cluster.secret))
        with as_operator as client, pytest.raises(Unauthenticated):
            client.status()
        monkeypatch.delenv("QUIRE_CLUSTER_SECRET")
        for options in (["--admin", cluster.admin_address], ["--admin", "a:1", "--gateway", "b:1"]):
            refused = quire("status", *options)
            assert refused.returncode == 1 and "InvalidRequest" in refused.stderr


_LISTS = ("tenant", "policy", "keys")


def test_a_script_reads_a_key_from_json(cluster: LocalCluster) -> None:
    here = ("--folder", str(cluster.folder), "--json")
    made = json.loads(quire("keys", "create", "scripted", *here).stdout)
    assert made["token"] == f"{made['access_key']}:{made['secret_key']}" and made["tenant"] == "scripted"
    again = json.loads(quire("keys", "rotate", made["access_key"], *here).stdout)
    assert again["salt"] == made["salt"] and again["secret_key"] != made["secret_key"]
    assert json.loads(quire("version", "--json").stdout)["quire"] == quire_version
    log, acts = cluster.folder / "logs" / "gateway.log", ["CreateKey", "RotateKey"]
    deadline = time.monotonic() + 30
    while not all(f'"act": "{act}", "object": "{made["access_key"]}' in log.read_text() for act in acts):
        assert time.monotonic() < deadline, "acts on keys are in the gateway's audit log"
        time.sleep(0.2)


def test_bandwidth_and_images_by_hand(tmp_path: Path, cluster: LocalCluster) -> None:
    """Tenants, a calibration, a profile; a latent put, got, listed, removed; each on one line, errors too."""
    where, here = ["--gateway", cluster.gateway_address], ["--folder", str(cluster.folder)]
    assert "weight 2" in quire("tenant", "set", "--salt", "5eed", "--weight", "2", *here).stdout
    assert "stored 8 MiB" in quire("tenant", "set", "alice", "--stored-mib", "8", *here).stdout
    assert "weight 3, cap none, stored 8 MiB" in quire("tenant", "set", "alice", "--weight", "3", *here).stdout
    listed = quire("tenant", "ls", *here).stdout
    assert all(isinstance(json.loads(quire(kind, "ls", "--json", *here).stdout), list) for kind in _LISTS)
    assert tenant_name(b"\x5e\xed") in listed and " 8 " in listed
    bad = quire("tenant", "set", "--salt", "5eed", "--weight", "0", *here)
    assert bad.returncode == 1 and "weight" in bad.stderr and "Traceback" not in bad.stderr
    measured = quire("calibrate", "--payload-mib", "16", "--rounds", "2", "--json", str(tmp_path / "c.json"), *here)
    assert "of the cluster is now" in measured.stdout, measured.stdout + measured.stderr
    assert len(json.loads((tmp_path / "c.json").read_text())["rows"]) >= 3
    assert quire("calibrate", "--device", "abacus", *where).returncode == 1
    profile = tmp_path / "profile.json"
    arguments = ["--inputs", "8,32", "--prefixes", "0,64", "--rounds", "1"]
    done = quire("profile", "--out", str(profile), *arguments, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(profile.read_text())["samples"]) == 4

    latent = tmp_path / "cat.safetensors"
    from quire_tools.local.pictures import VAE_FOLDER

    weights = hashlib.sha256(next(VAE_FOLDER.glob("*.safetensors")).read_bytes()).hexdigest()
    latent.write_bytes(save({"latent": torch.randn(1, 4, 16, 16)}))
    put = quire("images", "put", str(latent), "--weights", weights, "--scale", "4", *where)
    assert "cat: 64 × 64" in put.stdout, put.stdout + put.stderr
    put = quire("images", "put", str(latent), "--weights", weights, "--scale", "4", "--json", *where)
    assert json.loads(put.stdout)["weights_sha256"] == weights
    assert weights in {vae["weights_sha256"] for vae in json.loads(quire("images", "vaes", "--json", *where).stdout)}
    for name in ("cat.png", "cat.webp", "cat.jpg", "cat.avif"):
        got = quire("images", "get", "cat", str(tmp_path / name), *where)
        assert got.returncode == 0, got.stderr
        assert (tmp_path / name).stat().st_size > 200
    assert "64 × 64" in quire("images", "ls", *where).stdout
    told = [json.loads(line) for line in quire("images", "ls", "--json", *where).stdout.splitlines()]
    assert [each["width"] for each in told if each["id"] == "cat"] == [64]
    assert "deleted" in quire("images", "rm", "cat", *where).stdout
    gone = quire("images", "get", "cat", str(tmp_path / "cat.png"), *where)
    assert gone.returncode == 1 and "ImageMissing" in gone.stderr and "Traceback" not in gone.stderr


@pytest.mark.long
def test_plans_and_simulations(tmp_path: Path) -> None:
    """Those that need no cluster: a table, JSON without NaN, a figure."""
    trace = tmp_path / "kv.jsonl"
    requests = [
        {"timestamp": 1000 * n, "input_length": 2048, "hash_ids": [n % 3, 10 + n % 2, 20, 30]} for n in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, requests)))
    accesses = tmp_path / "images.csv"
    accesses.write_text("time_s,object_id\n" + "\n".join(f"{n * 3600},{n * n % 37}" for n in range(3000)))
    commands = {
        "scheduler": ["bench", "scheduler"],
        "index": ["bench", "index", "--chunks", "1000"],
        "kv": ["plan", "kv", "--trace", str(trace)],
        "cluster": ["plan", "cluster", "--trace", str(trace), "--nodes", "3,10"],
        "images": ["plan", "images"],
        "sizes": ["bench", "images", "--sim", "--part", "sizes", "--trace", str(accesses)],
        "alphas": ["bench", "images", "--sim", "--part", "alphas", "--trace", str(accesses)],
        "storage": ["bench", "images", "--storage", "--size", "64"],
        "s3": ["bench", "s3", "--sizes", "64", "--at-once", "4", "--total-mib", "4"],
        "spillover": ["bench", "images", "--sim", "--part", "spillover", "--trace", str(accesses)],
        "table": ["bench", "images", "--sim", "--part", "table", "--trace", str(accesses)],
        "policies": ["bench", "images", "--sim", "--part", "policies", "--trace", str(accesses)],
        "changing": ["bench", "images", "--sim", "--part", "changing", "--trace", str(accesses)],
    }

    def run(name: str) -> None:
        out, picture = tmp_path / f"{name}.json", tmp_path / f"{name}.png"
        done = quire(*commands[name], "--json", str(out), "--plot", str(picture))
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(out.read_text(), parse_constant=_no_json)
        assert report["rows"] and report["baseline"]["name"]
        assert picture.stat().st_size > 5000

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(run, commands))
    bad = quire("plan", "kv", "--trace", str(accesses))
    assert bad.returncode == 1 and "Traceback" not in bad.stderr


@pytest.mark.long
def test_images_live(tmp_path: Path) -> None:
    """The replay through real services, against the store of PNGs."""
    out, picture = tmp_path / "live.json", tmp_path / "live.png"
    size = ["--requests", "15", "--warmup", "15", "--rate", "20", "--size", "64", "--setups", "ImgStore,all forms"]
    done = quire("bench", "images", "--live", *size, "--json", str(out), "--plot", str(picture), timeout_s=110)
    assert done.returncode == 0, done.stdout + done.stderr
    store, ours = json.loads(out.read_text())["rows"]
    assert store["measured"]["latent, %"] == 0
    assert ours["measured"]["mean, ms"] > 0
    assert picture.stat().st_size > 5000


@pytest.mark.long
@pytest.mark.parametrize(
    "size", [["links", "--clients", "50", "--rounds", "1", "--chunks", "16"], ["membership", "--sizes", "5,20"]]
)
def test_many_nodes(tmp_path: Path, size: list[str]) -> None:
    """Links of their own, and what membership costs."""
    out = tmp_path / "bench.json"
    done = quire("bench", *size, "--json", str(out), timeout_s=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(out.read_text())["rows"]) > 1


@pytest.mark.long
def test_images_public(tmp_path: Path) -> None:
    """Latencies and rates of small images over HTTP, for each way of answering."""
    out = tmp_path / "public.json"
    done = quire(
        *["bench", "images", "--public", "--requests", "10", "--seconds", "0.5", "--json"], str(out), timeout_s=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert rows and all(row["measured"] for row in rows)


@pytest.mark.long
def test_images_spillover_live(tmp_path: Path) -> None:
    """Two decoders of injected decode time: a busy one's images are decoded by the other."""
    out = tmp_path / "spillover.json"
    command = ["bench", "images", "--live", "--part", "spillover", "--requests", "60", "--json"]
    done = quire(*command, str(out), timeout_s=110)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, spilling = json.loads(out.read_text())["rows"][:2]
    assert alone["measured"]["moved, %"] == 0 < spilling["measured"]["moved, %"]


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_top_draws_the_cluster(cluster: LocalCluster) -> None:
    done = quire("top", "--rounds", "2", "--interval-s", "0.2", "--gateway", cluster.gateway_address)
    assert done.returncode == 0, done.stderr
    for text in ("storage-0", "link default", "delivered", "transfers"):
        assert text in done.stdout, done.stdout


def test_certificates_are_made_and_made_again(tmp_path: Path) -> None:
    """The second time the authority is the same and the certificates are others; only the owner can read keys."""
    folder = tmp_path / "certs"
    first = quire("certs", str(folder), "--host", "gateway.example")
    assert first.returncode == 0, first.stderr
    assert f"QUIRE_CLUSTER_CA={folder}/ca.pem" in first.stdout

    def files() -> dict[str, bytes]:
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    before = files()
    assert quire("certs", str(folder)).returncode == 0
    after = files()
    same = {name for name in before if before[name] == after[name]}
    assert same == {"ca.pem", "ca-key.pem", *(name for name in before if name.endswith("ca.crt"))}
    assert {name for name in before if name.endswith("tls.crt")} >= {"storage/tls.crt", "operator/tls.crt"}
    assert all((folder / name).stat().st_mode & 0o077 == 0 for name in before if name.endswith((".key", "-key.pem")))
    assert quire("certs", str(folder), "--days", "0").returncode == 1
