"""Ports that are found free stay free until a service binds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.model.errors import ConfigInvalid
from quire_tools.local.ports import free_ports


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


def test_they_lie_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOCAL_PORTS", "21000-21099")
    assert all(21000 <= port <= 21099 for port in free_ports(8))
    for wrong in ("21000", "9-21000", "b-c", "22000-21000"):
        monkeypatch.setenv("QUIRE_LOCAL_PORTS", wrong)
        with pytest.raises(ConfigInvalid, match="QUIRE_LOCAL_PORTS"):
            free_ports(1)
