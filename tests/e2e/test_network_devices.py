"""Network devices that go while a cluster runs, over UCX on a host of the test's own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire_tools.local import LocalCluster
from tests.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]


async def _stored_after_a_device_went(hosts: Hosts, folder: Path, devices: str) -> str:
    hosts.add_device("br0")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command = [*hosts.on(0), sys.executable, "-m", "tests.e2e.host_that_stores", str(folder), devices]
    host = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(90):
            assert host.stdin is not None and host.stdout is not None
            assert await host.stdout.readline() == b"up\n"
            hosts.remove_device("br0")
            host.stdin.write(b"\n")
            ended = (await host.stdout.readline()).decode()
            assert await host.wait() == 0
            return ended
    finally:
        if host.returncode is None:
            host.kill()
            await host.wait()


@pytest.mark.slow
async def test_a_store_to_a_node_whose_device_went_is_not_begun(hosts: Hosts, tmp_path: Path) -> None:
    """Node and client waited for each other until the transfer's deadline, a minute."""
    ended = await _stored_after_a_device_went(hosts, tmp_path, "all")
    assert "no way to storage-0" in ended and "UCX_NET_DEVICES" in ended


@pytest.mark.slow
async def test_a_local_cluster_does_not_care_which_devices_go(hosts: Hosts, tmp_path: Path) -> None:
    assert await _stored_after_a_device_went(hosts, tmp_path, "") == "stored 24\n"


def test_a_local_cluster_is_there_for_this_machine_alone(cluster: LocalCluster) -> None:
    """No port of any service, nor one of UCX, is open to other machines."""
    listening = {name: _listening_at(cluster.pid(name)) for name in cluster.names}
    assert len(listening["storage-0"]) > 2, "gRPC, metrics, UCX"
    assert all(address.endswith("0100007F") for each in listening.values() for address in each), listening


def _listening_at(pid: int) -> list[str]:
    """Addresses of a process' TCP sockets that listen: hexadecimal, as Linux writes them. 127.0.0.1 is 0100007F."""
    process = Path(f"/proc/{pid}")
    sockets = {str(each.readlink()) for each in (process / "fd").iterdir()}
    lines = [line.split() for table in ("tcp", "tcp6") for line in (process / "net" / table).read_text().splitlines()]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
