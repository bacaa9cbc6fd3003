"""A real SGLang with Quire's external linker: the same tokens, by another engine, whatever happens to the node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.client import Client
from quire.model.nodes import Role
from quire_tools.local import LocalCluster
from tests.engines import stubs
from tests.engines.engine import PROMPT
from tests.polling import until

stubs.install()
pytest.importorskip("sglang", reason="SGLang is not installed here: `make test-engines` installs it")
PAGE = 32
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE
PAGE_BYTES = PAGE * 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, dimension, float32


class _Sglang:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        return self._say(json.dumps(prompt))

    def _say(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith("{"):
                told: dict[str, Any] = json.loads(answer)
                return told
        raise AssertionError("SGLang has ended")

    def tokens(self, prompt: list[int]) -> tuple[list[int], int]:
        told = self.ask(prompt)
        assert "error" not in told, told
        return told["tokens"], told["cached"]

    def forget(self) -> None:
        self._say("")


@contextmanager
def _sglang(model: Path, log: Path, gateway: str = "", **extra: Any) -> Iterator[_Sglang]:
    settings: dict[str, Any] = {}
    if gateway:
        linker = {"linker": "QuireLinker", "linker_module_path": "quire.integrations.sglang"}
        settings = {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {**linker, "linker_extra_config": {"gateway": gateway, **extra}},
        }
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parent / 'sglang_site'}:{root}",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    command = [sys.executable, "-m", "tests.engines.sglang_run", str(model), json.dumps(settings)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=root
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            assert any(line.startswith("ready") for line in process.stdout), log.read_text()[-3000:]
            yield _Sglang(process)
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _stored(cluster: LocalCluster, pages: int) -> None:
    with Client(cluster.gateway_address) as client:
        until(
            lambda: sum(node.used_bytes for node in client.status() if node.role is Role.STORAGE) >= pages * PAGE_BYTES,
            f"{pages} pages are stored",
            timeout_s=30,
        )


def test_tokens_are_the_same_from_quire(tiny_model: Path, engine_cluster: LocalCluster, tmp_path: Path) -> None:
    """By the same engine after it has forgotten, by another one, and for a prompt that goes another way half-way."""
    other = [*PROMPT[:700], *([7] * 40)]
    with _sglang(tiny_model, tmp_path / "alone") as alone:
        expected, expected_other = alone.tokens(PROMPT)[0], alone.tokens(other)[0]
    gateway = engine_cluster.gateway_address
    with _sglang(tiny_model, tmp_path / "first", gateway) as first:
        assert first.tokens(PROMPT) == (expected, 0)
        _stored(engine_cluster, WHOLE // PAGE)
        first.forget()
        assert first.tokens(PROMPT) == (expected, WHOLE)
        assert first.tokens(other) == (expected_other, 700 // PAGE * PAGE), "on the device, and not asked for"
    with _sglang(tiny_model, tmp_path / "second", gateway) as second:
        assert second.tokens(other)[0] == expected_other
        assert second.tokens(PROMPT) == (expected, WHOLE), "its beginning on the device, the rest from Quire"
        second.forget()
        os.kill(engine_cluster.pid("storage-0"), signal.SIGKILL)
        told = second.ask(PROMPT)  # SGLang ends a request whose load had begun when it failed
        assert told.get("tokens") == expected or "503" in told["error"]
        until(lambda: second.ask(PROMPT).get("tokens") == expected, "without the node it is computed", timeout_s=30)
        second.forget()
        engine_cluster.kill("gateway")
        assert second.tokens(PROMPT)[0] == expected


def test_loads_have_the_window_that_the_last_loads_measured(tiny_model: Path, tmp_path: Path) -> None:
    """The first load measures it; the scheduler learns from those behind it."""
    layerwise = {"QUIRE_STORAGE_THETA_BYTES": "0"}
    with (
        LocalCluster(tmp_path / "cluster", arena_bytes=128 << 20, drive_bytes=128 << 20, settings=layerwise) as cluster,
        Client(cluster.gateway_address) as client,
        _sglang(tiny_model, tmp_path / "log", cluster.gateway_address) as sglang,
    ):
        expected, _ = sglang.tokens(PROMPT)
        _stored(cluster, WHOLE // PAGE)

        def learned() -> bool:
            sglang.forget()
            assert sglang.tokens(PROMPT) == (expected, WHOLE)
            return any(node.stats.get("observed", 0) for node in client.status())

        until(learned, "the scheduler hears of a load", timeout_s=60)
