"""A lease is the client's until its session ends: a node that does not reach the client says nothing about it."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.testing.simulation import simulate
from tests.simulation.cluster import Cluster
from tests.simulation.one_client import stored_prefix, with_client
from tests.simulation.prefixes import LAYOUT

_LEASED_S, _UNDER_WAY_S, _LOOKED_S = 300, 0.02, 120.0


async def _evicted(cluster: Cluster, client: AsyncClient) -> int:
    """Abort a delivery, and break its connection before it is over; how many of the leased chunks can be evicted."""
    prefix = await stored_prefix(cluster, client, Durability.LOCAL)
    leased = await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=1000 * _LEASED_S)
    broken = {frozenset(("client", run.node_id)) for run in leased.ranges}
    cluster.network.stuck |= broken
    delivery = await client.fetch(leased, client.allocate(LAYOUT.payload_bytes(len(prefix.keys))))
    await asyncio.sleep(_UNDER_WAY_S)
    delivery.abandon()
    await asyncio.sleep(_UNDER_WAY_S)
    for member in list(cluster.fabric.members.values()):
        for peer in [peer for peers in member.peers.values() for peer in peers if peer.between in broken]:
            peer.abort()
    await asyncio.sleep(_LOOKED_S)
    return await client.evict(prefix.namespace, prefix.keys)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_a_client_that_a_node_does_not_reach_keeps_its_lease(seed: int) -> None:
    """The node gave the lease back, as if the client had died (seed 3389)."""
    assert simulate(seed, partial(with_client, scenario=_evicted)) == 0
