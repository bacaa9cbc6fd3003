"""Addresses of services, with IPv4, names and IPv6."""

from __future__ import annotations

import pytest

from quire.model.errors import InvalidRequest
from quire.wire.addresses import grpc_target, host_and_port
from quire.wire.channels import ChannelPool


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("gateway:7410", "gateway", 7410), ("[::1]:7410", "::1", 7410), ("10.0.0.1:0", "10.0.0.1", 0), (":80", "", 80)],
)
def test_host_and_port(text: str, host: str, port: int) -> None:
    assert host_and_port(text) == (host, port)


_WRONG = ["", "gateway", "gateway:", "gateway:x", "gateway:65536", "::1:7410", "[::1]", "[::1", "[10.0.0.1]:1"]


@pytest.mark.parametrize("text", _WRONG)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"not host:port|in brackets"):
        host_and_port(text)


def test_several_addresses_are_of_one_family() -> None:
    assert grpc_target(["gateway:1"]) == "gateway:1"
    assert grpc_target(["10.0.0.1:1", "10.0.0.2:1"]) == "ipv4:10.0.0.1:1,10.0.0.2:1"
    assert grpc_target(["[::1]:1", "[::2]:1"]) == "ipv6:[::1]:1,[::2]:1"
    with pytest.raises(ValueError, match="one family"):
        grpc_target(["10.0.0.1:1", "[::1]:1"])


async def test_a_pool_says_what_is_wrong_with_addresses() -> None:
    pool = ChannelPool()
    with pytest.raises(InvalidRequest, match=r"10.0.0.1:1, \[::1\]:1.*one family"):
        pool.get("10.0.0.1:1, [::1]:1")
    with pytest.raises(InvalidRequest, match="'gateway-a' does not appear to be an IPv4 or IPv6 address"):
        pool.get("gateway-a:7410,gateway-b:7410")
    assert pool.get("gateway-a:7410,")
    await pool.close()
