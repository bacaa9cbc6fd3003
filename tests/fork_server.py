"""Programs of tests, forked from a process that has imported what they need: `quire` commands, checks of services, days
of the simulator, and with `QUIRE_TEST_FORK=1` the services of clusters. An import takes one to three seconds of a core
each time, and the suite starts some thousand programs.

What runs is the program's own `main()`, in a process of its own, with its own environment, folder, log and session.
Clusters that `quire up` starts are started as users start them.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn

ROOT: Final = Path(__file__).resolve().parents[1]
_SERVICES: Final = tuple(
    f"quire_{name}.server" for name in ("orchestrator", "gateway", "storage", "decoder", "scheduler")
)
_CLI: Final = "quire_tools.cli"
_KINDS: Final[dict[str, tuple[tuple[str, ...], dict[str, str]]]] = {
    "plain": (
        (*_SERVICES, _CLI, "quire_tools.cli.app", "quire_tools.cli.keys", "tests.e2e.helpers"),
        {"COLUMNS": "160"},
    ),
    "torch": (
        (*_SERVICES, _CLI, "quire_tools.cli.app", "torch", "diffusers.models", "transformers", "safetensors.torch"),
        {"COLUMNS": "160", "HF_HUB_OFFLINE": "1"},
    ),
    "simulation": (("tests.simulation.run", "tests.simulation.exploration"), {"PYTHONHASHSEED": "0"}),
}
"""What a server of a kind has imported, and its environment besides."""
_PR_SET_PDEATHSIG: Final = 1
_MESSAGE_MAX: Final = 1 << 17


class Forked:
    """A forked program, as `subprocess.Popen` shows one."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self._reap()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._reap()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        self.returncode = self._server.reap(self.pid)
        os.close(self._pidfd)


class ForkServer:
    """The process that has imported what programs of a kind need. It ends when its socket is closed, as at the latest
    when the process dies that started it, and its programs die with it.
    """

    def __init__(self, kind: str) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE_MAX)
        with theirs:
            command = [sys.executable, "-m", __name__, kind, str(theirs.fileno())]
            environment = {**os.environ, **_KINDS[kind][1]}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, env=environment)

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, out: IO[bytes], err: IO[bytes]
    ) -> Forked:
        """Run a program: `arguments` are those of a Python interpreter."""
        asked = {"arguments": list(arguments), "environment": dict(environment), "folder": str(folder)}
        handles = array.array("i", [out.fileno(), err.fileno()])
        with self._lock:
            self._socket.sendmsg([json.dumps(asked).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
            return Forked(self, int(self._socket.recv(64)))

    def reap(self, pid: int) -> int:
        """The exit status of a program that has ended, as `subprocess` gives it."""
        with self._lock:
            self._socket.send(json.dumps({"reap": pid}).encode())
            return int(self._socket.recv(64))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(20)


_servers: dict[str, ForkServer] = {}
_starting = threading.Lock()


def server(kind: str) -> ForkServer:
    """The server of a kind, started when it is first needed."""
    with _starting:
        if kind not in _servers:
            _servers[kind] = ForkServer(kind)
        return _servers[kind]


def close() -> None:
    while _servers:
        _servers.popitem()[1].close()


def start_service(command: list[str], environment: dict[str, str], log: IO[bytes]) -> Forked | None:
    """A service of a cluster. None: not as users start one, but in a network of its own, or another in its place."""
    if len(command) != 3 or command[:2] != [sys.executable, "-m"] or command[2] not in _SERVICES:
        return None
    return server("torch" if "decoder" in command[2] else "plain").fork(command[1:], environment, Path.cwd(), log, log)


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    kind: str = "plain",
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run(…, capture_output=True, text=True)`, for a command that begins with this interpreter.

    `timeout`: for so many seconds it may print nothing and compute next to nothing. A slow machine costs time only.
    """
    python, *arguments = map(str, command)
    assert python == sys.executable
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        environment = os.environ if env is None else env
        program = server(kind).fork(arguments, environment, cwd or Path.cwd(), out, err)
        try:
            status = _end_of(program, (out, err), timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
            raise
        told = []
        for file in (out, err):
            file.seek(0)
            told.append(file.read().decode())
    return subprocess.CompletedProcess([python, *arguments], status, *told)


def _end_of(program: Forked, files: Sequence[IO[bytes]], quiet_s: float) -> int:
    """Its status. Raises `TimeoutExpired` after so many seconds without progress."""
    known, since_s = _progress(program, files), time.monotonic()
    while True:
        try:
            return program.wait(1.0)
        except subprocess.TimeoutExpired:
            now = _progress(program, files)
            if now != known:
                known, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > quiet_s:
                raise


def _progress(program: Forked, files: Sequence[IO[bytes]]) -> tuple[int, ...]:
    """Bytes printed, and tenths of a second computed, by it and its children that have ended."""
    sizes = [os.fstat(file.fileno()).st_size for file in files]
    try:
        fields = Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return (*sizes, -1)
    ticks = sum(int(field) for field in fields[11:15])
    return (*sizes, 10 * ticks // os.sysconf("SC_CLK_TCK"))


def quire(*arguments: str | Path) -> list[str]:
    """The command line's command."""
    return [sys.executable, "-m", _CLI, *map(str, arguments)]


def _serve(kind: str, requests: socket.socket) -> None:
    for name in _KINDS[kind][0]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        asked, handles, _, _ = socket.recv_fds(requests, _MESSAGE_MAX, 2)
        if not asked:
            return
        message = json.loads(asked)
        if "reap" in message:
            _, status = os.waitpid(message["reap"], 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        parent = os.getpid()
        if not (pid := os.fork()):
            requests.close()
            _become(message, handles, parent)
        for handle in handles:
            os.close(handle)
        requests.send(str(pid).encode())


def _become(message: dict[str, Any], handles: list[int], parent: int) -> NoReturn:
    """The program itself, from here on."""
    status = 1
    try:
        os.setsid()
        _die_with(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, handle in enumerate(handles, 1):
            os.dup2(handle, target)
            os.close(handle)
        os.environ.clear()
        os.environ.update(message["environment"])
        os.chdir(message["folder"])
        faulthandler.enable()
        _run(message["arguments"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            _end()
        os._exit(status)


def _run(arguments: list[str]) -> None:
    if arguments[0] != "-m":
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
        return
    name = arguments[1]
    module = sys.modules.get(name)
    sys.argv = [str(getattr(module, "__file__", name)), *arguments[2:]]
    if module is None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = module  # for what starts processes of its own
    ended = module.main()
    if ended is not None:
        sys.exit(ended)


def _end() -> None:
    """As the interpreter does: wait for threads, then what was registered with `atexit`."""
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
