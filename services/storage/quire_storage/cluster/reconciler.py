"""The index and this node kept in step: lost entries are registered again, entries of missing chunks are withdrawn.

Heartbeats bring how many chunks the index lists for this node, and a digest of their keys. Where that stays different
from what the node believes, it looks at both, one by one.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.model.errors import QuireError
from quire.model.keys import KEY_BYTES
from quire.model.records import ChunkRecord
from quire.telemetry import logger
from quire_server.membership.heartbeat import ClusterNews
from quire_storage.cluster.fingerprint_index import LocalFingerprints
from quire_storage.cluster.registry import Registry
from quire_storage.cluster.unlisted import UnlistedChunks
from quire_storage.ports import Clock, Listing
from quire_storage.tiers.tiers import Tiers

_BATCH: Final = 96
_PART: Final = 1024
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
        threads: Executor,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._tiers = tiers
        self._registry = registry
        self._clock = clock
        self._threads = threads
        self._spawn = spawn
        self._epoch = self._compared = ""
        self._offered = True
        self._different = 0
        self._running = False
        self._again = False
        self._rebuilding = ""
        self._unlisted = UnlistedChunks()
        self._registering = False
        self._more = asyncio.Event()

    @property
    def compared(self) -> bool:
        """Whether the index was compared with this node, and was sent every chunk that it did not list.

        A chunk whose parent is not listed is refused, and sent again later; this does not wait for it.
        """
        return self._compared == self._epoch != "" and self._offered and not self._running

    def on_news(self, news: ClusterNews) -> None:
        """Take the index's part of a heartbeat's answer."""
        if news.listing is not None:
            self._different = self._different + 1 if self._is_different(news.listing) else 0
        if news.index_epoch != self._epoch:
            self._epoch = news.index_epoch
            self._start(sure=True)
        elif self._different >= _DIFFERENT_MAX or self._registry.unsure:
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
            if self._registry.epoch not in ("", self._epoch):  # it was lost, or a backup of it was restored
                await self._registry.damaged()
            self._registry.epoch = self._epoch
            different = await self._differs()
            while different or self._again:
                different = self._again = False
                await self._reconcile()
            self._compared = self._epoch
        except QuireError as error:
            self._epoch = ""  # the next heartbeat tries again
            logger().warning("the index cannot be compared with this node now", error=str(error))
        finally:
            self._running = False

    async def _differs(self) -> bool:
        """Whether index and node differ while no change of this node is under way to the index; checked twice.

        An index that has fewer of this node's changes than it had acknowledged went back: chunks that the node has
        evicted since, and chunks of the object tier alone, may be unknown to it, though its listing of this node
        agrees.
        """
        for attempt in range(2):
            if attempt:
                await self._clock.sleep(_AGAIN_S)
            async with self._registry.quiet():
                listed = await self._registry.listing()
                self._registry.unsure = False
                differs = self._is_different(listed)
                if listed.changes < self._registry.changes:
                    await self._registry.damaged()
                self._registry.changes = listed.changes
                if not differs:
                    return False
        return True

    def _is_different(self, listed: Listing) -> bool:
        residency = self._tiers.residency
        own_listing = residency.listed_count, residency.listed_digest
        return (listed.count, listed.digest) != own_listing or listed.changes < self._registry.changes

    async def _reconcile(self) -> None:
        """Drop chunks that were evicted in this node's absence, withdraw missing ones, register lost ones."""
        residency = self._tiers.residency
        dropped = await self._carry_out_drops()
        withdrawn, unlisted_keys, ages = 0, bytearray(), array("Q")  # packed: nothing for the garbage collector
        with residency.arriving() as arriving:
            local = await LocalFingerprints.look(residency.scan(), arriving, self._threads)
            async for page in self._registry.holdings(local.unknown):
                for first in range(0, len(page), _BATCH):
                    batch = page[first : first + _BATCH]
                    keys = local.keys(batch)
                    withdrawn += keys.count(None)
                    pairs = zip(batch, keys, strict=True)
                    local.mark(
                        [key for holding, key in pairs if key and residency.generation(key) == holding.generation]
                    )
                    await asyncio.sleep(0)
            for unlisted in local.unmarked():  # chunks that arrive meanwhile are registered by their stores
                aged = [(key, age) for key in unlisted if (age := residency.age(key)) is not None]
                unlisted_keys += b"".join(key for key, _ in aged)
                ages.extend(age for _, age in aged)
                await asyncio.sleep(0)
        logger().info("compared with the index", dropped=dropped, withdrawn=withdrawn, unlisted=len(ages))
        if await self._was_lost(_keys(unlisted_keys, range(len(ages)))):
            await self._registry.damaged()
        self._offered = False
        await self._queue(unlisted_keys, await self._parents_first(ages))
        self._more.set()
        if not self._registering:
            self._registering = True
            self._spawn(self._register())

    async def _carry_out_drops(self) -> int:
        """Drop chunks that were evicted while this node was unreachable; return how many.

        Chunks that the index lists for this node now stay: they were stored again since, or a backup of Redis has
        brought an old order back. Orders for copies on retired drives are kept for the node's next start.
        """
        dropped, residency = 0, self._tiers.residency
        async for orders_of_page in self._registry.drops():
            page = [drop for drop in orders_of_page if not residency.may_return(drop.key, drop.generation)]
            concerned = [drop for drop in page if residency.recorded(drop.key) in (0, drop.generation)]
            listed = await self._tiers.ask_index([drop.key for drop in concerned])
            orders = {drop.key: drop.generation for drop in concerned if drop.key not in listed}
            dropped += await self._tiers.drop(orders)
            await self._registry.settle_drops(page)
        return dropped

    async def _queue(self, unlisted: bytearray, parts: list[npt.NDArray[np.intp]]) -> None:
        """Queue each with the generation of the listing that the index lost.

        Chunks that an earlier comparison queued are among these.
        """
        self._unlisted.clear()
        for part in parts:
            generations = [(key, self._generation(key)) for key in _keys(unlisted, part.tolist())]
            chunks = [(key, generation) for key, generation in generations if generation is not None]
            self._unlisted.add([key for key, _ in chunks], [generation for _, generation in chunks])
            await asyncio.sleep(0)

    async def _parents_first(self, ages: array[int]) -> list[npt.NDArray[np.intp]]:
        """Indices into `ages` in the order of storing, in parts."""
        numbers = np.frombuffer(ages, dtype=np.uint64) if ages else np.empty(0, np.uint64)
        sort = partial(np.argsort, numbers, kind="stable")
        order = await asyncio.get_running_loop().run_in_executor(self._threads, sort)
        return [order[first : first + _PART] for first in range(0, len(order), _PART)]

    async def _was_lost(self, keys: Iterable[bytes]) -> bool:
        """Return whether the index has lost any of these, which it had acknowledged.

        An evicted chunk is unlisted a moment before it leaves this node: a lost one still is a while later.
        """
        for attempt in range(2):
            if attempt:
                await self._clock.sleep(_AGAIN_S)
            suspects = await self._believed(keys)
            if not suspects:
                return False
            keys = await self._registry.unlisted(suspects)
        return bool(keys)

    async def _believed(self, keys: Iterable[bytes]) -> list[ChunkRecord]:
        """Some of these chunks that this node believes to be listed."""
        believed = []
        for at, key in enumerate(keys):
            listing = self._tiers.residency.look(key) if self._tiers.residency.generation(key) else None
            if listing is not None:
                believed.append(listing[0].chunk.record)
            if len(believed) == _BATCH:
                break
            if at % _BATCH == 0:
                await asyncio.sleep(0)
        return believed

    async def _register(self) -> None:
        """Parents may be on nodes that are still coming up: try again, ever less often.

        Comparisons continue concurrently.
        """
        pause_s = _PAUSE_S
        try:
            while self._unlisted:
                self._more.clear()
                remaining, settled = len(self._unlisted), 0
                while remaining > 0 and self._unlisted:
                    batch = self._unlisted.take(min(remaining, _BATCH))
                    remaining -= len(batch)
                    states = [(key, self._generation(key), generation) for key, generation in batch]
                    await self._register_some(
                        [key for key, has, generation in states if has is not None and has in (0, generation)]
                    )
                    failed = [key for key, _ in batch if self._generation(key) == 0]
                    settled += len(batch) - len(failed)
                    self._unlisted.add(failed, [0] * len(failed))
                self._offered = True
                pause_s = _PAUSE_S if settled else min(2 * pause_s, _PAUSE_S_MAX)
                if self._unlisted and not self._more.is_set():
                    await self._clock.sleep(pause_s)
        finally:
            self._registering, self._offered = False, True

    async def _register_some(self, keys: list[bytes]) -> None:
        try:
            await self._tiers.reregister(keys, patient=False)  # the next round tries the rest again
        except QuireError as error:
            logger().warning("the index does not take this node's chunks yet", error=str(error))

    def _generation(self, key: bytes) -> int | None:
        return self._tiers.residency.generation(key)

    async def _rebuild(self, token: str) -> None:
        """Report the contents of the object tier to the index; this node was chosen."""
        assert self._tiers.objects is not None, "on_news() looked"
        try:
            records = [record async for record in self._tiers.objects.records()]
            registered = await self._registry.register_objects(parents_first(records))
            await self._registry.rebuilt(token)
            logger().info(
                "the contents of the object tier were reported to the index", objects=len(records), listed=registered
            )
        except QuireError as error:
            logger().warning("the index could not be rebuilt from the object tier", error=str(error))
        finally:
            self._rebuilding = ""


def _keys(packed: bytearray, places: Iterable[int]) -> Iterator[bytes]:
    return (bytes(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in places)


def parents_first(records: list[ChunkRecord]) -> list[ChunkRecord]:
    """The records so ordered that none comes before its parent."""
    by_key = {record.key: record for record in records}
    ordered: dict[bytes, ChunkRecord] = {}
    for record in records:
        chain: list[ChunkRecord] = []
        at: ChunkRecord | None = record
        while at is not None and at.key not in ordered and at not in chain[-1:]:
            chain.append(at)
            at = by_key.get(at.parent)
            if len(chain) > len(by_key):
                break  # a cycle: no such chain was ever stored
        for ancestor in reversed(chain):
            ordered.setdefault(ancestor.key, ancestor)
    return list(ordered.values())
