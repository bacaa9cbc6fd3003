"""The compose file's containers, run for real: `make test-containers`. Skipped without QUIRE_TEST_COMPOSE."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.wire.credentials import page_token
from tests.containers import driving
from tests.polling import until

ROOT = Path(__file__).parents[2]
COMPOSE = os.environ.get("QUIRE_TEST_COMPOSE", "")
MEMBERS = {"gateway-0", "storage-0", "storage-1", "decoder-0"}
OPERATORS = {
    "QUIRE_GATEWAY_ADMIN_LISTEN": "0.0.0.0:7420",
    "QUIRE_GATEWAY_PAGE_LISTEN": "0.0.0.0:7421",
    "QUIRE_TRACE_RECENT": "4000",
}
pytestmark = pytest.mark.skipif(not COMPOSE, reason="QUIRE_TEST_COMPOSE names no compose command")


def _compose(*arguments: str) -> subprocess.CompletedProcess[str]:
    return driving.run(*shlex.split(COMPOSE), *arguments, folder=ROOT)


def _log(*services: str) -> str:
    logged = _compose("logs", *services)
    return logged.stdout + logged.stderr


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """Up, with images that are built already, and open for operators."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OPERATORS.items():
            patch.setenv(name, value)
        up = _compose("up", "-d", "--no-build")
        assert up.returncode == 0, up.stdout + up.stderr
        try:
            driving.until_members(lambda: driving.members().keys() >= MEMBERS, _log)
            yield
        finally:
            _compose("down", "-v")


@pytest.fixture(scope="module")
def demonstrated(running: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the demo prints."""
    return driving.demo(tmp_path_factory.mktemp("demo"), _log)


def test_the_demo_against_containers(demonstrated: str) -> None:
    assert driving.IDENTICAL in demonstrated


def test_operators_see_traces_and_the_page(demonstrated: str) -> None:
    """After the demo; with the secret that the first start has made."""
    output = _compose("exec", "-T", "gateway", "cat", "/etc/quire/cluster-secret").stdout
    (secret,) = re.findall(r"(?m)^[0-9a-f]{64}", output)
    command = [sys.executable, "-c", "from quire_tools.cli import main; main()", "trace", "--admin", "127.0.0.1:7420"]
    environment = {**os.environ, "QUIRE_CLUSTER_SECRET": secret}
    done = subprocess.run(
        [*command, "--json", "--limit", "4000"], env=environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert any({"gateway", "storage", "scheduler"} <= set(each["services"]) for each in json.loads(done.stdout))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen("http://127.0.0.1:7421/", timeout=10)
    credentials = base64.b64encode(f"operator:{page_token(secret.encode())}".encode()).decode()
    page = urllib.request.Request("http://127.0.0.1:7421/", headers={"Authorization": f"Basic {credentials}"})
    with urllib.request.urlopen(page, timeout=10) as answer:
        assert answer.status == 200


def test_a_container_that_is_killed_comes_back(running: None) -> None:
    """As a new incarnation of itself."""
    before = driving.members()["storage-1"]
    stopped = _compose("stop", "-t", "0", "storage-1")
    assert stopped.returncode == 0, stopped.stderr
    assert _compose("start", "storage-1").returncode == 0
    driving.until_members(lambda: driving.members().get("storage-1", before) != before, _log)


def _is_ready(service: str) -> bool:
    """Return whether a service passes the health check of the compose file."""
    check = "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/readyz', timeout=2); print(6 * 7)"
    done = _compose("exec", "-T", service, "python", "-c", check)  # podman-compose does not pass its status on
    return "42" in done.stdout.splitlines()


def test_a_roll_with_a_bad_secret_stops_at_the_first_container(running: None) -> None:
    """The container never becomes ready, which a roll waits for. Other members serve on."""
    until(lambda: _is_ready("storage-1"), "storage-1 is ready")
    incarnations = driving.members()
    recreate = ("up", "-d", "--no-build", "--no-deps", "--force-recreate", "storage-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CLUSTER_SECRET", "0" * 64)
        assert _compose(*recreate).returncode == 0
        until(lambda: "does not use this node" in _log("storage-1"), _log)
        assert not any(_is_ready("storage-1") for _ in range(10))
    members = driving.members()
    untouched = {name: number for name, number in incarnations.items() if name != "storage-1"}
    assert untouched.items() <= members.items()
    assert members.get("storage-1", incarnations["storage-1"]) == incarnations["storage-1"], (
        "the wrong one is no member"
    )
    assert _compose(*recreate).returncode == 0
    until(lambda: _is_ready("storage-1"), _log)
