"""A service that is asked by SIGUSR1 says where it is, and goes on."""

from __future__ import annotations

import signal
import time

from quire_tools.local import LocalCluster


def test_every_service_says_where_its_threads_and_tasks_are(cluster: LocalCluster) -> None:
    services = [name for name in cluster.names if name != "redis"]
    logs = {name: cluster.folder / "logs" / f"{name}.log" for name in services}
    for name in services:
        cluster.kill(name, signal.SIGUSR1)
    deadline = time.monotonic() + 20
    for name, log in logs.items():
        while "where the tasks are" not in (told := log.read_text()):
            assert time.monotonic() < deadline, f"{name}: {told}"
            time.sleep(0.05)
        assert "most recent call first" in told, "its threads"
        assert "until_signalled" in told, "its tasks"
    assert not cluster.ended()
