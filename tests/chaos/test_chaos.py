"""Faults at random under load, and afterwards the history against a model. `make chaos`; the short form is in CI.

QUIRE_CHAOS_SEED replays a run, QUIRE_CHAOS_SECONDS says for how long. Seeds and recovery times are printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire_server.redis import AccessKeys, connect
from tests.chaos import history, load
from tests.chaos.faults import Faults, small_object_tier
from tests.chaos.proxy import Proxy
from tests.chaos.world import World, can_make_networks
from tests.e2e import s3_signing

SECONDS = float(os.environ.get("QUIRE_CHAOS_SECONDS", "9"))
SEEDS = [int(seed) for seed in os.environ.get("QUIRE_CHAOS_SEED", "1").split(",")]
NETWORKS = can_make_networks() and os.environ.get("QUIRE_CHAOS_NETWORKS", "1") == "1"
_ALL_KINDS = ["redis-kept", "redis-emptied", "redis-cluster", "drive-lost"]
KINDS = _ALL_KINDS if "QUIRE_CHAOS_SECONDS" in os.environ else ["drive-lost"]
"""All of them in `make chaos`."""
WORKERS = 6
QUIET_S = 60.0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 240)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_plug_can_be_pulled(tmp_path: Path, seed: int, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No acknowledged chunk or object is lost at its level, no byte is wrong, every request is answered in time, and
    nothing is left running when all is quiet. Redis emptied loses the names of objects, and a master of a Cluster that
    dies loses the last of them, which its replica had not yet: they are in the other runs.
    """
    lossy = kind in ("redis-emptied", "redis-cluster")
    with contextlib.ExitStack() as stack:
        if NETWORKS:
            stack.enter_context(small_object_tier(tmp_path, size_mib=1024))
        world = stack.enter_context(World(tmp_path, networks=NETWORKS, shards=kind == "redis-cluster"))
        key = asyncio.run(_bucket(world)) if not lossy else ("", "")
        file = tmp_path / "history.jsonl"
        levels = history.ONE_NODE if kind != "drive-lost" else history.MORE_NODES
        with _load(world, file, seed, key, s3=not lossy):
            faults = _torment(world, Faults(world, seed, lossy=lossy), file)
            if kind == "drive-lost":
                faults.append(_lose_a_drive(world, file))
        events = history.read(file)
        with capsys.disabled():
            print(f"\nseed {seed}, {len(events)} requests: {history.summary(events)}")
            for line in faults:
                print(f"  {line}")
        assert not history.problems(events)
        assert lossy or not history.missed(events)
        assert sum(event.op == "fetch" and not event.error for event in events) > 20
        command = [
            sys.executable,
            "-m",
            "tests.chaos.verify",
            str(file),
            str(seed),
            json.dumps(_job(world, key)),
            *levels,
        ]
        done = subprocess.run(
            command, env=_environment(world), capture_output=True, text=True, timeout=QUIET_S + 120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def _torment(world: World, faults: Faults, file: Path) -> list[str]:
    """One fault after the other; what was done, and how long it took until requests of each kind went well again."""
    lines, until = [], time.monotonic() + SECONDS
    while time.monotonic() < until:
        fault, began = faults.draw(), time.monotonic()
        fault.inject()
        time.sleep(faults.hold_s())
        fault.heal()
        healed = time.monotonic()
        recovered = _recovered(file, healed)
        held = healed - began
        lines.append(f"{fault.kind:<12}{fault.target:<16} for {held:4.1f} s, all well {recovered} after")
    return lines


def _lose_a_drive(world: World, file: Path) -> str:
    """A node comes back with nothing: what was acknowledged on two nodes, or in the object tier, is still there."""
    world.kill("storage-1")
    shutil.rmtree(world.folder / "storage-1")
    time.sleep(2)
    world.restart("storage-1")
    return f"drive lost  storage-1        all well {_recovered(file, time.monotonic())} after"


def _recovered(file: Path, healed_s: float) -> str:
    """Stores and fetches that began after the fault was healed, and went well."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        well = {event.op: event.ended_s for event in reversed(history.read(file)) if _went_well(event, healed_s)}
        if {"store", "fetch"} <= well.keys():
            return f"{max(well['store'], well['fetch']) - healed_s:5.2f} s"
        time.sleep(0.1)
    raise AssertionError("no store and no fetch goes well, 30 s after the fault is gone")


def _went_well(event: history.Event, since_s: float) -> bool:
    return event.began_s > since_s and not event.error and (event.op != "fetch" or event.got > 0)


@contextlib.contextmanager
def _load(world: World, file: Path, seed: int, key: tuple[str, str], *, s3: bool) -> Iterator[None]:
    job = _job(world, key) | {"seed": seed, "history": str(file), "workers": WORKERS, "s3": s3}
    job_file = file.with_name("job.json")
    job_file.write_text(json.dumps(job))
    log = file.with_name("load.log").open("wb")
    running = subprocess.Popen(
        [sys.executable, "-m", load.__name__, str(job_file)], env=_environment(world), stdout=log, stderr=log
    )
    try:
        time.sleep(3)
        yield
        assert running.poll() is None, "the load ended:\n" + file.with_name("load.log").read_text()[-3000:]
        running.terminate()
        running.wait(history.DEADLINE_S + 20)
    finally:
        running.kill()
        running.wait()
        log.close()


def _job(world: World, key: tuple[str, str]) -> dict[str, Any]:
    return {
        "gateway": world.gateway_address,
        "s3_address": world.s3_address,
        "key": key,
        "metrics": world.metrics,
    }


def _environment(world: World) -> dict[str, str]:
    return {**os.environ, **world.client_environment, "PYTHONPATH": "."}


async def _bucket(world: World) -> tuple[str, str]:
    redis = connect(world.redis_url)
    keys = AccessKeys(redis, world.secret.encode())
    key = await keys.create("chaos")
    await redis.aclose()
    pair = (key.name, keys.secret(key))
    status, _, body = await s3_signing.request("PUT", f"http://{world.s3_address}/chaos", pair)
    assert status == 200, body
    return pair


def test_the_model_notices_what_must_not_happen() -> None:
    """A checker that cannot fail proves nothing."""
    good = history.Event("fetch", 1, 2, "", 0.0, 1.0, 2)
    assert not history.problems([good])
    late = history.Event("fetch", 1, 2, "", 0.0, history.DEADLINE_S + history.GRACE_S + 1)
    wrong = history.Event("fetch", 1, 2, "", 0.0, 1.0, 2, "", True)
    silent = history.Event("fetch", 1, 2, "", 0.0, 1.0, 0, history.NO_ANSWER)
    bug = history.Event("get", 1, 0, "", 0.0, 1.0, 0, "KeyError('x')")
    gone = history.Event("get", 1, 0, "", 0.0, 1.0, 0, "HTTP 404")
    away = history.Event("get", 1, 0, "", 0.0, 1.0, 0, "HTTP 503")
    assert len(history.problems([good, late, wrong, silent, bug, gone, away])) == 5
    kept = history.Event("store", 4, 2, "OBJECT", 0.0, 1.0, 2)
    before, after = history.Event("fetch", 4, 2, "", 0.5, 2.0, 1), history.Event("fetch", 4, 2, "", 1.5, 3.0, 1)
    assert len(history.missed([kept, before, after])) == 1
    stored = history.Event("store", 1, 2, "LOCAL", 0.0, 1.0, 2)
    lost = history.Event("store", 2, 2, "MEMORY", 0.0, 1.0, 2)
    failed = history.Event("store", 3, 2, "LOCAL", 0.0, 1.0, 0, "Unavailable")
    assert history.promised([stored, lost, failed]).keys() == {1}
    puts = [history.Event("put", 1, 0, "", 0, 1), history.Event("put", 2, 0, "", 0, 1)]
    deletes = [history.Event("delete", 1, 0, "", 2, 3), history.Event("delete", 2, 0, "", 2, 3, 0, "OSError")]
    assert history.promised_objects([*puts, *deletes]) == {1: False}


def test_a_proxy_that_drops_answers_still_passes_requests() -> None:
    """Answers only are dropped, and a connection whose answers were dropped is broken when they pass again."""
    received: list[bytes] = []

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listening.accept()[0]
                while data := connection.recv(100):
                    received.append(data)
                    connection.sendall(data.upper())

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        proxy = Proxy("127.0.0.1", [f"127.0.0.1:{listening.getsockname()[1]}"])
        host, _, port = proxy.addresses[0].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(b"a")
            assert client.recv(10) == b"A"
            proxy.drop_answers()
            client.sendall(b"b")
            deadline = time.monotonic() + 10
            while received != [b"a", b"b"] and time.monotonic() < deadline:
                time.sleep(0.01)
            assert received == [b"a", b"b"]
            proxy.pass_answers()
            assert client.recv(10) == b"", "its answer never arrives"
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(b"c")
            assert client.recv(10) == b"C"
        proxy.close()
