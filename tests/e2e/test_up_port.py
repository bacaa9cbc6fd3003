"""`quire up --port`, as a person types it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

from quire_tools.local.ports import free_ports
from tests.e2e.test_cli import QUIRE, quire


def test_a_requested_port(tmp_path: Path) -> None:
    """A port that is taken is an error; it was replaced without a message. No printed URL has a password."""
    requested, taken = free_ports(2)
    folder = ["--folder", str(tmp_path / "c"), "--decoders", "0", "--arena-mib", "64", "--drive-mib", "128"]
    with socket.create_server(("127.0.0.1", taken)):
        refused = quire("up", *folder, "--port", str(taken))
    assert refused.returncode == 1 and f"port {taken} is taken" in refused.stderr
    environment = {**os.environ, "COLUMNS": "160"}
    with subprocess.Popen(
        [*QUIRE, "up", *folder, "--port", str(requested)], stdout=subprocess.PIPE, text=True, env=environment
    ) as up:
        try:
            assert up.stdout is not None
            output = ""
            for line in up.stdout:
                output += line
                if "S3 http://" in line:
                    break
            address, user, password = quire("page", "--folder", str(tmp_path / "c")).stdout.split("\n")[:3]
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)
    assert f"gateway 127.0.0.1:{requested}" in output and "operator:" not in output
    assert address in output and user.endswith("operator") and len(password.split()[1]) > 20
