"""The compose file's containers, run for real: `make test-containers`. Skipped without QUIRE_TEST_COMPOSE."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.client import SyncClient
from quire.errors import QuireError

ROOT = Path(__file__).parents[2]
COMPOSE = os.environ.get("QUIRE_TEST_COMPOSE", "")
GATEWAY = "127.0.0.1:7410"
MEMBERS = {"gateway-0", "storage-0", "storage-1", "decoder-0"}

pytestmark = pytest.mark.skipif(not COMPOSE, reason="QUIRE_TEST_COMPOSE names no compose command")


def _compose(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*shlex.split(COMPOSE), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """Up, with images that are built already."""
    up = _compose("up", "-d", "--no-build")
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        deadline = time.monotonic() + 90
        while (missing := MEMBERS - _members()) and time.monotonic() < deadline:
            time.sleep(1)
        assert not missing, f"{missing} did not join:\n{_compose('logs').stdout[-6000:]}"
        yield
    finally:
        _compose("down", "-v")


def _members() -> set[str]:
    try:
        with SyncClient(GATEWAY, timeout_s=2) as client:
            return {node.node_id for node in client.status()}
    except QuireError:
        return set()


def test_the_demo_against_containers(running: None, tmp_path: Path) -> None:
    """KV out of this process's memory into the containers and back, images put and got."""
    command = [sys.executable, "-c", "from quire.cli import main; main()", "demo", "--endpoint", GATEWAY]
    environment = {**os.environ, "UCX_TCP_BRIDGE_ENABLE": "y"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + _compose("logs").stdout[-6000:]
    assert "bit-identical" in done.stdout, done.stdout


def test_a_container_that_is_killed_comes_back(running: None) -> None:
    """As a new incarnation of itself."""
    before = _incarnation("storage-1")
    stopped = _compose("stop", "-t", "0", "storage-1")
    assert stopped.returncode == 0, stopped.stderr
    assert _compose("start", "storage-1").returncode == 0
    deadline = time.monotonic() + 60
    while _incarnation("storage-1") in (before, "") and time.monotonic() < deadline:
        time.sleep(1)
    assert _incarnation("storage-1") not in (before, ""), _compose("logs").stdout[-4000:]


def _incarnation(name: str) -> str:
    try:
        with SyncClient(GATEWAY, timeout_s=2) as client:
            return next((node.incarnation for node in client.status() if node.node_id == name), "")
    except QuireError:
        return ""
