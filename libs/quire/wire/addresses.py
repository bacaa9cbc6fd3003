"""Addresses of services: host:port, an IPv6 host in brackets."""

from __future__ import annotations

from collections.abc import Sequence


def host_and_port(text: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port.

    Raises `ValueError` for what is no address.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise ValueError("not host:port")
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare and host != f"[{bare}]":
        raise ValueError("an IPv6 host is in brackets: [::1]:7410")
    return bare, int(port)


def grpc_target(addresses: Sequence[str]) -> str:
    """Return what gRPC connects to: the first of the addresses that answers. Several are IP addresses, of one family.

    Raises `ValueError` for an address that is none, and for several families.
    """
    if len(addresses) == 1:
        return addresses[0]
    families = {"ipv6" if ":" in host_and_port(address)[0] else "ipv4" for address in addresses}
    if len(families) > 1:
        raise ValueError("addresses of IPv4 and of IPv6: gRPC tries several of one family only")
    return f"{families.pop()}:{','.join(addresses)}"
