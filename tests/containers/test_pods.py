"""The pods of the Kubernetes manifests, run by `podman play kube`. Skipped without QUIRE_TEST_PODMAN."""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.containers import driving
from tests.containers.pods import for_podman

TRIAL = Path(__file__).parents[2] / "k8s" / "manifests" / "trial.yaml"
PODMAN = os.environ.get("QUIRE_TEST_PODMAN", "")
NETWORK = "quire-pods"
MEMBERS = {"quire-gateway", "quire-storage-0", "quire-decoder", "quire-scheduler-0"}

pytestmark = pytest.mark.skipif(not PODMAN, reason="QUIRE_TEST_PODMAN names no podman")


def _log() -> str:
    return driving.run(PODMAN, "ps", "-a").stdout


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Those of the trial, with images that are built already."""
    file = tmp_path_factory.mktemp("pods") / "pods.yaml"
    encoded = base64.b64encode(secrets.token_hex(32).encode()).decode()
    documents = [document for document in yaml.safe_load_all(TRIAL.read_text()) if document]
    secret = {"kind": "Secret", "metadata": {"name": "quire-cluster"}, "data": {"QUIRE_CLUSTER_SECRET": encoded}}
    file.write_text(for_podman([secret, *documents]))
    driving.run(PODMAN, "network", "create", NETWORK)
    played = driving.run(PODMAN, "play", "kube", "--network", NETWORK, str(file))
    try:
        assert played.returncode == 0, played.stdout + played.stderr
        driving.until_members(lambda: driving.members().keys() >= MEMBERS, _log)
        yield
    finally:
        driving.run(PODMAN, "play", "kube", "--down", str(file))
        driving.run(PODMAN, "network", "rm", "-f", NETWORK)


def test_the_demo_against_pods(pods: None, tmp_path: Path) -> None:
    """What the manifests configure is a cluster that works."""
    assert driving.IDENTICAL in driving.demo(tmp_path, _log)
