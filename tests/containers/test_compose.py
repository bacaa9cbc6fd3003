"""The compose file's containers, run for real: `make test-containers`. Skipped without QUIRE_TEST_COMPOSE."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers import driving

ROOT = Path(__file__).parents[2]
COMPOSE = os.environ.get("QUIRE_TEST_COMPOSE", "")
MEMBERS = {"gateway-0", "storage-0", "storage-1", "decoder-0"}

pytestmark = pytest.mark.skipif(not COMPOSE, reason="QUIRE_TEST_COMPOSE names no compose command")


def _compose(*arguments: str) -> subprocess.CompletedProcess[str]:
    return driving.run(*shlex.split(COMPOSE), *arguments, folder=ROOT)


def _log() -> str:
    return _compose("logs").stdout


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """Up, with images that are built already."""
    up = _compose("up", "-d", "--no-build")
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        driving.until(lambda: driving.members().keys() >= MEMBERS, _log)
        yield
    finally:
        _compose("down", "-v")


def test_the_demo_against_containers(running: None, tmp_path: Path) -> None:
    driving.demo(tmp_path, _log)


def test_a_container_that_is_killed_comes_back(running: None) -> None:
    """As a new incarnation of itself."""
    before = driving.members()["storage-1"]
    stopped = _compose("stop", "-t", "0", "storage-1")
    assert stopped.returncode == 0, stopped.stderr
    assert _compose("start", "storage-1").returncode == 0
    driving.until(lambda: driving.members().get("storage-1", before) != before, _log)
