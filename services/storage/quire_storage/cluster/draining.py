"""Copies this node's chunks to nodes that stay, while operators want it removed.

A chunk may be removed with this node when the object tier has it, or when as many nodes that stay as its level asks for
have just confirmed that they have it, at that level: the index may be behind. A pass over all chunks after which none
lacks a copy is what the node reports as done. It is done anew when chunks have arrived or nodes have changed, and from
time to time.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from quire.model.durability import Durability
from quire.model.errors import NotImplementedHere, QuireError
from quire.model.index import OBJECT_TIER
from quire.model.nodes import Node, StorageState
from quire.telemetry import logger
from quire_storage.cluster import redundancy
from quire_storage.cluster.replication import COPIED, COPIES, LACKED, Replicator
from quire_storage.config import StorageConfig
from quire_storage.ports import Clock, ClusterIndex, Peers
from quire_storage.tiers.tiers import Tiers

_LOOK_S: Final = 0.5
_PAUSE_S_MAX: Final = 30.0
_AGAIN_S: Final = 60.0
_AGAIN_FACTOR: Final = 10
"""A pass takes a tenth of the time at most, once nothing is left."""
_BATCH_CHUNKS: Final = 64
_SKIPPED_TURNS: Final = 16
"""Requests to others before a node that has failed is asked again."""
_Groups = dict[tuple[Durability, tuple[str, ...]], list[bytes]]
"""Keys of chunks by their level and the nodes that may keep them, those that are listed first."""


class Activity(NamedTuple):
    """Requests that bring chunks to this node, or raise their level: those that run, and all that were ever started."""

    running: int
    started: int


class _Clean(NamedTuple):
    """A pass after which nothing was left. `starts`: of the nodes that stay. `again_s`: when it is to be repeated."""

    starts: frozenset[tuple[str, str]]
    started: int
    again_s: float


class Drainer:
    """`me` describes this node to others.

    Attributes:
        state: State that operators have set, as of the last heartbeat.
        reached: The state whose work is done.
        left: Chunks that the pass that runs has not come to, or the last one left without enough copies.
    """

    def __init__(
        self,
        *,
        config: StorageConfig,
        tiers: Tiers,
        index: ClusterIndex,
        peers: Peers,
        replicator: Replicator,
        clock: Clock,
        activity: Callable[[], Activity],
        me: Callable[[], Node],
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._index = index
        self._peers = peers
        self._replicator = replicator
        self._clock = clock
        self._activity = activity
        self._me = me
        self._clean: _Clean | None = None
        self._turn = 0
        self._skipped: dict[tuple[str, Durability], int] = {}
        self.state = self.reached = StorageState.ACTIVE
        self.left = 0

    def told(self, state: StorageState) -> None:
        """Take the state from a heartbeat's answer."""
        if state is not self.state:
            logger().info("operators have set this node's state", state=state.value)
            self.state, self.reached = state, StorageState.ACTIVE
            if state is StorageState.ACTIVE:
                self._clean, self.left = None, 0

    async def run(self) -> None:
        """Run until cancelled. While chunks cannot be copied, the pauses grow, and are as long as a pass at least."""
        pause_s = _LOOK_S
        while True:
            await self._clock.sleep(pause_s)
            previous, began_s = self.left, self._clock.monotonic_s()
            try:
                if self.state is not StorageState.ACTIVE:
                    await self._look()
            except QuireError as error:
                logger().warning("chunks cannot be copied to other nodes now", error=str(error))
            is_stuck = self.left >= previous > 0
            took_s = self._clock.monotonic_s() - began_s
            pause_s = max(took_s, min(2 * pause_s, _PAUSE_S_MAX)) if is_stuck else _LOOK_S

    async def _look(self) -> None:
        nodes = {node.node_id: node for node in await self._peers.storage_nodes() if node.stays}
        nodes.pop(self._config.node_id, None)
        starts, activity, state = frozenset(map(redundancy.start_of, nodes.values())), self._activity(), self.state
        now_s, clean = self._clock.monotonic_s(), self._clean
        same = clean is not None and (clean.starts, clean.started) == (starts, activity.started)
        if clean is not None and same and now_s < clean.again_s:
            self.reached = state
            return
        if not same:
            self.reached, self._clean = StorageState.ACTIVE, None
        complete = await self._pass(nodes)
        if self.state is not state:
            return
        if not complete:
            self.reached, self._clean = StorageState.ACTIVE, None
        elif not activity.running and self._activity() == activity:
            took_s = self._clock.monotonic_s() - now_s
            again_s = now_s + max(_AGAIN_S, _AGAIN_FACTOR * took_s)
            if self.reached is not state:
                logger().info("nodes that stay have all of this node's chunks", state=state.value)
            self.reached, self._clean = state, _Clean(starts, activity.started, again_s)

    async def _pass(self, nodes: Mapping[str, Node]) -> bool:
        """Have each chunk copied, or its copies confirmed; return whether none is left."""
        self._skipped = {}
        residency = self._tiers.residency
        retired = residency.retired()  # chunks that come back with their drive are in the scan below
        lacking, self.left = 0, max(1, len(residency))
        for keys in residency.scan():
            for first in range(0, len(keys), _BATCH_CHUNKS):
                if self.state is StorageState.ACTIVE:
                    return False
                batch = keys[first : first + _BATCH_CHUNKS]
                for (level, names), part in (await self._grouped(batch, nodes)).items():
                    lacking += await self._spread(part, level, [nodes[name] for name in names])
                self.left = max(lacking, self.left - len(batch), 1)
        self.left = lacking + await self._unconfirmed(retired | residency.retired(), nodes)
        return not self.left

    async def _grouped(self, keys: Sequence[bytes], nodes: Mapping[str, Node]) -> _Groups:
        """Group those that the object tier does not have."""
        headers = [header for key in keys if (header := self._tiers.find(key)) is not None]
        placements = await self._index.locate([header.chunk.record for header in headers]) if headers else []
        preferred = [node.node_id for node in await self._replicator.candidates(keys, set())]
        groups: _Groups = defaultdict(list)
        for header, listed in zip(headers, placements, strict=True):
            key = header.chunk.key
            if OBJECT_TIER in listed or not (listed or self._tiers.residency.recorded(key)):
                continue  # it stays; or it was never listed for this node, as what is read from the object tier
            names = [name for name in listed if name in nodes]
            names += [name for name in preferred if name in nodes and name not in names]
            groups[header.level, _zone_after_zone(names, nodes)].append(key)
        return groups

    async def _spread(self, keys: Sequence[bytes], level: Durability, targets: Sequence[Node]) -> int:
        """Have targets keep chunks, one after the other until enough have them; how many chunks lack a copy then."""
        if level is Durability.OBJECT:
            return len(keys)  # their objects are on their way
        lacking = dict.fromkeys(keys, COPIES if level is Durability.REPLICATED else 1)
        for target in targets:
            generations = await self._replicator.entries_of(list(lacking)) if lacking else {}
            if not generations:
                break
            marks = await self._asked(target, generations, level)
            copied = self._tiers.find_all([key for key, mark in marks.items() if mark == COPIED])
            needed = {key: count - (marks.get(key, LACKED) != LACKED) for key, count in lacking.items()}
            lacking = {key: count for key, count in needed.items() if count}
            size = sum(chunk.bytes for chunk in copied)
            await self._clock.sleep(size / self._config.replication_bytes_per_s)
        return len(self._tiers.find_all(list(lacking)))  # some may have been evicted meanwhile

    async def _unconfirmed(self, retired: Mapping[bytes, int], nodes: Mapping[str, Node]) -> int:
        """Return how many chunks of retired drives no node that stays has."""
        keys = list(retired)
        for node in nodes.values():
            remaining: list[bytes] = []
            for first in range(0, len(keys), _BATCH_CHUNKS):
                batch = {key: retired[key] for key in keys[first : first + _BATCH_CHUNKS]}
                marks = await self._asked(node, batch, Durability.LOCAL)
                remaining += [key for key in batch if marks.get(key, LACKED) == LACKED]
            keys = remaining
        return len(keys)

    async def _asked(self, target: Node, generations: Mapping[bytes, int], level: Durability) -> dict[bytes, int]:
        """Ask a node to keep chunks; return its marks, none from one that failed a moment ago or cannot keep them."""
        self._turn += 1
        lane = target.node_id, level
        if self._skipped.get(lane, 0) > self._turn:
            return {}
        try:
            marks = await self._peers.replicate(target, generations, self._me(), level=level)
        except QuireError as error:
            logger().warning("a node took no copies", node=target.node_id, level=level.value, error=str(error))
            never = isinstance(error, NotImplementedHere)
            self._skipped[lane] = sys.maxsize if never else self._turn + _SKIPPED_TURNS
            return {}
        return dict(zip(generations, marks, strict=True))


def _zone_after_zone(names: Sequence[str], nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """Return the names in an order in which the second is in another zone than the first, if one is."""
    if not names:
        return ()
    zone = nodes[names[0]].location.zone
    rest = sorted(names[1:], key=lambda name: nodes[name].location.zone == zone)
    return (names[0], *rest)
