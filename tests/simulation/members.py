"""Who is in the simulated cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from quire.model.errors import MetadataUnavailable, NameTaken
from quire.model.nodes import Node
from quire.testing.simulation.loop import SimulatedLoop

EPOCH_MS = 1_700_000_000_000


class Delay(Protocol):
    """Redis, as far as members need it."""

    down: bool

    async def wait(self) -> None: ...


class Members:
    """The `Members` port. Its clock is that of Redis."""

    def __init__(self, metadata: Delay, loop: SimulatedLoop) -> None:
        self._metadata = metadata
        self._loop = loop
        self._members: dict[str, tuple[Node, float]] = {}
        self._changed: set[asyncio.Event] = set()

    async def renew(self, node: Node, ttl_ms: int, *, gather_s: float = 0.0) -> None:
        self._check()
        if self._is_taken(node):
            raise NameTaken(f"a node named {node.node_id!r} is alive", field="node_id")
        known = self._members.get(node.node_id)
        if known is None or known[0].incarnation != node.incarnation or known[1] <= self._loop.time():
            self._tell()
        self._members[node.node_id] = (node, self._loop.time() + ttl_ms / 1000)

    def _is_taken(self, node: Node) -> bool:
        known = self._members.get(node.node_id)
        return known is not None and known[1] > self._loop.time() and known[0].incarnation != node.incarnation

    async def leave(self, node_id: str, incarnation: str) -> bool:
        self._check()
        known = self._members.get(node_id)
        if known is None or known[0].incarnation != incarnation:
            return False
        del self._members[node_id]
        self._tell()
        return True

    async def changes(self) -> AsyncIterator[None]:
        self._check()
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            yield
            while True:
                await changed.wait()
                changed.clear()
                await self._metadata.wait()
                yield
        finally:
            self._changed.discard(changed)

    def _tell(self) -> None:
        for changed in self._changed:
            changed.set()

    async def live(self) -> list[Node]:
        self._check()
        return [node for node, until_s in self._members.values() if until_s > self._loop.time()]

    described = live

    async def now_ms(self) -> int:
        self._check()
        return EPOCH_MS + int(1000 * self._loop.time())

    def _check(self) -> None:
        if self._metadata.down:
            raise MetadataUnavailable("Redis does not answer")
