"""A cluster whose services are known to each other and to clients by IPv6 addresses."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

from quire.client import AsyncClient
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store


class _OnIpv6(LocalCluster):
    def host_of(self, name: str) -> str:
        return "[::1]"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Start two of each service that is named by several addresses."""
    folder = tmp_path_factory.mktemp("ipv6")
    with _OnIpv6(folder, gateways=2, orchestrators=2, schedulers=2, decoders=0) as running:
        yield running


@pytest.mark.parametrize("count", [1, 2])
async def test_prefixes_are_stored_and_fetched(cluster: LocalCluster, count: int) -> None:
    """The client names one gateway, and two."""
    gateways = [cluster.address(name) for name in ("gateway", "gateway-1")[:count]]
    assert all(address.startswith("[::1]:") for address in gateways)
    async with AsyncClient(",".join(gateways)) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 4), random_payload(namespace, 4)
        await store(client, namespace, keys, payload)
        got, _ = await fetch_all(client, await client.lookup(namespace, keys))
        assert np.array_equal(got, payload)


def test_frontends_of_http_listen(cluster: LocalCluster) -> None:
    for address in (cluster.http_address, cluster.metrics["gateway"]):
        assert address.startswith("[::1]:")
    with urllib.request.urlopen(f"http://{cluster.metrics['gateway']}/readyz", timeout=10) as answer:
        assert answer.status == 200
