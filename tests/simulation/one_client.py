"""A simulated cluster with one client: how it is started, and what it stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.testing.simulation import Process, SimChannels, SimNearestTransport, SimulatedLoop
from tests.simulation.cluster import Cluster
from tests.simulation.prefixes import LAYOUT, Prefix, prefixes

Result = TypeVar("Result")


async def with_client(
    loop: SimulatedLoop,
    scenario: Callable[[Cluster, AsyncClient], Coroutine[Any, Any, Result]],
    *,
    storage_nodes: int = 3,
    objects_on: bool = True,
) -> Result:
    """Run a scenario in the process of a client of a new cluster."""
    cluster = Cluster(loop, storage_nodes=storage_nodes, objects_on=objects_on)
    await cluster.start()
    process = Process("client")
    channels: Any = SimChannels(cluster.network, process)
    client = AsyncClient("gateway-0", transport=SimNearestTransport(cluster.fabric, process), channels=channels)

    async def run() -> Result:
        await client.start()
        return await scenario(cluster, client)

    task: asyncio.Task[Result] = process.start(run())
    return await task


async def stored_prefix(cluster: Cluster, client: AsyncClient, durability: Durability, number: int = 0) -> Prefix:
    """Store a prefix of the cluster, the first one by default. Raises what the store raises."""
    prefix = prefixes(cluster.loop.random)[number]
    buffer = client.allocate(LAYOUT.payload_bytes(len(prefix.keys)))
    session = await client.store(prefix.namespace, prefix.keys, 0, buffer, durability=durability)
    for layer in range(LAYOUT.num_layers):
        session.layer_ready(layer)
    assert (await session.commit()).stored_chunks == len(prefix.keys)
    return prefix
