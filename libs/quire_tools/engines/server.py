"""vLLM's OpenAI server on the CPU, in processes of its own, for demos and tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from quire.model.errors import InternalError
from quire_tools.engines.vllm import BLOCK, prepare
from quire_tools.local.ports import free_ports

_STOP_S: Final = 20.0
_LOOK_S: Final = 0.5
_LOG_SHOWN: Final = 2000


class EngineServer:
    """A server of vLLM.

    Args:
        port: It listens at.
        process: It, or its parent.
        log: Its output.
    """

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self._log = log

    def ready(self) -> None:
        """Wait until it answers. Raises `InternalError` if it has ended."""
        while True:
            if self.process.poll() is not None:
                raise InternalError(f"vLLM has ended with {self.process.returncode}: {self._end_of_log()}")
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(_LOOK_S)

    def get(self, path: str) -> str:
        """Return the text at a path."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def complete(
        self, prompt: Sequence[int], count: int, parameters: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Generate `count` tokens greedily, and return the answer's JSON.

        Args:
            prompt: Tokens.
            count: Tokens to generate.
            parameters: `kv_transfer_params` of the request.
        """
        return complete(self.url, prompt, count, parameters)

    def figure(self, name: str) -> float:
        """Return a figure of Quire's connector, of all its engines together."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:quire_{name}_total"))

    def kill(self) -> None:
        """Kill it; its engine and worker are processes of their own."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Stop all of its processes."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_SHOWN:]


def complete(
    url: str, prompt: Sequence[int], count: int, parameters: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Ask an OpenAI server for `count` greedy tokens, and return its JSON."""
    body = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if parameters is not None:
        body["kv_transfer_params"] = dict(parameters)
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        response: dict[str, Any] = json.load(answer)
    return response


@contextmanager
def engine_server(
    model: Path,
    log: Path,
    *arguments: str,
    gateway: str = "",
    role: str = "kv_both",
    context: int = 2048,
    cache_bytes: int = 64 << 20,
    **extra: Any,
) -> Iterator[EngineServer]:
    """Start a server for the time of the context; it answers once `ready` returns.

    Args:
        model: Folder of the model.
        log: File for its output.
        arguments: Further arguments of the server.
        gateway: Address of Quire's gateway; empty for vLLM alone.
        role: `kv_role`.
        context: Longest sequence, tokens.
        cache_bytes: Memory for its KV cache.
        extra: The connector's settings.
    """
    prepare()
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(context), "--max-num-seqs", "4", "--block-size", str(BLOCK)]
    command += ["--kv-cache-memory-bytes", str(cache_bytes), "--enable-prompt-tokens-details"]
    if gateway:
        transfer = {
            "kv_connector": "QuireConnector",
            "kv_connector_module_path": "quire.integrations.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"gateway": gateway, "cut_off": False, **extra},
        }
        command += ["--kv-transfer-config", json.dumps(transfer), "--prefix-caching-hash-algo", "sha256_cbor"]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (
        log.open("w") as out,
        subprocess.Popen(
            [*command, *arguments], stdout=out, stderr=out, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            yield EngineServer(port, process, log)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
