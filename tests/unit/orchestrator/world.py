"""An orchestrator of real parts and fakes: the index in memory, two storage nodes that do what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire import PROTOCOL_VERSION
from quire.model.durability import Durability
from quire.model.errors import NodeUnavailable
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.nodes import Info, Node, SchedulerInfo, StorageInfo, StorageState
from quire.model.policy import NamespacePolicy, TenantPolicy, Theta
from quire.model.records import records
from quire.testing import FakeClock
from quire.testing.index import MemoryIndex
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.runtime import Orchestrator
from quire_server.clock import ClusterClock

SPACE = Namespace("Llama-3.1-8B", "v1", KvLayout(32, 16, 8, 128, Dtype.BF16), b"salt")
CHUNK = SPACE.layout.chunk_bytes
SECRET = "s" * 32
LINK = 5_000_000_000


@dataclass
class World:
    """`infos`: members by name, alive for ever."""

    infos: dict[str, Info] = field(
        default_factory=lambda: {
            "a": StorageInfo(worker_address=b"wa", link="rack"),
            "b": StorageInfo(worker_address=b"wb", link="rack"),
            "leader": SchedulerInfo(link_rates={"rack": LINK}),
        }
    )
    index: MemoryIndex = field(default_factory=MemoryIndex)
    clock: FakeClock = field(default_factory=FakeClock)
    raised: list[str] = field(default_factory=list)
    can_raise: bool = False
    tenants_: dict[str, TenantPolicy] = field(default_factory=dict)

    deleted: list[bytes] = field(default_factory=list)
    demoted: dict[str, list[bytes]] = field(default_factory=dict)
    pinned: set[bytes] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    epoch: str = ""
    changes: dict[str, int] = field(default_factory=dict)
    states: dict[str, StorageState] = field(default_factory=dict)

    def with_objects(self) -> dict[str, Info]:
        """A storage node that reaches the object tier."""
        return {"a": StorageInfo(worker_address=b"wa", link="rack", has_object_tier=True)}

    async def start(self) -> Orchestrator:
        this: Any = self
        orchestrator = Orchestrator(
            config=OrchestratorConfig(cluster_secret=SECRET),
            index=self.index,
            members=this,
            policies=this,
            holders=this,
            clock=ClusterClock(self.clock),
        )
        await orchestrator.cluster.refresh()
        return orchestrator

    async def stored(self, chunks: int, node: str = "a", *, first: int = 0) -> ChunkKeys:
        """A chain of that length, whose chunks from `first` on are listed for a node."""
        keys = block_keys(SPACE, list(range(16 * chunks)))
        await self.index.register(node, records(keys, first, chunks - first), 0)
        return keys

    # ---- members, policies, holders

    async def live(self) -> list[Node]:
        return [
            Node(
                node_id=name,
                about=info,
                grpc_address=f"{name}:1",
                protocol_version=PROTOCOL_VERSION,
                state=self.states.get(name, StorageState.ACTIVE),
            )
            for name, info in self.infos.items()
        ]

    async def expected(self) -> dict[str, StorageState]:
        return self.states

    async def set_state(self, node_id: str, state: StorageState, previous: StorageState) -> bool:
        if self.states.get(node_id) is not previous:
            return False
        self.states[node_id] = state
        return True

    described = live

    async def now_ms(self) -> int:
        return self.clock.now_ms()

    async def all(self) -> list[NamespacePolicy]:
        return []

    async def tenants(self) -> dict[str, TenantPolicy]:
        return self.tenants_

    async def theta(self) -> Theta:
        return Theta()

    async def raise_level(self, node: Node, keys: ChunkKeys, durability: Durability) -> list[bool]:
        self.raised.append(node.node_id)
        return [self.can_raise] * len(keys)

    async def give_up(self, node: Node, keys: ChunkKeys) -> list[bool]:
        if node.node_id in self.away:
            raise NodeUnavailable("it is away")
        self.demoted[node.node_id] = list(keys)
        return [key not in self.pinned for key in keys]

    async def drop(self, node: Node, generations: Mapping[bytes, int]) -> None:
        raise NodeUnavailable("it is away")

    async def is_current(self, node: Node, epoch: str, changes: int) -> bool:
        if node.node_id in self.away:
            raise NodeUnavailable("it is away")
        return self.epoch in ("", epoch) and self.changes.get(node.node_id, 0) <= changes

    async def delete_objects(self, node: Node, keys: ChunkKeys, until_ms: int) -> None:
        self.deleted += list(keys)

    async def gone(self, node: Node) -> None:
        await asyncio.Event().wait()
