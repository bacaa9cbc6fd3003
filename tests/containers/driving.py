"""What is done with a cluster in containers, however it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from quire.client import Client
from quire.model.errors import QuireError
from tests.polling import until

GATEWAY = "127.0.0.1:7410"
IDENTICAL = "bit-identical to the KV kept in memory: yes"
"""What the demo says of logits that are as they should be."""


def run(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def members() -> dict[str, str]:
    """Incarnations by name; none while the gateway does not answer."""
    try:
        with Client(GATEWAY, timeout_s=2) as client:
            return {node.node_id: node.incarnation for node in client.status()}
    except QuireError:
        return {}


def until_members(condition: Callable[[], object], log: Callable[[], str]) -> None:
    """Wait for members, with the containers' log in the failure."""
    until(condition, lambda: f"members: {sorted(members())}\n{log()[-6000:]}", timeout_s=90, pause_s=1)


def demo(folder: Path, log: Callable[[], str]) -> str:
    """KV out of this machine's memory into the containers and back, images put and got; what it prints."""
    command = [sys.executable, "-c", "from quire_tools.cli import main; main()", "demo", "--gateway", GATEWAY]
    environment = {**os.environ, "UCX_TCP_BRIDGE_ENABLE": "y"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + log()[-6000:]
    return done.stdout
