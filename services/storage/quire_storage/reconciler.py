"""The index and this node kept in step: what the index lost is registered again, what is not here is withdrawn.

Heartbeats bring how many chunks the index lists for this node, and a digest of their keys. Where that stays different
from what the node believes, it looks at both, one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import numpy as np

from quire.model.errors import QuireError
from quire.model.fingerprints import fingerprints
from quire.model.index import ChunkRecord, Held
from quire.telemetry import logger
from quire_server.heartbeat import ClusterNews
from quire_storage.ports import Clock, Listing
from quire_storage.registry import Registry
from quire_storage.tiers import Tiers

_BATCH: Final = 512
_DIFFERENT_MAX: Final = 3
_AGAIN_S: Final = 1.0
_PAUSE_S, _PAUSE_S_MAX = 0.2, 30.0


class Reconciler:
    """`spawn` runs something in the background of the node."""

    def __init__(
        self,
        *,
        tiers: Tiers,
        registry: Registry,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._tiers = tiers
        self._registry = registry
        self._clock = clock
        self._spawn = spawn
        self._epoch = ""
        self._different = 0
        self._running = False
        self._again = False
        self._rebuilding = ""
        self._unlisted: dict[bytes, None] = {}
        self._registering = False
        self._more = asyncio.Event()

    def on_news(self, news: ClusterNews) -> None:
        """What a heartbeat's answer says of the index."""
        if news.listing is not None:
            self._different = self._different + 1 if self._is_different(news.listing) else 0
        if news.index_epoch != self._epoch:
            self._epoch = news.index_epoch
            self._start(sure=True)
        elif self._different >= _DIFFERENT_MAX:
            self._different = 0
            self._start(sure=False)
        if news.rebuild and news.rebuild != self._rebuilding and self._tiers.objects is not None:
            self._rebuilding = news.rebuild
            self._spawn(self._rebuild(news.rebuild))

    def _start(self, *, sure: bool) -> None:
        self._again = self._again or sure
        if not self._running:
            self._running = True
            self._spawn(self._run())

    async def _run(self) -> None:
        try:
            if not await self._differs() and not self._again:
                return
            while True:
                self._again = False
                await self._reconcile()
                if not self._again:
                    return
        except QuireError as error:
            logger().warning("the index cannot be compared with this node now", error=str(error))
        finally:
            self._running = False

    async def _differs(self) -> bool:
        """Whether index and node differ while nothing of this node is under way to the index; asked twice.

        An index that has fewer of this node's changes than it had acknowledged went back: what the node has let go of
        since, and what lies in the object tier alone, may be unknown to it, though nothing differs that it lists here.
        """
        for attempt in range(2):
            if attempt:
                await self._clock.sleep(_AGAIN_S)
            async with self._registry.quiet():
                listed = await self._registry.listing()
                differs = self._is_different(listed)
                if listed.changes < self._registry.changes:
                    await self._registry.damaged()
                self._registry.changes = listed.changes
                if not differs:
                    return False
        return True

    def _is_different(self, listed: Listing) -> bool:
        residency = self._tiers.residency
        mine = residency.listed_count, residency.listed_digest
        return (listed.count, listed.digest) != mine or listed.changes < self._registry.changes

    async def _reconcile(self) -> None:
        """Forget what was evicted while this node was away; withdraw what is not here; register what the index lost."""
        dropped = await self._tiers.drop(await self._registry.drops())
        listed: set[bytes] = set()
        before = list(self._tiers.residency.keys())  # what comes meanwhile is registered by those who bring it
        here, withdrawn = _Here(self._tiers.residency.keys), 0
        async for page in self._registry.holdings(here.unknown):
            for each in page:
                key = here.key(each)
                found = self._tiers.residency.look(key) if key is not None else None
                if key is not None and found is not None and found[1] == each.generation:
                    listed.add(key)
                withdrawn += key is None
        missing = [key for key in before if key not in listed and self._tiers.residency.look(key) is not None]
        logger().info("compared with the index", dropped=dropped, withdrawn=withdrawn, unlisted=len(missing))
        if await self._was_lost(missing):
            await self._registry.damaged()
        self._unlisted.update(dict.fromkeys(missing))
        self._more.set()
        if not self._registering:
            self._registering = True
            self._spawn(self._register())

    async def _was_lost(self, keys: list[bytes]) -> bool:
        """Whether the index has lost any of these, which it had acknowledged. What is being evicted is not listed a
        moment before it leaves this node: what is lost is so a while later, too.
        """
        for attempt in range(2):
            if attempt:
                await self._clock.sleep(_AGAIN_S)
            suspects = await self._believed(keys)
            if not suspects:
                return False
            keys = await self._registry.unlisted(suspects[:_BATCH])
        return bool(keys)

    async def _believed(self, keys: list[bytes]) -> list[ChunkRecord]:
        """Of these the ones that this node believes to be listed."""
        found = []
        for at, key in enumerate(keys):
            known = self._tiers.residency.look(key)
            if known is not None and known[1]:
                found.append(known[0].chunk.record)
            if at % _BATCH == 0:
                await asyncio.sleep(0)
        return found

    async def _register(self) -> None:
        """Parents may be on nodes that are still coming up: try again, ever less often. Comparisons go on beside it."""
        pause_s = _PAUSE_S
        try:
            while self._unlisted:
                self._more.clear()
                keys = list(self._unlisted)
                for first in range(0, len(keys), _BATCH):
                    await self._register_some(keys[first : first + _BATCH])
                self._unlisted = {key: None for key in self._unlisted if not self._is_settled(key)}
                pause_s = _PAUSE_S if len(self._unlisted) < len(keys) else min(2 * pause_s, _PAUSE_S_MAX)
                if self._unlisted and not self._more.is_set():
                    await self._clock.sleep(pause_s)
        finally:
            self._registering = False

    async def _register_some(self, keys: list[bytes]) -> None:
        try:
            await self._tiers.reregister(keys)
        except QuireError as error:
            logger().warning("the index does not take this node's chunks yet", error=str(error))

    def _is_settled(self, key: bytes) -> bool:
        """Whether a chunk is listed, or not here any more."""
        found = self._tiers.residency.look(key)
        return found is None or found[1] != 0

    async def _rebuild(self, token: str) -> None:
        """This node was chosen to tell the index what lies in the object tier."""
        assert self._tiers.objects is not None, "on_news() looked"
        try:
            found = [record async for record in self._tiers.objects.records()]
            registered = await self._registry.register_objects(parents_first(found))
            await self._registry.rebuilt(token)
            logger().info("the index was told what lies in the object tier", objects=len(found), listed=registered)
        except QuireError as error:
            logger().warning("the index could not be rebuilt from the object tier", error=str(error))
        finally:
            self._rebuilding = ""


