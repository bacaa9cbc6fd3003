"""A cluster whose services have networks of their own, where this machine lets us make some."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from quire_tools.local import LocalCluster
from tests.redis_cluster import RedisClusterServers, redis_cluster_servers

_BRIDGE: Final = "qchaos"
_NETWORK: Final = "10.77.31"
_NAMES: Final = tuple(
    [f"{kind}{suffix}" for kind in ("orchestrator", "gateway", "scheduler") for suffix in ("", "-1")]
    + [f"storage-{index}" for index in range(3)]
)


def can_make_networks() -> bool:
    """Root, with iproute2."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


class World(LocalCluster):
    """Two gateways, orchestrators and schedulers, three storage nodes, and Redis, or (`shards`) a Redis Cluster.

    With `networks` each service has a network namespace, linked by a veth to a bridge where the clients are; bulk bytes
    go by tcp over the same links. Links can be cut and slowed.
    """

    def __init__(self, folder: Path, *, networks: bool, shards: bool = False) -> None:
        self.networks = networks
        self.shards: RedisClusterServers | None = None
        self._wants_shards = shards
        self._shards = contextlib.ExitStack()
        settings = {
            "QUIRE_ORCHESTRATOR_MEMBER_TTL_MS": "1500",
            "QUIRE_ORCHESTRATOR_HEARTBEAT_MS": "500",
            "QUIRE_GATEWAY_TRANSFER_TIMEOUT_S": "15",
            "QUIRE_STORAGE_TRANSFER_TIMEOUT_S": "10",
            "QUIRE_STORAGE_SCRUB_BYTES_PER_S": str(64 << 20),
        }
        if networks:
            settings |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "QUIRE_GATEWAY_AUTH": "everyone"}
        super().__init__(
            folder,
            storage_nodes=3,
            gateways=2,
            orchestrators=2,
            schedulers=2,
            arena_bytes=96 << 20,
            drive_bytes=1 << 30,
            settings=settings,
        )

    @property
    def client_environment(self) -> dict[str, str]:
        """What a client needs to get to them."""
        if not self.networks:
            return {}
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": _BRIDGE, "UCX_TCP_BRIDGE_ENABLE": "y"}

    def start(self, timeout_s: float = 60.0) -> None:
        if self.networks:
            self._make_networks()
        if self._wants_shards:
            host = f"{_NETWORK}.1" if self.networks else "127.0.0.1"
            folder = self.folder / "shards"
            folder.mkdir(parents=True)
            self.shards = self._shards.enter_context(redis_cluster_servers(folder, host))
            self._redis_url = self.shards.url
        super().start(timeout_s)

    def stop(self, timeout_s: float = 15.0) -> None:
        super().stop(timeout_s)
        self._shards.close()
        if self.networks:
            _remove_networks()

    def host_of(self, name: str) -> str:
        return f"{_NETWORK}.{10 + _NAMES.index(name)}" if self.networks else "127.0.0.1"

    @property
    def own_host(self) -> str:
        """Return the address of this process, which every service reaches."""
        return f"{_NETWORK}.1" if self.networks else "127.0.0.1"

    def wrapped(self, name: str, command: list[str]) -> list[str]:
        if not self.networks or name == "redis":
            return command
        return ["ip", "netns", "exec", _namespace(name), *command]

    def cut(self, name: str) -> None:
        """Nothing goes in or out, and no peer is told."""
        _run("ip", "link", "set", _link(name), "down")

    def slow(self, name: str, mbit_per_s: int) -> None:
        _run("tc", "qdisc", "replace", "dev", _link(name), "root", *_shaped(mbit_per_s))
        inside = ["tc", "qdisc", "replace", "dev", "eth0", "root", *_shaped(mbit_per_s)]
        _run("ip", "netns", "exec", _namespace(name), *inside)

    def mend(self, name: str) -> None:
        """As it was before `cut` or `slow`."""
        _run("ip", "link", "set", _link(name), "up")
        for prefix, device in ([], _link(name)), (["ip", "netns", "exec", _namespace(name)], "eth0"):
            subprocess.run([*prefix, "tc", "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)

    def _make_networks(self) -> None:
        _remove_networks()
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{_NETWORK}.1/24", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        for name in _NAMES:
            namespace, link = _namespace(name), _link(name)
            _run("ip", "netns", "add", namespace)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _run("ip", "link", "set", link, "master", _BRIDGE, "up")
            for command in (
                ["addr", "add", f"{self.host_of(name)}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
                ["link", "set", "lo", "up"],
            ):
                _run("ip", "-n", namespace, *command)


def _remove_networks() -> None:
    for name in _NAMES:
        subprocess.run(["ip", "netns", "del", _namespace(name)], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", _BRIDGE], capture_output=True, check=False)


def _namespace(name: str) -> str:
    return f"qchaos-{name}"


def _link(name: str) -> str:
    """Names of links are short by law (15 bytes)."""
    return f"qc{_NAMES.index(name)}"


def _shaped(mbit_per_s: int) -> list[str]:
    return ["tbf", "rate", f"{mbit_per_s}mbit", "burst", "64kbit", "latency", "200ms"]


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
