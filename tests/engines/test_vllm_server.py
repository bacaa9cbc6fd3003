"""vLLM as people run it: the OpenAI server, its engine and its worker in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from tests.engines.engine import BLOCK, PROMPT, engine
from tests.polling import until

WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK


class _Server:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def tokens(self, prompt: list[int]) -> tuple[list[int], int]:
        """The next eight, and how many of the prompt's were cached."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            self._url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.load(answer)
        details = told["usage"].get("prompt_tokens_details") or {}
        return told["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def figure(self, name: str) -> float:
        """Of the Prometheus page, all engines together."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:quire_{name}_total"))


@contextmanager
def _server(model: Path, gateway: str, log: Path, *more: str) -> Iterator[_Server]:
    (port,) = free_ports(1)
    transfer: dict[str, Any] = {
        "kv_connector": "QuireConnector",
        "kv_connector_module_path": "quire.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"gateway": gateway, "cut_off": False},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", str(BLOCK)]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer), *more]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        server = _Server(port)
        try:
            deadline = time.monotonic() + 100
            while True:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                try:
                    server.get("/health")
                    break
                except OSError:
                    time.sleep(0.5)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def test_the_server_takes_what_another_engine_has_stored(
    tiny_model: Path, engine_cluster: LocalCluster, tmp_path: Path
) -> None:
    with engine(tiny_model, engine_cluster.gateway_address) as here:
        expected, _ = here.tokens(PROMPT)
        until(lambda: here.figures().get("stored_blocks", 0) > 0, "stored")
    with _server(tiny_model, engine_cluster.gateway_address, tmp_path / "log") as server:
        assert server.tokens(PROMPT) == (expected, WHOLE)
        until(lambda: server.figure("loaded_blocks") == WHOLE // BLOCK, "Prometheus has it")
        assert server.figure("failed_blocks") == 0
