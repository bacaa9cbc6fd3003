"""Processor time of a local cluster's services, and processes that compete for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from quire_tools.local import LocalCluster

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ProcessorTime:
    """Of each service by its kind, and of this process as "client", since it was made or last `read`."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._before = self._now()

    def read(self) -> dict[str, float]:
        """Seconds by kind of service."""
        before, self._before = self._before, self._now()
        return {name: round(self._before[name] - before.get(name, 0.0), 4) for name in self._before}

    def _now(self) -> dict[str, float]:
        seconds = {"client": time.process_time()}
        for name in self._cluster.names:
            kind = name.rpartition("-")[0] if name[-1].isdigit() else name
            seconds[kind] = seconds.get(kind, 0.0) + seconds_of(self._cluster.pid(name))
        return seconds


def seconds_of(pid: int) -> float:
    """Processor seconds that a process has used, its threads included (Linux's /proc)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


@contextlib.contextmanager
def competitors(count: int) -> Iterator[None]:
    """Run processes that only compute, at the priority of the cluster's."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
