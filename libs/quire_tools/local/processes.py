"""Processes of a local cluster: their start, and the state of each."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol

from quire.model.errors import DeadlineExceeded, Unavailable
from quire_tools.local.patience import Patience

_LAUNCH: Final = Path(__file__).with_name("launch.py")


class Running(Protocol):
    """A process, as `subprocess.Popen` shows one."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None:
        """Exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None:
        """Any, by number."""

    def terminate(self) -> None:
        """SIGTERM."""

    def kill(self) -> None: ...


@dataclass(slots=True)
class ServiceProcess:
    """A running service: how it was started, so that it can be started again."""

    name: str
    command: list[str]
    environment: dict[str, str]
    address: str
    popen: Running
    log: IO[bytes] = field(repr=False)

    @property
    def advertised(self) -> str:
        """Return the address under which other members reach it."""
        return next((value for name, value in self.environment.items() if name.endswith("_ADVERTISE")), self.address)

    def check(self, patience: Patience) -> None:
        """Check that waiting for it may still help.

        Raises:
            Unavailable: It has ended.
            DeadlineExceeded: The patience is over.
        """
        if self.popen.poll() is not None:
            tail = Path(self.log.name).read_text(errors="replace")[-2000:]
            raise Unavailable(f"{self.name} ended with status {self.popen.returncode}:\n{tail}")
        if patience.is_over:
            raise DeadlineExceeded(
                f"{self.name} is not ready after {patience.waited_s:.0f} s; the limit is {patience.limit_s:g} s "
                f"in which it does nothing; see {self.log.name}"
            )


class Starter:
    """Starts processes that die with this one, however it dies."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def start(self, command: list[str], environment: dict[str, str], log: IO[bytes]) -> Running:
        """Start one in a session of its own; its output is written to `log`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "starter")
        # The kernel's "die with your parent" means the parent's thread: one that lives as long as the cluster does.
        return self._thread.submit(
            subprocess.Popen[bytes],
            [sys.executable, "-ISs", str(_LAUNCH), str(os.getpid()), *command],
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ).result()

    def close(self) -> None:
        """Give the thread back; every process has to have ended."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
