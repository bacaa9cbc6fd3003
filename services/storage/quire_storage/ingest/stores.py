"""Stores of this node: bytes in, then as durable as was asked, then acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Final

from quire.model.durability import Durability, OnExisting
from quire.model.errors import DeadlineExceeded, NotImplementedHere, PeerLost, QuireError
from quire.model.outcome import NodeOutcome
from quire.model.transfers import IngestOrder
from quire.telemetry import binary_context, counter, logger, names, tracer
from quire.transport import Quiesced, Region, Transport
from quire.transport.fair_threads import FairThreads
from quire.transport.messages import encode_message
from quire_storage.cluster.replication import Replicator
from quire_storage.config import StorageConfig
from quire_storage.core.chunks import Chunk
from quire_storage.core.pool.slots import Shape
from quire_storage.errors import NotReplicated, SlotsUnsettled
from quire_storage.ingest.announced_layers import AnnouncedLayers
from quire_storage.ingest.arrivals import Arrival, Arrivals
from quire_storage.ingest.ingest import pull
from quire_storage.ports import Clock
from quire_storage.tiers.tiers import Slots, Tiers

_GROUPS_AT_ONCE: Final = 3


class Stores:
    """`region`: the arena as the data plane knows it. `is_quarantined`: whether a copy that is here cannot be read."""

    def __init__(
        self,
        *,
        config: StorageConfig,
        tiers: Tiers,
        transport: Transport,
        region: Region,
        replicator: Replicator,
        produced: AnnouncedLayers,
        arrivals: Arrivals,
        threads: FairThreads,
        clock: Clock,
        is_quarantined: Callable[[bytes], bool] = lambda key: False,
    ) -> None:
        self._is_quarantined = is_quarantined
        self._config = config
        self._tiers = tiers
        self._transport = transport
        self._region = region
        self._replicator = replicator
        self._produced = produced
        self._arrivals = arrivals
        self._threads = threads
        self._clock = clock
        self._abandoned: set[bytes] = set()
        self._counter = counter(names.INGESTED_BYTES, "By", "read from clients' memory")
        self.ingested_bytes = 0

    def check_level(self, level: Durability) -> None:
        """Check a level. Raises `NotImplementedHere` for one that this node cannot give."""
        if level in (Durability.LOCAL, Durability.REPLICATED) and self._tiers.pool is None:
            raise NotImplementedHere("this node has no drive (QUIRE_STORAGE_DRIVES)", field="durability")
        if level is Durability.OBJECT and self._tiers.objects is None:
            raise NotImplementedHere("this node has no object tier (QUIRE_STORAGE_OBJECT_URL)", field="durability")

    def abandon(self, store_id: bytes) -> None:
        """End the store of a client that disconnected: its buffer may hold something else by now."""
        error = PeerLost("the store was abandoned")
        self._abandoned.add(store_id)
        self._arrivals.fail(store_id, error)
        self._produced.fail(store_id, error)

    async def ingest(self, call: IngestOrder) -> NodeOutcome:
        """Read chunks out of the client's memory and keep them; however it ends, the client receives `Quiesced`."""
        chunks = 0
        try:
            with tracer().start_as_current_span(names.STORAGE_INGEST, attributes={"quire.chunks": len(call.records)}):
                outcome = await self._pull_and_keep(call)
            chunks = sum(outcome.delivered)
            return outcome
        finally:
            self._abandoned.discard(call.store_id)
            self._produced.forget(call.store_id)
            message = Quiesced(call.store_id, call.node_index, chunks, binary_context())
            with contextlib.suppress(QuireError):
                self._transport.connect(call.source.worker_address).send(encode_message(message))

    async def raise_level(self, keys: Sequence[bytes], level: Durability) -> set[bytes]:
        """Make chunks that are here durable at a level; the keys that are."""
        on_drive = await self._tiers.raise_level(keys, level)
        return await self._secure(set(on_drive), level)

    async def _pull_and_keep(self, call: IngestOrder) -> NodeOutcome:
        if self._tiers.write_behind is not None and self._tiers.pool is not None:
            await self._tiers.write_behind.wait_for_room()
        acknowledged = await self._keep_all(call, await self._elsewhere(call))
        moved_bytes = call.layout.payload_bytes(len(call.records))
        self.ingested_bytes += moved_bytes
        self._counter.add(moved_bytes)
        present = bytes(key in acknowledged for key in call.records.key_list())
        return NodeOutcome(self._config.node_id, call.source_ranges, present, moved_bytes, quiesced=True)

    async def _elsewhere(self, call: IngestOrder) -> list[Chunk]:
        """Return chunks of the object tier with which a store with VERIFY is to be compared."""
        if call.on_existing is not OnExisting.VERIFY or self._tiers.objects is None:
            return []
        absent = [record for record in call.records if self._tiers.find(record.key) is None]
        present = self._tiers.find_all(call.records.key_list())  # they may be evicted before the store
        return present + await self._tiers.objects.headers(await self._tiers.object_generations(absent))

    async def _keep_all(self, call: IngestOrder, elsewhere: Sequence[Chunk]) -> set[bytes]:
        """Write chunks to drives while the ones behind them are read, if all of the buffer can be read by now.

        A failure ends the rest; acknowledged chunks stay.
        """
        reading = asyncio.Lock()
        if not call.source_complete or call.durability is Durability.MEMORY:
            return await self._keep(call, reading, elsewhere)
        room = asyncio.Semaphore(_GROUPS_AT_ONCE)

        async def keep(group: IngestOrder) -> set[bytes]:
            async with room:
                return await self._keep(group, reading, elsewhere)

        groups = call.groups(max(1, self._config.group_bytes // call.layout.chunk_bytes))
        tasks = [asyncio.create_task(keep(group)) for group in groups]
        try:
            return set[bytes]().union(*await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, call: IngestOrder, reading: asyncio.Lock, elsewhere: Sequence[Chunk]) -> set[bytes]:
        """The keys that are stored as was asked. `reading` is held while the client's memory is read."""
        shape = Shape(call.layout.num_layers, call.layout.slice_bytes)
        async with self._tiers.reserved(shape, len(call.records)) as slots:
            if call.store_id in self._abandoned:
                raise PeerLost("the store was abandoned before it began")
            with self._arrivals.arriving(call, slots) as arrival:
                try:
                    async with reading:
                        chunks = await self._pull(call, slots, arrival)
                except SlotsUnsettled as error:
                    slots.unsettled = True
                    logger().error("slots are lost until the next start", slots=len(slots.offsets), error=str(error))
                    raise
                if call.store_id in self._abandoned:
                    raise PeerLost("the store was abandoned: its buffer may hold something else by now")
                with tracer().start_as_current_span(names.STORAGE_COMMIT):
                    storing = self._tiers.storing(slots, chunks, call.durability, call.on_existing, elsewhere)
                    async with storing as stored:
                        safe = await self._secure(stored.indexed, call.durability)
                        return {key for key in stored.now() & safe if not self._is_quarantined(key)}

    async def _pull(self, call: IngestOrder, slots: Slots, arrival: Arrival) -> list[Chunk]:
        """Read the client's memory, until the permit's end. Space may have been waited for since it was permitted."""
        left_s = call.until_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise DeadlineExceeded("its permit ended before the first byte")
        timeout_s = min(self._config.transfer_timeout_s, left_s)
        try:
            async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                return await pull(
                    call,
                    slots,
                    arena=self._tiers.arena.view,
                    region=self._region,
                    transport=self._transport,
                    produced=self._produced,
                    threads=self._threads,
                    arrival=arrival,
                    timeout_s=timeout_s,
                    now_ms=self._clock.now_ms(),
                )
        except TimeoutError:
            raise DeadlineExceeded("not read within the time of its permit") from None

    async def _secure(self, keys: set[bytes], level: Durability) -> set[bytes]:
        """Secure the part of the level beyond this node's drives; returns the keys that have it."""
        if level is Durability.REPLICATED and keys:
            safe = await self._replicator.spread(list(keys))
            if not safe:
                raise NotReplicated("no second node took the chunks; they are kept on one")
            return safe
        if level is Durability.OBJECT and keys:
            assert self._tiers.write_behind is not None, "check_level() looked"
            await self._tiers.write_behind.settle(list(keys))
            return {key for key in keys if self._tiers.residency.in_object(key)}
        return keys
