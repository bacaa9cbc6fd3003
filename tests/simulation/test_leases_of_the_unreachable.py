"""A lease is the client's until its session ends: a node that does not reach the client says nothing about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.client import QuireClient
from quire.model.durability import Durability
from quire.testing.simulation import Process, SimChannels, SimNearestTransport, SimulatedLoop, simulate
from tests.simulation.cluster import Cluster
from tests.simulation.prefixes import LAYOUT, prefixes

_LEASED_S, _UNDER_WAY_S, _LOOKED_S = 300, 0.02, 120.0


async def _evicted(loop: SimulatedLoop) -> int:
    """Abort a delivery, and break its connection before it is over; how many of the leased chunks can be evicted."""
    cluster = Cluster(loop)
    await cluster.start()
    process = Process("client")
    channels: Any = SimChannels(cluster.network, process)
    client = QuireClient("gateway-0", transport=SimNearestTransport(cluster.fabric, process), channels=channels)
    task = process.start(_evicted_by(cluster, client))
    evicted: int = await task
    return evicted


async def _evicted_by(cluster: Cluster, client: QuireClient) -> int:
    await client.start()
    prefix = prefixes(cluster.loop.random)[0]
    count = len(prefix.keys)
    buffer = client.allocate(LAYOUT.payload_bytes(count))
    session = await client.store(prefix.namespace, prefix.keys, 0, buffer, durability=Durability.LOCAL)
    for layer in range(LAYOUT.num_layers):
        session.layer_produced(layer)
    assert (await session.finish()).stored_chunks == count
    await session.quiesced(10)
    leased = await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=1000 * _LEASED_S)
    broken = {frozenset(("client", each.node_id)) for each in leased.ranges}
    cluster.network.stuck |= broken
    delivery = await client.fetch(leased, client.allocate(LAYOUT.payload_bytes(count)))
    await asyncio.sleep(_UNDER_WAY_S)
    delivery.abandon()
    await asyncio.sleep(_UNDER_WAY_S)
    for member in list(cluster.fabric.members.values()):
        for peer in [each for peers in member.peers.values() for each in peers if each.between in broken]:
            peer.abort()
    await asyncio.sleep(_LOOKED_S)
    return await client.evict(prefix.namespace, prefix.keys)


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_client_that_a_node_does_not_reach_keeps_its_lease(seed: int) -> None:
    """The node gave the lease back, as if the client had died (seed 3389)."""
    assert simulate(seed, _evicted) == 0
