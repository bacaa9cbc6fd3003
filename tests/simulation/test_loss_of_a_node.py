"""How long look-ups go on to name a node that has died, in virtual time."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from quire.client import AsyncClient, Lookup
from quire.model.durability import Durability
from quire.testing.simulation import simulate
from tests.simulation.cluster import Cluster, SimHolders
from tests.simulation.one_client import stored_prefix, with_client
from tests.simulation.prefixes import Prefix

_HEARTBEAT_S = 0.25  # of the simulated cluster, whose members count as dead after 1.5 s

_IN_A_ROW = 10


async def _loss(cluster: Cluster, client: AsyncClient) -> float:
    """Store with two copies, crash the node that look-ups name: seconds until they name the other."""
    prefix = await stored_prefix(cluster, client, Durability.REPLICATED)
    count = len(prefix.keys)
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


async def _found(client: AsyncClient, prefix: Prefix) -> Lookup:
    return await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=0)


@pytest.mark.parametrize("seed", range(1, 6))
def test_look_ups_find_the_other_copy_within_a_heartbeat(seed: int) -> None:
    assert simulate(seed, partial(with_client, scenario=_loss)) < _HEARTBEAT_S


def test_without_a_watch_on_connections_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault put back: the check above can fail."""

    async def never(self: SimHolders, node: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(SimHolders, "gone", never)
    assert simulate(1, partial(with_client, scenario=_loss)) > 2 * _HEARTBEAT_S
