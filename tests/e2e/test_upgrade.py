"""The release before and this one beside each other: an upgrade of a cluster under load, in either order."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.client import Client
from quire.model.errors import DeadlineExceeded
from quire_tools.local import LocalCluster
from tests.e2e.rolling import roll

ROOT = Path(__file__).resolve().parents[2]
_EXPIRED_S = 5.0
BEFORE = "439d75d0e2625d2ff0e3f38cef35670778f46fdd"
"""The last commit of the release before: protocol 3, members prove nothing."""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel of that release holds, as a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("before")
    git = ["git", "-C", str(ROOT)]
    if shutil.which("git") is None or subprocess.run([*git, "cat-file", "-e", BEFORE], capture_output=True).returncode:
        pytest.skip(f"no git history that has {BEFORE}")
    source = folder / "source"
    source.mkdir()
    archive = subprocess.run([*git, "archive", BEFORE], check=True, capture_output=True, timeout=60).stdout
    subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True, timeout=60)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "wheel")
    return folder / "wheel"


@pytest.fixture
def cluster(before: Path, tmp_path: Path) -> Iterator[LocalCluster]:
    """Two of everything but decoders, of the release before."""
    drained = {f"QUIRE_{name}_DRAIN_S": "1" for name in ("ORCHESTRATOR", "GATEWAY", "STORAGE", "SCHEDULER")}
    with LocalCluster(
        tmp_path / "c",
        storage_nodes=2,
        gateways=2,
        orchestrators=2,
        schedulers=2,
        arena_bytes=96 << 20,
        settings={**drained, "PYTHONPATH": str(before)},
    ) as running:
        yield running


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("first", ["orchestrators", "members"])
async def test_an_upgrade_under_load_loses_nothing(cluster: LocalCluster, before: Path, first: str) -> None:
    """Orchestrators first or last; while both releases run, orchestrators take members that prove nothing."""
    with Client(cluster.gateway_address) as client:
        before_that = {node.node_id: node.protocol_version for node in client.status()}
    assert set(before_that.values()) == {3}, "the release before runs"
    orchestrators = [name for name in cluster.names if name.startswith("orchestrator")]
    members = [name for name in cluster.names if not name.startswith("orchestrator") and name != "redis"]
    order = orchestrators + members if first == "orchestrators" else members + orchestrators
    upgraded = {"PYTHONPATH": "", "QUIRE_ACCEPT_UNPROVEN": "true"}
    done = await roll(cluster, order, upgraded)
    assert done["hit"] > 50 and done["storing"] > 10, done
    for name in orchestrators:  # from here on members prove that they know the secret
        cluster.renew(name, environment={"QUIRE_ACCEPT_UNPROVEN": "false"})
    await asyncio.sleep(_EXPIRED_S)  # who was refused since is gone
    with Client(cluster.gateway_address) as client:
        nodes = {node.node_id: node.protocol_version for node in client.status()}
    assert nodes == dict.fromkeys(before_that, 4)


@pytest.mark.long
def test_without_being_told_to_nobody_takes_members_that_prove_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    """Of a release before: refused, and told what to set."""
    for name in ("orchestrator", "orchestrator-1"):
        with contextlib.suppress(DeadlineExceeded):  # it waits for members to join, and they may not
            cluster.renew(name, timeout_s=10, environment={"PYTHONPATH": ""})
    for name in ("storage-0", "orchestrator"):
        deadline = time.monotonic() + 20
        while "QUIRE_ACCEPT_UNPROVEN" not in (tmp_path / "c" / "logs" / f"{name}.log").read_text():
            assert time.monotonic() < deadline, name
            time.sleep(0.1)
