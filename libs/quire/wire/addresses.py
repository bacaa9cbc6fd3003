"""Addresses of services: host:port, an IPv6 host in brackets."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def host_and_port(text: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port.

    Raises `ValueError` for other texts.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise ValueError("not host:port")
    bare = host.removeprefix("[").removesuffix("]")
    if (":" in bare) != (host == f"[{bare}]"):
        raise ValueError("an IPv6 host, and no other, is in brackets: [::1]:7410")
    return bare, int(port)


def grpc_target(addresses: Sequence[str]) -> str:
    """Return gRPC's target: it connects to the first address that answers. Several are IP addresses of one family.

    Raises `ValueError` where one of several is no IP address with a port, and for two families.
    """
    if len(addresses) < 2:
        return "".join(addresses)
    families = {f"ipv{ipaddress.ip_address(host_and_port(address)[0]).version}" for address in addresses}
    if len(families) > 1:
        raise ValueError("addresses of IPv4 and of IPv6: gRPC tries several of one family only")
    return f"{families.pop()}:{','.join(addresses)}"