def parents_first(found: list[ChunkRecord]) -> list[ChunkRecord]:
    """The records so ordered that none comes before its parent."""
    by_key = {record.key: record for record in found}
    ordered: dict[bytes, ChunkRecord] = {}
    for record in found:
        chain: list[ChunkRecord] = []
        at: ChunkRecord | None = record
        while at is not None and at.key not in ordered and at not in chain[-1:]:
            chain.append(at)
            at = by_key.get(at.parent)
            if len(chain) > len(by_key):
                break  # a cycle: no such chain was ever stored
        for each in reversed(chain):
            ordered.setdefault(each.key, each)
    return list(ordered.values())


class _Here:
    """The keys of what is here by their fingerprints, as the index tells of chunks. `keys`: all of them, now."""

    def __init__(self, keys: Callable[[], list[bytes]]) -> None:
        self._all = keys
        self._look_again()

    def key(self, held: Held) -> bytes | None:
        """None for a chunk that was not here when that was looked at last."""
        at = int(np.searchsorted(self._prints, np.frombuffer(held.fingerprint, ">u8").astype(np.uint64))[0])
        there = at < len(self._prints) and int(self._prints[at]) == int.from_bytes(held.fingerprint, "big")
        return self._keys[int(self._order[at])] if there else None

    def unknown(self, page: Sequence[Held]) -> list[Held]:
        """What is not here now."""
        if all(self.key(each) is not None for each in page):
            return []
        self._look_again()
        return [each for each in page if self.key(each) is None]

    def _look_again(self) -> None:
        self._keys = self._all()
        prints = np.frombuffer(fingerprints(b"".join(self._keys)), dtype=">u8").astype(np.uint64)
        self._order = np.argsort(prints)
        self._prints = prints[self._order]
