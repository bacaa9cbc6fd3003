"""The pods of the Kubernetes manifests, run by `podman play kube`. Skipped without QUIRE_TEST_PODMAN."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from quire.client import SyncClient
from quire.errors import QuireError
from tests.containers.pods import for_podman

ROOT = Path(__file__).parents[2]
PODMAN = os.environ.get("QUIRE_TEST_PODMAN", "")
GATEWAY = "127.0.0.1:7410"
NETWORK = "quire-pods"
MEMBERS = {"quire-gateway", "quire-storage-0", "quire-decoder", "quire-scheduler-0"}

pytestmark = pytest.mark.skipif(
    not PODMAN or shutil.which("kubectl") is None, reason="QUIRE_TEST_PODMAN names no podman, or there is no kubectl"
)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The dev overlay's, with images that are built already."""
    built = _run("kubectl", "kustomize", str(ROOT / "k8s/overlays/dev"))
    assert built.returncode == 0, built.stderr
    file = tmp_path_factory.mktemp("pods") / "pods.yaml"
    file.write_text(for_podman([each for each in yaml.safe_load_all(built.stdout) if each]))
    _run(PODMAN, "network", "create", NETWORK)
    played = _run(PODMAN, "play", "kube", "--network", NETWORK, str(file))
    try:
        assert played.returncode == 0, played.stdout + played.stderr
        deadline = time.monotonic() + 90
        while (missing := MEMBERS - _members()) and time.monotonic() < deadline:
            time.sleep(1)
        assert not missing, f"{missing} did not join:\n{played.stdout}{_run(PODMAN, 'ps', '-a').stdout}"
        yield
    finally:
        _run(PODMAN, "play", "kube", "--down", str(file))
        _run(PODMAN, "network", "rm", "-f", NETWORK)


def _members() -> set[str]:
    try:
        with SyncClient(GATEWAY, timeout_s=2) as client:
            return {node.node_id for node in client.status()}
    except QuireError:
        return set()


def test_the_demo_against_pods(pods: None, tmp_path: Path) -> None:
    """As against compose: what the manifests configure is a cluster that works."""
    command = [sys.executable, "-c", "from quire.cli import main; main()", "demo", "--endpoint", GATEWAY]
    environment = {**os.environ, "UCX_TCP_BRIDGE_ENABLE": "y"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical" in done.stdout, done.stdout
