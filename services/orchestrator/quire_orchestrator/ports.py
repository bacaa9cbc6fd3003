"""What the orchestrator needs from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.clock import Clock
from quire.keys import ChunkKeys
from quire.metadata.index import ChunkRecord, Match
from quire.nodes import Node

__all__ = ["ChunkHolder", "Clock", "Index", "Members"]


class Index(Protocol):
    """The prefix-closed index; see `quire.metadata.PrefixIndex`."""

    async def match(self, keys: ChunkKeys) -> Match: ...
    async def register(self, node_id: str, chunks: Sequence[ChunkRecord]) -> list[bool]: ...
    async def unregister(self, node_id: str, chunks: Sequence[ChunkRecord]) -> int: ...
    async def evict(self, keys: ChunkKeys, keep: int, now_ms: int) -> list[tuple[bytes, tuple[str, ...]]]: ...
    async def pin(self, segment: bytes, key: bytes, lease_id: bytes, expires_ms: int, ttl_ms: int) -> bool: ...
    async def unpin(self, segment: bytes, key: bytes, lease_id: bytes) -> bool: ...


class Members(Protocol):
    """Who is alive; see `quire.metadata.Membership`."""

    async def renew(self, node: Node, expires_ms: int) -> None: ...
    async def leave(self, node_id: str, incarnation: str) -> bool: ...
    async def live(self, now_ms: int) -> list[Node]: ...


class ChunkHolder(Protocol):
    """Storage nodes, as far as the orchestrator commands them."""

    async def drop(self, node: Node, keys: ChunkKeys) -> int:
        """Free the slots of chunks that are no longer indexed; how many were there."""
