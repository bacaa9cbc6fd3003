"""Removal of two of four simulated nodes while clients store: what was acknowledged outlives both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.errors import ConditionFailed, QuireError
from quire.model.nodes import Node, NodeAddress
from quire.testing.simulation import simulate
from quire_gateway.adapters.cluster import GrpcStorageNodes
from quire_orchestrator.removals import Removals
from quire_storage.cluster.node_rpc import NodeRequests
from tests.simulation.cluster import Cluster
from tests.simulation.one_client import stored_prefix, with_client
from tests.simulation.prefixes import Prefix

_LEAVING = ("storage-1", "storage-2")
_ALONE = (Durability.LOCAL, Durability.MEMORY, Durability.LOCAL, Durability.MEMORY, Durability.LOCAL)
_LEVELS = (*_ALONE[:2], Durability.REPLICATED, *_ALONE[:2])
_WAITED_S = 300.0


async def _decommission(cluster: Cluster, name: str) -> None:
    """Do what `quire decommission` does."""
    removals: Removals = cluster.members["orchestrator-0"].service.removals
    async with asyncio.timeout(_WAITED_S):
        await removals.set_draining(name, draining=True)
        while not (await removals.check(name)).is_drained:
            await asyncio.sleep(0.1)
        await removals.decommission(name, lose_chunks=False)
        while not (await removals.check(name)).is_safe:
            await asyncio.sleep(0.1)


async def _remove(cluster: Cluster, name: str) -> None:
    await _decommission(cluster, name)
    cluster.crash(name)


async def _lost(cluster: Cluster, client: AsyncClient, *, levels: Sequence[Durability]) -> int:
    """Remove two nodes at once while prefixes of these levels are stored: how many prefixes are not found then."""
    stored: list[Prefix] = []

    async def store_all() -> None:
        for number, level in enumerate(levels):
            try:
                stored.append(await stored_prefix(cluster, client, level, 2 * number))  # of a root of its own
            except QuireError:  # it is not acknowledged
                continue
            await asyncio.sleep(0.4)

    storing = asyncio.create_task(store_all())
    await asyncio.sleep(1.0)
    await asyncio.gather(*(_remove(cluster, name) for name in _LEAVING))
    await storing
    await asyncio.sleep(5.0)  # both are known to be gone
    lost = 0
    for prefix in stored:
        found = await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=0)
        if found.matched_chunks < len(prefix.keys):
            lost += 1
    assert len(stored) > 3
    return lost


def _of_four(seed: int, scenario: Any) -> Any:
    return simulate(seed, partial(with_client, scenario=scenario, storage_nodes=4, objects_on=False))


@pytest.mark.parametrize("seed", range(1, 5))
def test_what_was_acknowledged_outlives_two_nodes(seed: int) -> None:
    assert _of_four(seed, partial(_lost, levels=_LEVELS)) == 0


def test_copies_on_nodes_that_leave_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault put back: two nodes that leave rely on each other's copies. The check above can fail."""
    monkeypatch.setattr(Node, "stays", True)
    monkeypatch.setattr(NodeRequests, "_keeps_copies", lambda self: True)

    def is_lost(seed: int) -> bool:
        try:
            return bool(_of_four(seed, partial(_lost, levels=_ALONE)))
        except ConditionFailed:  # the second one was looked at after the first had gone
            return False

    assert any(map(is_lost, range(1, 13)))


async def _store_that_comes_late(cluster: Cluster, client: AsyncClient) -> bool:
    """Hold a store back behind its placement until its node is safe to remove: whether it is acknowledged and lost."""
    held, safe = asyncio.get_running_loop().create_future(), asyncio.Event()
    ingest = GrpcStorageNodes.ingest

    async def late(self: GrpcStorageNodes, node: NodeAddress, *arguments: Any) -> Any:
        if not held.done():
            held.set_result(node.grpc_address)
        await safe.wait()
        return await ingest(self, node, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrpcStorageNodes, "ingest", late)
        storing = asyncio.create_task(stored_prefix(cluster, client, Durability.LOCAL))
        name = await held
        await _decommission(cluster, name)
        safe.set()
        try:
            prefix = await storing
        except QuireError:
            return False
    cluster.crash(name)
    await asyncio.sleep(5.0)
    found = await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=0)
    return found.matched_chunks < len(prefix.keys)


def test_a_store_that_comes_late_is_refused() -> None:
    assert not _of_four(1, _store_that_comes_late)


def test_a_decommissioned_node_that_takes_stores_loses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault put back: the check above can fail."""
    monkeypatch.setattr(NodeRequests, "_is_out", lambda self: False)
    assert _of_four(1, _store_that_comes_late)
