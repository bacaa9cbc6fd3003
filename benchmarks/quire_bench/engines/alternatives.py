"""What a vLLM user may choose from, each with what it keeps across a restart: for `quire bench engines --against`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.client import Client
from quire.model.errors import InternalError
from quire.model.nodes import Role
from quire.wire.addresses import host_and_port
from quire_bench.peers.stores import redis_server, redis_used_bytes
from quire_tools.engines.vllm import Engine, any_vllm, vllm_engine
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports

_LMCACHE_CHUNK: Final = 64
_READY_S: Final = 60.0
Settings = dict[str, Any]
Start = Callable[[], AbstractContextManager[Engine]]


@dataclass(frozen=True, slots=True)
class Kept:
    """A cache that stays while engines come and go. `start`: an engine with it; `stored_bytes`: what it holds now."""

    start: Start
    stored_bytes: Callable[[], float]


Way = Callable[[Path, Path, Settings, int], AbstractContextManager[Kept]]
"""Model, a folder of its own, vLLM's settings, and bytes that it has room for."""


@contextmanager
def alone(model: Path, folder: Path, settings: Settings, room_bytes: int) -> Iterator[Kept]:
    """VLLM with its own prefix cache: nothing outlives it."""
    yield Kept(lambda: any_vllm(model, None, **settings), lambda: 0.0)


@contextmanager
def disk(model: Path, folder: Path, settings: Settings, room_bytes: int) -> Iterator[Kept]:
    """VLLM's example of a connector: a file for each layer of a prompt; it finds whole prompts only."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(folder)},
    )
    yield Kept(lambda: any_vllm(model, transfer, **settings), lambda: _size(folder))


@contextmanager
def lmcache_files(model: Path, folder: Path, settings: Settings, room_bytes: int) -> Iterator[Kept]:
    """LMCache's server over a folder. The server restarts with the engine."""
    second = {"type": "fs_native", "base_path": str(folder)}
    yield Kept(lambda: _behind_lmcache(model, settings, second, room_bytes), lambda: _size(folder))


@contextmanager
def lmcache_redis(model: Path, folder: Path, settings: Settings, room_bytes: int) -> Iterator[Kept]:
    """LMCache's server over Redis. The server restarts with the engine."""
    with redis_server(folder) as address:
        host, port = host_and_port(address)
        second = {"type": "resp", "host": host, "port": port}
        base = redis_used_bytes(address)
        yield Kept(
            lambda: _behind_lmcache(model, settings, second, room_bytes),
            lambda: redis_used_bytes(address) - base,
        )


@contextmanager
def quire(model: Path, folder: Path, settings: Settings, room_bytes: int) -> Iterator[Kept]:
    """Quire's connector, as it is without any setting but the gateway's address."""
    slab = {"QUIRE_STORAGE_SLAB_BYTES": str(16 << 20)}
    with LocalCluster(folder, arena_bytes=room_bytes, drive_bytes=room_bytes, settings=slab) as cluster:

        def stored() -> float:
            with Client(cluster.gateway_address) as client:
                return float(sum(node.used_bytes for node in client.status() if node.role is Role.STORAGE))

        yield Kept(lambda: vllm_engine(model, cluster.gateway_address, {}, **settings), stored)


def ways() -> dict[str, Way]:
    """By name; what is not installed is left out."""
    found: dict[str, Way] = {"vLLM alone": alone, "vLLM, its disk connector": disk}
    try:
        import lmcache  # noqa: F401

        found |= {"LMCache, files": lmcache_files, "LMCache, Redis": lmcache_redis}
    except ImportError:
        pass
    return found | {"Quire": quire}


@contextmanager
def _behind_lmcache(model: Path, settings: Settings, second: dict[str, Any], room_bytes: int) -> Iterator[Engine]:
    from vllm.config import KVTransferConfig

    port, http = free_ports(2)
    command = [str(Path(sys.executable).parent / "lmcache"), "server", "--host", "localhost", "--port", str(port)]
    command += ["--http-port", str(http), "--chunk-size", str(_LMCACHE_CHUNK), "--eviction-policy", "LRU"]
    command += ["--l1-size-gb", f"{max(0.25, room_bytes / 1e9):.2f}", "--max-workers", "1", "--disable-observability"]
    command += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"quire{port}"]
    command += ["--l2-adapter", json.dumps(second)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _until_listening(port, process)
            transfer = KVTransferConfig(
                kv_connector="LMCacheMPConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"lmcache.mp.port": port, "lmcache.mp.host": "tcp://localhost"},
            )
            with any_vllm(model, transfer, **settings) as engine:
                yield engine
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + _READY_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > until_s:
            raise InternalError("LMCache's server does not start")
        time.sleep(0.1)


def _size(folder: Path) -> float:
    return float(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
