"""Ports that are found free stay free until a service binds them."""

from __future__ import annotations

from pathlib import Path

from quire_tools.local.ports import free_ports


def test_no_outgoing_connection_can_take_them() -> None:
    """The kernel gives these from its own range: a port of it may be taken before a service binds it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(40)
    assert len(set(ports)) == 40
    assert max(ports) < first
