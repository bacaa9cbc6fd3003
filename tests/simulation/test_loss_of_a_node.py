"""How long look-ups go on to name a node that has died, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.client import Lookup, QuireClient
from quire.model.durability import Durability
from quire.testing.simulation import Process, SimChannels, SimNearestTransport, SimulatedLoop, simulate
from tests.simulation.cluster import Cluster, SimHolders
from tests.simulation.prefixes import LAYOUT, Prefix, prefixes

_HEARTBEAT_S = 0.25  # of the simulated cluster, whose members count as dead after 1.5 s

_IN_A_ROW = 10


async def _loss(loop: SimulatedLoop) -> float:
    """Store with two copies, crash the node that look-ups name: seconds until they name the other."""
    cluster = Cluster(loop)
    await cluster.start()
    process = Process("client")
    channels: Any = SimChannels(cluster.network, process)
    client = QuireClient("gateway-0", transport=SimNearestTransport(cluster.fabric, process), channels=channels)
    task: asyncio.Task[float] = process.start(_until_found_elsewhere(cluster, client))
    return await task


async def _until_found_elsewhere(cluster: Cluster, client: QuireClient) -> float:
    await client.start()
    prefix = prefixes(cluster.loop.random)[0]
    count = len(prefix.keys)
    buffer = client.allocate(LAYOUT.payload_bytes(count))
    session = await client.store(prefix.namespace, prefix.keys, 0, buffer, durability=Durability.REPLICATED)
    for layer in range(LAYOUT.num_layers):
        session.layer_produced(layer)
    assert (await session.finish()).stored_chunks == count
    victim = (await _found(client, prefix)).ranges[0].node_id
    cluster.crash(victim)
    crashed_s = cluster.loop.time()
    since_s, elsewhere = crashed_s, 0
    while elsewhere < _IN_A_ROW:  # two copies take turns: one look-up alone may name the other by chance
        found = await _found(client, prefix)
        if found.matched_chunks == count and victim not in {each.node_id for each in found.ranges}:
            elsewhere += 1
        else:
            since_s, elsewhere = cluster.loop.time(), 0
        await asyncio.sleep(0.005)
    return since_s - crashed_s


async def _found(client: QuireClient, prefix: Prefix) -> Lookup:
    return await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=0)


@pytest.mark.parametrize("seed", range(1, 6))
def test_look_ups_find_the_other_copy_within_a_heartbeat(seed: int) -> None:
    assert simulate(seed, _loss) < _HEARTBEAT_S


def test_without_a_watch_on_connections_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault put back: the check above can fail."""

    async def never(self: SimHolders, node: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(SimHolders, "gone", never)
    assert simulate(1, _loss) > 2 * _HEARTBEAT_S
