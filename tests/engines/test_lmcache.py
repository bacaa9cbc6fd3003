"""The real LMCache with Quire as its second level: its own verification, a server that restarts, faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire_tools.bench.engines.vllm import any_vllm
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from tests.engines.engine import PROMPT, engine, until

pytest.importorskip("lmcache", reason="LMCache is not installed here: `make test-engines` installs it")

LMCACHE = str(Path(sys.executable).parent / "lmcache")
CHUNK = 64


def _plugin(gateway: str, **params: Any) -> dict[str, Any]:
    params = {"gateway": gateway, **params}
    where = {"module_path": "quire.integrations.lmcache", "class_name": "QuireL2Adapter"}
    return {"type": "plugin", **where, "adapter_params": params}


def test_its_own_verification_passes(engine_cluster: LocalCluster) -> None:
    """`lmcache bench l2`: every byte that was stored comes back, and what was not stored is not found."""
    command = [LMCACHE, "bench", "l2", "--l2-adapter", json.dumps(_plugin(engine_cluster.gateway_address))]
    command += ["--no-skip-verify", "--num-keys", "16", "--data-size-kb", "200", "--rounds", "2"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr[-3000:]
    assert "All 16 keys data verified OK" in told.stdout
    assert told.stdout.count("Total success:                                                32") == 2


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
            until(lambda: _listens(port) or process.poll() is not None, "the LMCache server listens", 60)
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
            time.sleep(3)  # LMCache stores behind the answer
    assert [answer for answer, _ in seen] == [expected, expected]
    assert [cached for _, cached in seen] == [0, (len(PROMPT) - 1) // CHUNK * CHUNK]
