"""The real LMCache with Quire as its second level: its own verification, a server that restarts, faults."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.client import Client
from quire.model.nodes import Role
from quire_tools.engines.vllm import any_vllm
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from tests.engines.engine import PROMPT, engine
from tests.engines.s3 import access
from tests.polling import until

pytest.importorskip("lmcache", reason="LMCache is not installed here: `make test-engines` installs it")

LMCACHE = str(Path(sys.executable).parent / "lmcache")
CHUNK = 64
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, dimension, float32
SIZE, OBJECTS = 96 << 10, 8


def _plugin(gateway: str, **params: Any) -> dict[str, Any]:
    params = {"gateway": gateway, **params}
    where = {"module_path": "quire.integrations.lmcache", "class_name": "QuireL2Adapter"}
    return {"type": "plugin", **where, "adapter_params": params}


def test_its_own_verification_passes(engine_cluster: LocalCluster) -> None:
    """`lmcache bench l2`: every byte that was stored comes back, and what was not stored is not found."""
    command = [LMCACHE, "bench", "l2", "--l2-adapter", json.dumps(_plugin(engine_cluster.gateway_address))]
    command += ["--no-skip-verify", "--num-keys", "16", "--data-size-kb", "200", "--rounds", "2"]
    command += ["--lookup-max-hit-rate", "1.0"]  # it looks up what is not there otherwise
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr[-3000:]
    assert "All 16 keys data verified OK" in told.stdout
    assert told.stdout.count("Total success:                                                32") == 3


class _Adapter:
    """The plug-in, as LMCache's controllers use it: tasks, and descriptors that say when they have ended."""

    def __init__(self, gateway: str, **params: Any) -> None:
        from lmcache.v1.distributed.internal_api import L1MemoryDesc

        from quire.integrations.lmcache import QuireL2Adapter

        self.memory = np.zeros(OBJECTS * SIZE, dtype=np.uint8)
        desc = L1MemoryDesc(self.memory.ctypes.data, self.memory.nbytes, 4096)
        self.plugin = QuireL2Adapter({"gateway": gateway, **params}, desc)

    def objects(self, outside: np.ndarray[Any, np.dtype[np.uint8]] | None = None) -> list[Any]:
        memory = self.memory if outside is None else outside
        return [SimpleNamespace(byte_array=memory[at * SIZE :][:SIZE].data) for at in range(OBJECTS)]

    def store(self, keys: list[Any], objects: list[Any]) -> bool:
        task = self.plugin.submit_store_task(keys, objects)
        return bool(self._ended(self.plugin.get_store_event_fd(), self.plugin.pop_completed_store_tasks)[task] >= 0)

    def found(self, keys: list[Any]) -> int:
        task = self.plugin.submit_lookup_and_lock_task(keys, {})
        fd = self.plugin.get_lookup_and_lock_event_fd()
        return int(self._ended(fd, lambda: self.plugin.query_lookup_and_lock_result(task)).popcount())

    def load(self, keys: list[Any], objects: list[Any]) -> int:
        task = self.plugin.submit_load_task(keys, objects)
        fd = self.plugin.get_load_event_fd()
        return int(self._ended(fd, lambda: self.plugin.query_load_result(task)).popcount())

    def _ended(self, fd: int, ask: Callable[[], Any]) -> Any:
        assert select.select([fd], [], [], 30)[0], "the task's end"
        os.eventfd_read(fd)
        return ask()


