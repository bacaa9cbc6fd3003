"""What the orchestrator needs from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.clock import Clock
from quire.durability import Durability
from quire.keys import ChunkKeys
from quire.metadata.index import ChunkRecord, Evicted, Match
from quire.nodes import Node
from quire.policy import NamespacePolicy, TenantPolicy

__all__ = ["ChunkHolder", "Clock", "Index", "Members", "PolicyBook"]


class Index(Protocol):
    """The prefix-closed index; see `quire.metadata.PrefixIndex`."""

    async def match(self, keys: ChunkKeys) -> Match: ...
    async def register(
        self, node_id: str, chunks: Sequence[ChunkRecord], *, only_indexed: bool = False
    ) -> list[bool]: ...
    async def unregister(self, node_id: str, chunks: Sequence[ChunkRecord]) -> int: ...
    async def evict(self, chunks: Sequence[ChunkRecord], now_ms: int) -> Evicted: ...
    async def holders(self, chunks: Sequence[ChunkRecord]) -> list[tuple[str, ...]]: ...
    async def epoch(self) -> str: ...
    async def remember_drops(self, node_id: str, keys: Sequence[bytes]) -> None: ...
    async def take_drops(self, node_id: str) -> list[bytes]: ...
    async def pin(self, segment: bytes, key: bytes, lease_id: bytes, expires_ms: int, ttl_ms: int) -> bool: ...
    async def unpin(self, segment: bytes, key: bytes, lease_id: bytes) -> bool: ...


class Members(Protocol):
    """Who is alive; see `quire.metadata.Membership`."""

    async def renew(self, node: Node, expires_ms: int) -> None: ...
    async def leave(self, node_id: str, incarnation: str) -> bool: ...
    async def live(self, now_ms: int) -> list[Node]: ...


class PolicyBook(Protocol):
    """What operators set; see `quire.metadata.Policies`."""

    async def set(self, policy: NamespacePolicy) -> None: ...
    async def all(self) -> list[NamespacePolicy]: ...
    async def set_tenant(self, policy: TenantPolicy) -> None: ...
    async def tenants(self) -> dict[str, TenantPolicy]: ...
    async def set_theta(self, theta_bytes: int) -> None: ...
    async def theta(self) -> int: ...


class ChunkHolder(Protocol):
    """Storage nodes, as far as the orchestrator commands them."""

    async def drop(self, node: Node, keys: ChunkKeys, *, objects: bool = False) -> int:
        """Have chunks forgotten that are no longer indexed, from the object tier too if asked; how many were there."""

    async def raise_level(self, node: Node, keys: ChunkKeys, durability: Durability) -> list[bool]:
        """Make chunks durable at a level; for each whether it is now."""

    async def gone(self, node: Node) -> None:
        """Return when the connection to a node breaks."""
