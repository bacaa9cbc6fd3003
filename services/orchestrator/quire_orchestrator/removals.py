"""Removal of storage nodes: its consequences, and the states that operators set."""

from __future__ import annotations

from collections.abc import Sequence

from quire.model.errors import ConditionFailed, InvalidRequest
from quire.model.index import OBJECT_TIER
from quire.model.nodes import Node, Removal, Role, StorageInfo, StorageState
from quire.telemetry import logger
from quire_orchestrator.cluster import Cluster
from quire_orchestrator.ports import Index, Members


class Removals:
    """Every method is one request, and raises `InvalidRequest` for a node that is not expected."""

    def __init__(self, *, index: Index, cluster: Cluster, members: Members) -> None:
        self._index = index
        self._cluster = cluster
        self._members = members

    async def set_draining(self, node_id: str, *, draining: bool) -> None:
        """Have a node's chunks copied to others, or have it take stores again.

        Raises `ConditionFailed` if no other node could take its chunks, or while the node still reports the work of a
        state that has ended.
        """
        candidates, state = await self._others(node_id), await self._state(node_id)
        if not draining:
            await self._set(node_id, StorageState.ACTIVE, state)
            return
        if state is StorageState.DECOMMISSIONED:
            return
        if not candidates:
            raise ConditionFailed(f"no other storage node is alive and stays: nothing can take what {node_id} has")
        node = self._cluster.storage_nodes().get(node_id)
        if node is not None and state is StorageState.ACTIVE is not _reached(node):
            raise ConditionFailed(f"{node_id} has not reported yet that it takes stores again: try again in a second")
        await self._set(node_id, StorageState.DRAINING, state)

    async def decommission(self, node_id: str, *, lose_chunks: bool) -> None:
        """Take a node out of use. Raises `ConditionFailed` while a chunk would be lost, unless `lose_chunks`."""
        removal = await self.check(node_id)
        if removal.state is StorageState.DECOMMISSIONED:
            return
        if not lose_chunks:
            if not await self._others(node_id):
                raise ConditionFailed(f"{node_id} is the last storage node")
            if not removal.is_drained:
                raise ConditionFailed(f"{node_id} cannot be removed: {removal.reason}")
        await self._set(node_id, StorageState.DECOMMISSIONED, removal.state)

    async def check(self, node_id: str) -> Removal:
        """Return the consequences of removing a node now."""
        await self._cluster.refresh()
        state = await self._state(node_id)
        node, left_chunks = await self._described(node_id)
        if node is not None and state is not StorageState.ACTIVE is _reached(node):
            return Removal(state, is_alive=True, left_chunks=left_chunks, reason=_unreported(state, left_chunks))
        counted = await self._others(node_id)
        names = [OBJECT_TIER, *(holder.node_id for holder in counted)]
        sole = await self._index.sole(node_id, names)
        reason = f"no other node that stays has {sole} of its chunks" if sole else ""
        if node is None:
            unknown = "it is away: chunks that only it has are unknown until it is back"
            return Removal(
                state, is_alive=False, sole_chunks=sole, reason=f"it is away, and {reason}" if sole else unknown
            )
        if not reason and state is StorageState.ACTIVE:
            reason = "it takes stores; drain it first"
        if not reason and await self._changed(node, counted):
            reason = "nodes came or went while its chunks were counted; ask again"
        is_drained = not reason
        if not reason and state is StorageState.DRAINING:
            reason = "it is not decommissioned: stores that are under way may still reach it"
        elif not reason and _reached(node) is not StorageState.DECOMMISSIONED:
            reason = "it has not reported yet that it refuses stores"
        return Removal(
            state,
            is_alive=True,
            left_chunks=left_chunks,
            sole_chunks=sole,
            is_drained=is_drained,
            is_safe=not reason,
            reason=reason,
        )

    async def _described(self, node_id: str) -> tuple[Node | None, int]:
        """Return a node that is alive, and how many chunks it has left to copy."""
        for node in await self._cluster.nodes(Role.STORAGE):
            if node.node_id == node_id:
                return node, int(node.stats.get("to copy", 0))
        return None, 0

    async def _changed(self, node: Node, counted: Sequence[Node]) -> bool:
        """Whether nodes came, left or changed since a count: a copy counts while its node lives and stays."""
        await self._cluster.refresh()
        nodes = self._cluster.storage_nodes()
        current = nodes.get(node.node_id)
        same = current is not None and (current.incarnation, current.state, _reached(current)) == (
            node.incarnation,
            node.state,
            _reached(node),
        )
        return not same or not set(map(_start, counted)) <= set(map(_start, nodes.values()))

    async def _others(self, node_id: str) -> list[Node]:
        """Return the other live storage nodes that stay."""
        await self._cluster.refresh()
        nodes = self._cluster.storage_nodes().values()
        return [node for node in nodes if node.stays and node.node_id != node_id]

    async def _state(self, node_id: str) -> StorageState:
        expected = await self._members.expected()
        if node_id not in expected:
            names = ", ".join(sorted(expected)) or "none"
            raise InvalidRequest(f"{node_id!r} is no storage node of this cluster; these are: {names}", field="node_id")
        return expected[node_id]

    async def _set(self, node_id: str, state: StorageState, previous: StorageState) -> None:
        """Set the state of a node. Raises `ConditionFailed` if it is another one by now."""
        if not await self._members.set_state(node_id, state, previous):
            raise ConditionFailed(f"the state of {node_id} has been set by another operator; look, and try again")
        await self._cluster.refresh()
        logger().info("the state of a storage node was set", node=node_id, state=state.value, previous=previous.value)


def _start(node: Node) -> tuple[str, str, bool]:
    """Return the facts of a holder that a count relies on."""
    return node.node_id, node.incarnation, node.stays


def _reached(node: Node) -> StorageState:
    """Return the state whose work a node has reported as done."""
    return node.about.reached if isinstance(node.about, StorageInfo) else StorageState.ACTIVE


def _unreported(state: StorageState, left_chunks: int) -> str:
    """Return the reason why a node is not drained that has not reported so."""
    if left_chunks:
        return f"{left_chunks} of its chunks are to be copied, or to be found elsewhere"
    news = "refuses stores" if state is StorageState.DECOMMISSIONED else "has been told to drain"
    return f"it has not reported yet that it {news}, and that nodes that stay have all of its chunks"
