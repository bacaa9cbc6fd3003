"""`quire health` on a cluster that is well, and on one whose orchestrator is frozen."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from quire_tools.local import LocalCluster
from tests.e2e.test_cli import quire
from tests.polling import until


def test_a_frozen_orchestrator_is_an_error(tmp_path: Path) -> None:
    """The command waits for `--timeout-s`, not for the orchestrator. A stopped cluster is an error, too."""
    with LocalCluster(tmp_path / "c", arena_bytes=64 << 20) as cluster:
        command = ("health", "--folder", str(cluster.folder))
        until(lambda: quire(*command).returncode == 0, "the cluster is well")
        assert quire(*command).stdout.startswith("OK")
        assert json.loads(quire(*command, "--json").stdout) == {"verdict": "OK", "checks": []}
        os.kill(cluster.pid("orchestrator"), signal.SIGSTOP)
        try:
            frozen = quire(*command, "--timeout-s", "1", "--json")
            assert frozen.returncode == 2, frozen.stderr
            (check,) = json.loads(frozen.stdout)["checks"]
            assert (check["code"], check["verdict"]) == ("UNREACHABLE", "ERR")
            assert "DeadlineExceeded" in check["problem"]
        finally:
            os.kill(cluster.pid("orchestrator"), signal.SIGCONT)
        until(lambda: quire(*command).returncode == 0, "it is well again")
    stopped = quire("health", "--folder", str(tmp_path / "c"))
    assert stopped.returncode == 2 and stopped.stdout.startswith("ERR"), stopped.stderr