@pytest.fixture
def adapter(engine_cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[_Adapter]:
    made = _Adapter(engine_cluster.gateway_address, **getattr(request, "param", {}))
    yield made
    made.plugin.close()


def _keys(model: str = "m") -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    return [ObjectKey(bytes([at]) * 32, model, 0) for at in range(OBJECTS)]


@pytest.mark.parametrize("adapter", [{}, {"zero_copy": True}], indirect=True)
def test_what_was_stored_is_loaded(adapter: _Adapter) -> None:
    """Into LMCache's own memory and into other; a key of another model, or of another size, is not there."""
    wanted = np.random.default_rng(0).integers(0, 256, OBJECTS * SIZE, dtype=np.uint8)
    adapter.memory[:] = wanted
    assert adapter.found(_keys()) == 0
    assert adapter.store(_keys()[:4], adapter.objects()[:4])
    adapter.memory[:] = 0
    outside = wanted.copy()
    assert adapter.store(_keys()[4:], adapter.objects(outside)[4:])
    assert adapter.found(_keys()) == OBJECTS and adapter.found(_keys("other")) == 0
    assert adapter.load(_keys(), adapter.objects()) == OBJECTS
    assert np.array_equal(adapter.memory, wanted)
    outside[:] = 0
    assert adapter.load(_keys(), adapter.objects(outside)) == OBJECTS
    assert np.array_equal(outside, wanted)
    half = [SimpleNamespace(byte_array=each.byte_array[: SIZE // 2]) for each in adapter.objects()]
    assert adapter.load(_keys(), half) == 0
    adapter.plugin.delete(_keys()[:2])
    until(lambda: adapter.found(_keys()) == OBJECTS - 2, "two are gone")


def test_a_node_that_was_killed_costs_its_objects(adapter: _Adapter, engine_cluster: LocalCluster) -> None:
    assert adapter.store(_keys(), adapter.objects())
    os.kill(engine_cluster.pid("storage-0"), signal.SIGKILL)
    assert adapter.load(_keys(), adapter.objects()) == 0
    assert not adapter.store(_keys("other"), adapter.objects())


@pytest.mark.parametrize("adapter", [{"timeout_s": 1.0}], indirect=True)
def test_a_node_that_hangs_is_not_waited_for_where_loads_are_staged(
    adapter: _Adapter, engine_cluster: LocalCluster
) -> None:
    adapter.memory[:] = 7
    assert adapter.store(_keys(), adapter.objects())
    pid = engine_cluster.pid("storage-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        adapter.memory[:] = 3
        began_s = time.monotonic()
        assert adapter.load(_keys(), adapter.objects()) == 0
        assert time.monotonic() - began_s < 10
    finally:
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)
    assert (adapter.memory == 3).all(), "what comes late comes to staging memory"


@pytest.mark.parametrize("adapter", [{"lookup_timeout_s": 0.3, "away_s": 0.2, "timeout_s": 1.0}], indirect=True)
def test_a_gateway_that_is_away_is_left_alone_and_used_again(adapter: _Adapter, engine_cluster: LocalCluster) -> None:
    assert adapter.store(_keys(), adapter.objects())
    engine_cluster.kill("gateway")
    assert adapter.found(_keys()) == 0 and not adapter.plugin.report_status()["is_healthy"]
    assert not adapter.store(_keys("other"), adapter.objects()) and adapter.load(_keys(), adapter.objects()) == 0
    engine_cluster.restart("gateway")
    until(lambda: adapter.found(_keys()) == OBJECTS, "it is used again", timeout_s=20)


@contextmanager
def _server(gateway: str, log: Path) -> Iterator[int]:
    """Its port."""
    port, http = free_ports(2)
    command = [LMCACHE, "server", "--host", "localhost", "--port", str(port), "--http-port", str(http)]
    command += ["--chunk-size", str(CHUNK), "--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--max-workers", "1"]
    command += ["--disable-observability", "--supported-transfer-mode", "engine_driven", "--shm-name", f"quire{port}"]
    command += ["--l2-adapter", json.dumps(_plugin(gateway))]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            until(lambda: _listens(port) or process.poll() is not None, "the LMCache server listens", timeout_s=60)
            assert process.poll() is None, log.read_text()[-3000:]
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def _until_used(gateway: str, length: int) -> None:
    with Client(gateway) as client:
        until(
            lambda: sum(node.used_bytes for node in client.status() if node.role is Role.STORAGE) >= length,
            "it is in Quire",
        )


def test_tokens_come_back_after_the_servers_restart(
    tiny_model: Path, engine_cluster: LocalCluster, tmp_path: Path
) -> None:
    """vLLM behind LMCache; the second server and the second vLLM have nothing of their own."""
    from vllm.config import KVTransferConfig

    with engine(tiny_model) as alone:
        expected = alone.tokens(PROMPT)[0]
    seen = []
    for turn in ("first", "second"):
        with _server(engine_cluster.gateway_address, tmp_path / turn) as port:
            transfer = KVTransferConfig(
                kv_connector="LMCacheMPConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"lmcache.mp.port": port, "lmcache.mp.host": "tcp://localhost"},
            )
            with any_vllm(tiny_model, transfer) as vllm:
                seen.append(vllm.tokens(PROMPT))
                if turn == "first":  # LMCache stores behind the answer
                    stored = (len(PROMPT) - 1) // CHUNK * CHUNK * TOKEN_BYTES
                    _until_used(engine_cluster.gateway_address, stored)
    assert [answer for answer, _ in seen] == [expected, expected]
    assert [cached for _, cached in seen] == [0, (len(PROMPT) - 1) // CHUNK * CHUNK]


_DOMAIN, _BUCKET = "s3.quire.test", "lmcache"


@pytest.fixture
def named_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """One whose S3 frontend knows a domain."""
    settings = {"QUIRE_GATEWAY_S3_DOMAIN": _DOMAIN}
    folder = tmp_path / "cluster"
    with LocalCluster(folder, arena_bytes=128 << 20, drive_bytes=128 << 20, settings=settings) as cluster:
        yield cluster


def _with_names(hosts: Path, command: list[str]) -> list[str]:
    """Where the bucket's name leads to this host, for that command alone. Skips where that takes a right we lack."""
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 {_BUCKET}.{_DOMAIN}\n")
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(hosts)]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace may be made here, and LMCache's S3 level wants names of a domain")
    return [*prefix, *command]


def test_its_s3_level_keeps_chunks_in_the_s3_frontend(named_cluster: LocalCluster, tmp_path: Path) -> None:
    """No code of ours is between them: LMCache's own verification of its own S3 client."""
    key, secret = asyncio.run(access(named_cluster, "lmcache", _BUCKET))
    port = named_cluster.s3_address.rpartition(":")[2]
    level = {"type": "s3", "s3_endpoint": f"{_BUCKET}.{_DOMAIN}:{port}", "s3_region": "us-east-1", "disable_tls": True}
    level |= {
        "s3_prefer_http2": False,
        "aws_access_key_id": key,
        "aws_secret_access_key": secret,
        "s3_num_io_threads": 2,
    }
    command = [LMCACHE, "bench", "l2", "--l2-adapter", json.dumps(level)]
    command += ["--no-skip-verify", "--num-keys", "16", "--data-size-kb", "200", "--rounds", "2"]
    command += ["--lookup-max-hit-rate", "1.0"]  # it looks up what is not there otherwise
    told = subprocess.run(_with_names(tmp_path / "hosts", command), capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr[-3000:]
    assert "All 16 keys data verified OK" in told.stdout, told.stdout[-3000:] + told.stderr[-3000:]
