"""Changes of the storage nodes, with a version, from an orchestrator to the members by their heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from quire.model.nodes import Node, StorageInfo

_GONE_MAX: Final = 1024
_NEWS_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class MembershipChanges:
    """`nodes` joined or changed, `gone` left; `all`: `nodes` are all there are. Then `version` is known."""

    version: str
    nodes: tuple[Node, ...] = ()
    gone: tuple[str, ...] = ()
    all: bool = False


class KnownNodes:
    """A member's knowledge of the storage nodes."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._wanted, self._told = asyncio.Event(), asyncio.Event()
        self.version = ""

    def update(self, changes: MembershipChanges) -> None:
        """An orchestrator has answered."""
        if changes.all:
            self._nodes = {}
        for name in changes.gone:
            self._nodes.pop(name, None)
        self._nodes |= {node.node_id: node for node in changes.nodes}
        self.version = changes.version
        self._told.set()

    async def storage_nodes(self) -> list[Node]:
        """Return the nodes as of the last heartbeat; of a new one, if no other node was known by then."""
        if len(self._nodes) < 2:
            self._told.clear()
            self._wanted.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NEWS_S):
                    await self._told.wait()
        return list(self._nodes.values())

    async def wanted(self, within_s: float) -> None:
        """Return when the next heartbeat is due: then, or as soon as its news are waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._wanted.wait()
        self._wanted.clear()


class MembershipLog:
    """Log of an orchestrator: it reads the storage nodes, and remembers when which of them changed.

    Versions are its own: a member that comes from another orchestrator receives everything once.
    """

    def __init__(self) -> None:
        self._name = os.urandom(6).hex()
        self._number = 0
        self._forgotten = 0
        self._since: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        self._nodes: dict[str, Node] = {}

    def look_at(self, node: Node) -> None:
        """This one is alive."""
        if not _same(self._nodes.get(node.node_id), node):
            self._number += 1
            self._note(node)

    def look(self, nodes: Mapping[str, Node]) -> None:
        """These are alive now, by name."""
        changed = [node for name, node in nodes.items() if not _same(self._nodes.get(name), node)]
        departed = list(self._nodes.keys() - nodes.keys())
        if changed or departed:
            self._number += 1
            for name in departed:
                self._leave(name)
            for node in changed:
                self._note(node)

    def lost(self, name: str) -> None:
        """This one is not alive."""
        if name in self._nodes:
            self._number += 1
            self._leave(name)

    def _leave(self, name: str) -> None:
        del self._since[name], self._nodes[name]
        self._gone[name] = self._number
        while len(self._gone) > _GONE_MAX:
            oldest = next(iter(self._gone))
            self._forgotten = max(self._forgotten, self._gone.pop(oldest))

    def _note(self, node: Node) -> None:
        self._nodes[node.node_id] = node
        self._since[node.node_id] = self._number
        self._gone.pop(node.node_id, None)

    def changes(self, version: str) -> MembershipChanges:
        """Return the changes since that version."""
        name, _, number = version.partition("/")
        current_version = f"{self._name}/{self._number}"
        if version == current_version:
            return MembershipChanges(current_version)
        since = int(number) if name == self._name else -1
        if since < self._forgotten:
            return MembershipChanges(current_version, tuple(self._nodes.values()), all=True)
        return MembershipChanges(
            current_version, tuple(self._after(since)), tuple(name for name, at in self._gone.items() if at > since)
        )

    def _after(self, since: int) -> Iterable[Node]:
        return (self._nodes[name] for name, at in self._since.items() if at > since)


def _same(previous: Node | None, current: Node) -> bool:
    """Compare for nodes that copy chunks to it: the used bytes are not part of it."""
    if previous is None or not isinstance(previous.about, StorageInfo) or not isinstance(current.about, StorageInfo):
        return previous is current
    return previous is current or (
        previous.incarnation == current.incarnation
        and previous.state is current.state
        and previous.grpc_address == current.grpc_address
        and previous.location == current.location
        and previous.about.worker_address == current.about.worker_address
        and previous.about.capacity_bytes == current.about.capacity_bytes
    )
