"""More copies of the ranges that are read most, for as long as that lasts.

A node whose link is well used has other nodes pull the ranges that take most of it; look-ups then name these nodes in
turn. A node that has pulled such a copy gives it up when it was not read much for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.ranges import ChunkRange
from quire.telemetry import counter, logger, names
from quire_server.core.claims import claims_by_capacity
from quire_server.core.placement import cut
from quire_storage.cluster.replication import Replicator
from quire_storage.config import StorageConfig
from quire_storage.core.heat import Heat, Hot
from quire_storage.ports import Clock, ClusterIndex, Peers
from quire_storage.tiers.tiers import Tiers

_CHECK_S = 1.0
_AT_ONCE = 4
_HOT_SHARE = 0.1
_COLD_SHARE = 0.05


@dataclass(slots=True)
class _Copy:
    """A range that was pulled because it was hot. `wanted_s`: when it was last."""

    keys: ChunkKeys
    wanted_s: float


class HotCopies:
    """A range is hot that takes a tenth of the link, while more than the configured share of it is used."""

    def __init__(
        self,
        *,
        config: StorageConfig,
        tiers: Tiers,
        replicator: Replicator,
        index: ClusterIndex,
        peers: Peers,
        clock: Clock,
        me: Callable[[], Node],
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._replicator = replicator
        self._index = index
        self._peers = peers
        self._clock = clock
        self._me = me
        self._heat = Heat()
        self._copies: dict[bytes, _Copy] = {}
        self._events = counter(names.HOT_COPIES, "1", "copies of ranges that are read much, by what became of them")

    @property
    def kept(self) -> int:
        """Copies that are here because they are hot."""
        return len(self._copies)

    def read(self, keys: ChunkKeys, ranges: Sequence[ChunkRange], chunk_bytes: int) -> None:
        """These chunks of a request were delivered. `keys`: of the whole request."""
        now_s = self._clock.monotonic_s()
        for run in ranges:
            for first, stop in cut(run.first, run.stop, chunk_bytes):
                self._heat.read(keys.run(first, stop - first), (stop - first) * chunk_bytes, now_s)

    async def pull(self, source: Node, generations: Mapping[bytes, int]) -> list[int]:
        """Keep a copy of a range that is hot at another node; for each chunk whether it is here now."""
        keys = ChunkKeys(b"".join(generations))
        marks = await self._replicator.pull(source, generations, Durability.MEMORY)
        if any(marks):
            self._copies[keys.at(0)] = _Copy(keys, self._clock.monotonic_s())
            self._events.add(1, {"event": "pulled"})
        return marks

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._clock.sleep(_CHECK_S)
            try:
                await self._spread()
                await self._give_up()
            except QuireError as error:
                logger().warning("hot ranges cannot be copied now", error=str(error))

    async def _spread(self) -> None:
        now_s, link = self._clock.monotonic_s(), self._config.link_bytes_per_s
        if not self._config.hot_share or self._heat.total(now_s) < self._config.hot_share * link:
            return
        for hot in self._heat.above(_HOT_SHARE * link, now_s)[:_AT_ONCE]:
            await self._copy(hot)

    async def _copy(self, hot: Hot) -> None:
        """Copy it to the node with the strongest claim on it among those that do not have it."""
        chunks = self._tiers.find_all(list(hot.keys))
        if not chunks:
            return
        holders = set((await self._index.locate([chunks[0].record]))[0])
        holders.add(self._config.node_id)
        nodes = await self._peers.storage_nodes()
        candidates = [node for node in nodes if node.stays and node.node_id not in holders]
        if not candidates:
            return
        name = claims_by_capacity(candidates).strongest([hot.keys.at(0)])[0]
        target = next(node for node in candidates if node.node_id == name)
        generations = await self._replicator.entries_of(list(hot.keys))
        if hot.keys.at(0) not in generations:  # its name there
            return
        try:
            await self._peers.replicate(target, generations, self._me(), hot=True)
        except QuireError as error:
            logger().warning("a node took no copy of a hot range", node=name, error=str(error))
            return
        logger().info("a hot range was copied", node=name, chunks=len(generations), bytes_per_s=hot.bytes_per_s)

    async def _give_up(self) -> None:
        now_s, cold = self._clock.monotonic_s(), _COLD_SHARE * self._config.link_bytes_per_s
        for first, copy in list(self._copies.items()):
            if self._heat.of(first, now_s) > cold:
                copy.wanted_s = now_s
            elif now_s - copy.wanted_s > self._config.hot_idle_s:
                del self._copies[first]
                given_up = await self._give_up_cold(copy.keys)
                self._events.add(1, {"event": "given up"})
                logger().info("gave up a copy that is cold", chunks=given_up)

    async def _give_up_cold(self, keys: ChunkKeys) -> int:
        """Give up copies that a node that stays keeps as durably, unless they were raised to `replicated` here."""
        headers = [header for key in keys if (header := self._tiers.find(key)) is not None]
        headers = [header for header in headers if header.level is not Durability.REPLICATED]
        holders = await self._index.locate([header.chunk.record for header in headers]) if headers else []
        peers_that_stay = {node.node_id for node in await self._peers.storage_nodes() if node.stays} - {
            self._config.node_id
        }
        groups: dict[tuple[str, Durability], list[bytes]] = {}
        for header, listed in zip(headers, holders, strict=True):
            keepers = sorted(peers_that_stay.intersection(listed))
            if keepers:
                groups.setdefault((keepers[0], header.level), []).append(header.chunk.key)
        given_up = 0
        for (keeper, level), group in groups.items():
            given_up += await self._replicator.give_up(group[::-1], [keeper], level)
        return given_up
