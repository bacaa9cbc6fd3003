"""Ports that are found free stay free until a service binds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.model.errors import ConfigInvalid
from quire_tools.local import LocalCluster
from quire_tools.local.ports import GatewayPorts, free_ports


def test_no_outgoing_connection_can_take_them() -> None:
    """The kernel gives these from its own range: a port of it may be taken before a service binds it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(40)
    assert len(set(ports)) == 40
    assert max(ports) < first


def test_none_is_given_twice_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are asked for before a cluster starts, and bound after its own: a second taker would be refused."""
    monkeypatch.setenv("QUIRE_LOCAL_PORTS", "21000-21499")
    found = [port for _ in range(25) for port in free_ports(8)]
    assert len(set(found)) == len(found)


def test_a_cluster_gives_no_service_a_port_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number, for images or in a setting."""
    asked = [21000 + 2 * number for number in range(20)]
    monkeypatch.setenv("QUIRE_LOCAL_PORTS", "21000-21039")
    settings = {f"QUIRE_{number}_LISTEN": f"127.0.0.1:{number}" for number in asked[1:]} | {"QUIRE_X": "memory only"}
    cluster = LocalCluster(tmp_path, http_address=f"127.0.0.1:{asked[0]}", settings=settings)
    taken, of_storage = cluster._find_ports(8)
    assert not {*taken, *of_storage} & {*asked}


def test_a_port_of_the_gateway_is_given_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another service has it by default."""
    (port,) = free_ports(1)
    monkeypatch.setattr("quire_tools.local.ports.USUAL", {"http": port})
    ports = GatewayPorts(port, usual=True)
    assert ports.choose("gateway", 1) == port
    assert ports.choose("http", 23_456) == 23_456 and ports.moved == {port: 23_456}
    assert GatewayPorts(0, usual=True).choose("http", 1) == port
    assert GatewayPorts(0, usual=True).choose("http", 2, {port}) == 2


def test_they_lie_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOCAL_PORTS", "21000-21099")
    assert all(21000 <= port <= 21099 for port in free_ports(8))
    for wrong in ("21000", "9-21000", "b-c", "22000-21000"):
        monkeypatch.setenv("QUIRE_LOCAL_PORTS", wrong)
        with pytest.raises(ConfigInvalid, match="QUIRE_LOCAL_PORTS"):
            free_ports(1)
