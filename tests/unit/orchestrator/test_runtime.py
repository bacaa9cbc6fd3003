"""The orchestrator's requests on an index in memory: no process, no network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire import PROTOCOL_VERSION
from quire.model.durability import Durability, OnExisting
from quire.model.errors import NodeUnavailable
from quire.model.hashing import Namespace, block_keys
from quire.model.index import records
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.nodes import Node, StorageInfo
from quire.model.profile import Profiles
from quire.testing import FakeClock
from quire.testing.index import MemoryIndex
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.runtime import Orchestrator

_SPACE = Namespace("model", "v1", KvLayout(2, 16, 1, 32, Dtype.FP16))


class _Members:
    """Two storage nodes, alive for ever."""

    async def live(self, now_ms: int) -> list[Node]:
        return [Node(node_id=name, about=StorageInfo(), protocol_version=PROTOCOL_VERSION) for name in ("a", "b")]


class _Policies:
    async def tenants(self) -> dict[str, Any]:
        return {}

    async def theta(self) -> int:
        return 0


class _Holders:
    """Nodes that have no chunk in memory or on a drive, and cannot be told to drop any."""

    def __init__(self) -> None:
        self.asked = 0

    async def raise_level(self, node: Node, keys: ChunkKeys, durability: Durability) -> list[bool]:
        self.asked += 1
        return [False] * len(keys)

    async def drop(self, node: Node, generations: Mapping[bytes, int]) -> None:
        raise NodeUnavailable("it is away")

    async def gone(self, node: Node) -> None:
        raise NodeUnavailable("nobody watches here")


async def _orchestrator() -> tuple[Orchestrator, MemoryIndex, _Holders]:
    index, holders, clock = MemoryIndex(), _Holders(), FakeClock()
    config, members, policies, held = OrchestratorConfig(cluster_secret="s"), _Members(), _Policies(), holders
    parts: dict[str, Any] = {"index": index, "members": members, "policies": policies, "holders": held}
    orchestrator = Orchestrator(config, profiles=Profiles(None), clock=clock, **parts)
    await orchestrator._refresh()
    return orchestrator, index, holders


async def test_a_prefix_that_lies_in_the_object_tier_alone_can_be_extended() -> None:
    """Finding 22: it counted as not stored, and the client was told that its chunks would have no parent."""
    orchestrator, index, holders = await _orchestrator()
    keys = block_keys(_SPACE, list(range(16 * 4)))
    stored = records(keys, 0, 2)
    await index.add_objects(stored, await index.register("a", stored, 0))
    await index.unregister("a", stored, 0, only_in_object=True)
    ranges, nodes, known = await orchestrator.allocate(keys, 2, Durability.LOCAL, OnExisting.SKIP)
    assert known == 2
    assert sum(each.count for each in ranges) == 2 and ranges[0].first == 2
    assert [node.node_id for node in nodes] == [each.node_id for each in ranges]
    assert not holders.asked, "what the object tier has is as durable as anything can be"


async def test_a_node_that_is_away_hears_of_evictions_when_it_is_back() -> None:
    """With the generations of the entries that ended: what it stores again until then is another entry's."""
    orchestrator, index, _ = await _orchestrator()
    keys = block_keys(_SPACE, list(range(16 * 2)))
    generations = await index.register("a", records(keys, 0, 2), 0)
    assert await orchestrator.evict(keys, keep=1) == 1
    assert await orchestrator.take_drops("a") == {keys.at(1): generations[1]}
    assert await orchestrator.take_drops("a") == {}
