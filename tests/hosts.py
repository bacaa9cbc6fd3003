"""Hosts of a test's own, with network devices that nothing outside of the test sees: network namespaces.

Making them needs root and iproute2.
"""

from __future__ import annotations

import os
import subprocess
from typing import Final

_GONE: Final = "10.218.0.1"


class Hosts:
    """Two, linked by their eth0. `on(index)` is what runs a command on one of them."""

    def __init__(self) -> None:
        self.names = [f"quire-{os.getpid()}-{index}" for index in range(2)]

    def make(self) -> None:
        """Raises `CalledProcessError` where that is not allowed, or not there."""
        first, second = self.names
        self.run(
            f"ip netns add {first} && ip netns add {second} &&"
            f"ip -n {first} link add eth0 type veth peer name eth0 netns {second}"
        )
        for index, name in enumerate(self.names, 1):
            self.run(
                f"ip -n {name} addr add 10.217.0.{index}/24 dev eth0 &&"
                f"ip -n {name} link set eth0 up && ip -n {name} link set lo up"
            )
        for index in range(2):
            self._wait_for(index, "eth0")

    def on(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[index]]

    def run(self, command: str, *, check: bool = True) -> None:
        subprocess.run(command, shell=True, capture_output=True, check=check)

    def add_device(self, name: str) -> None:
        """One more device at the first host, with an address. UCX prefers it to loopback."""
        host = self.names[0]
        self.run(
            f"ip -n {host} link add {name} type veth peer name {name}-far &&"
            f"ip -n {host} addr add {_GONE}/24 dev {name} &&"
            f"ip -n {host} link set {name}-far up && ip -n {host} link set {name} up"
        )
        self._wait_for(0, name)

    def remove_device(self, name: str) -> None:
        """The one that was added. Its address is the second host's now, where nothing listens."""
        self.run(
            f"ip -n {self.names[0]} link del {name} && ip -n {self.names[0]} route add default via 10.217.0.2 &&"
            f"ip -n {self.names[1]} addr add {_GONE}/32 dev lo"
        )

    def _wait_for(self, index: int, device: str) -> None:
        """Until it has a carrier: UCX passes over one that has none."""
        look = f"ip -n {self.names[index]} link show {device} | grep -q 'state UP'"
        self.run(f'timeout 10 sh -c "until {look}; do sleep 0.02; done"')

    def close(self) -> None:
        for name in self.names:
            self.run(f"ip netns del {name}", check=False)
