"""The deliveries of this node: which chunks, pinned for how long, and the end of those whose client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import groupby, islice

from quire.model.errors import (
    ChunkMissing,
    DescriptorInvalid,
    PeerLost,
    QuireError,
    TooManyRequests,
)
from quire.model.index import OBJECT_TIER
from quire.model.keys import ChunkKeys
from quire.model.nodes import RunningDelivery
from quire.model.outcome import NodeOutcome
from quire.model.ranges import ChunkRange, ranges_of
from quire.model.records import ChunkRecord, records
from quire.model.transfers import DeliverOrder
from quire.telemetry import meter, names, tracer
from quire.transport import Stalled
from quire_server.core.shares import SharedBound
from quire_storage.cluster.registry import Registry
from quire_storage.config import StorageConfig
from quire_storage.core.pool.slots import Shape
from quire_storage.delivery.delivery import DeliveryParts, NodeDelivery, delivery_name
from quire_storage.delivery.object_loads import ObjectChunk
from quire_storage.delivery.reading import Source
from quire_storage.delivery.transfers import RETRY_S, Transfers
from quire_storage.ingest.arrivals import Arrivals, ArrivingChunk, never
from quire_storage.ports import Spawn
from quire_storage.tiers.object_tier import ChunkObjects
from quire_storage.tiers.tiers import PinnedCopies, Tiers

_SHOWN_MAX, _SHOWN_FROM_MS = 8, 100


class Deliveries:
    """`running`: those under way, by name.

    `on_read` is called with the delivered ranges of a request's keys, and the size of their chunks.
    """

    def __init__(
        self,
        *,
        config: StorageConfig,
        parts: DeliveryParts,
        tiers: Tiers,
        arrivals: Arrivals,
        registry: Registry,
        spawn: Spawn,
        on_read: Callable[[ChunkKeys, Sequence[ChunkRange], int], None],
        transfers: Transfers,
    ) -> None:
        self._transfers = transfers
        self._config = config
        self._parts = parts
        self._tiers = tiers
        self._arrivals = arrivals
        self._registry = registry
        self._spawn = spawn
        self._on_read = on_read
        self._room = SharedBound(config.deliveries_max)
        self.running: dict[str, NodeDelivery] = {}
        self.delivered_bytes = 0
        self._delivered = meter().create_counter(names.DELIVERED_BYTES, "By", "written into clients' memory")
        self._stalls = meter().create_histogram(
            names.STALL_SECONDS,
            "s",
            "for how long a client waited for layers",
            explicit_bucket_boundaries_advisory=names.SECONDS,
        )

    async def deliver(self, call: DeliverOrder) -> AsyncIterator[int | NodeOutcome]:
        """Layers as they arrive, if asked for, then the outcome. Closing the iterator early stops the delivery.

        Raises `ChunkMissing`, `DescriptorInvalid`, `TargetInvalid`: nothing was written.
        """
        keys = self._keys_of(call)
        if not self._room.take(call.tenant.tenant):
            raise TooManyRequests(f"{self._room.taken} deliveries are running; retry later", retry_after_s=RETRY_S)
        try:
            self._transfers.begin((call.delivery_id, call.node_index), "delivery")
        except QuireError:
            self._room.give_back(call.tenant.tenant)
            raise
        async for event in self._deliver(call, keys):
            yield event

    def longest_running(self) -> tuple[RunningDelivery, ...]:
        """Return the longest-running ones, for people, without those that end at once."""
        first = (delivery.progress for delivery in islice(self.running.values(), _SHOWN_MAX))
        return tuple(progress for progress in first if progress.running_ms >= _SHOWN_FROM_MS)

    def stalled(self, message: Stalled) -> None:
        """A client says for how long it waited for this node's layers."""
        name = delivery_name(self._config.node_id, message.transfer_id, message.node_index)
        self._stalls.record(message.stall_us / 1e6)
        self._spawn(self._parts.rates.stalled(name, message.stall_us / 1e6))

    def _keys_of(self, call: DeliverOrder) -> ChunkKeys:
        """Return the keys that this node is to deliver.

        Raises `DescriptorInvalid` if they are not its own, or not of the request.
        """
        descriptor = call.descriptor
        for run in call.ranges:
            inside = descriptor.first_chunk <= run.first < run.stop <= descriptor.stop_chunk
            if run.node_id != self._config.node_id or not inside:
                raise DescriptorInvalid(f"{run} is not this node's to deliver", field="ranges")
        if not set(call.arriving) <= set(call.ranges):
            raise DescriptorInvalid("a range is not among the ranges to deliver", field="arriving")
        if not call.ranges:
            raise DescriptorInvalid("names no chunk", field="ranges")
        return ChunkKeys(b"".join(descriptor.keys.run(run.first, run.count).packed for run in call.ranges))

    async def _deliver(self, call: DeliverOrder, keys: ChunkKeys) -> AsyncIterator[int | NodeOutcome]:
        """Deliver. The transfer's name stays reserved until none of its bytes are in flight."""
        task, delivery, pinned = None, None, None
        try:
            if call.arriving:
                await self._until_they_arrive(call)
            pinned, elsewhere = await self._pin(call, keys)
            if lacking := [key for key in pinned.missing if key not in elsewhere]:
                call = replace(call, ranges=_without(call, frozenset(lacking)))
            copies = {copy.chunk.key: copy for copy in pinned.copies}
            chunks = [copies.get(key) or elsewhere[key] for key in keys if key in copies or key in elsewhere]
            delivery = NodeDelivery(self._parts, call, chunks)
            task = self._spawn(self._run(delivery, call, pinned), traced=True)
            self._transfers.stop_by((call.delivery_id, call.node_index), delivery.cancel)
        finally:
            if task is None:
                self._ended(call)
                if pinned is not None:
                    self._tiers.unpin(pinned)
        try:
            async for layer in delivery.layers():
                yield layer
            yield await asyncio.shield(task)
        finally:
            if not task.done():
                delivery.cancel()

    async def _until_they_arrive(self, call: DeliverOrder) -> None:
        """Wait until the chunks whose store was running can be read or arrive, for as long as the order says.

        Not for chunks whose store has just failed. Raises `PeerLost` if the delivery is stopped.
        """
        clock, keys, shape = self._parts.clock, _arriving_keys(call), _shape_of(call)
        end_s = min(clock.monotonic_s() + call.follow_s, call.until_s)
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def stop() -> None:
            stopped.cancel()

        self._transfers.stop_by((call.delivery_id, call.node_index), stop)
        while not stopped.done() and (left_s := end_s - clock.monotonic_s()) > 0:
            absent = [key for key in keys if self._tiers.find(key) is None]
            arriving = {chunk.key for chunk in self._arrivals.find(absent, shape)}
            awaited = [key for key in absent if key not in arriving]
            if not awaited or any(map(self._arrivals.has_failed, awaited)):
                return
            await asyncio.wait([self._arrivals.change(), stopped], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            raise PeerLost("the delivery was stopped before it began")

    async def _pin(self, call: DeliverOrder, keys: ChunkKeys) -> tuple[PinnedCopies, dict[bytes, Source]]:
        """Pin all chunks of a prefix, or none; of unchained chunks those that are here, one at least.

        Returns by key the chunks, too, that the object tier has, and those that arrive or, of an order that follows
        stores, are nowhere.
        """
        with tracer().start_as_current_span(names.STORAGE_HOLD, attributes={"quire.chunks": len(keys)}):
            pinned = self._tiers.pin(list(keys))
            try:
                elsewhere: dict[bytes, Source] = dict(self._arriving(call, pinned))
                absent = [key for key in pinned.missing if key not in elsewhere]
                elsewhere |= await self._in_object_tier(call, absent)
                elsewhere |= _over(call, [key for key in absent if key not in elsewhere])
            except BaseException:
                self._tiers.unpin(pinned)
                raise
        lacking = [key for key in pinned.missing if key not in elsewhere]
        if not lacking:
            return pinned, elsewhere
        self._deny(call)
        if call.unchained and (pinned.copies or elsewhere):
            return pinned, elsewhere
        self._tiers.unpin(pinned)
        index = list(keys).index(lacking[0])
        raise ChunkMissing(f"chunk {index} of those asked for, key {lacking[0].hex()}", field="chunk_keys")

    def _arriving(self, call: DeliverOrder, pinned: PinnedCopies) -> dict[bytes, ArrivingChunk]:
        """Follow the stores of chunks that cannot be read yet."""
        arriving_keys, shape = frozenset(_arriving_keys(call)), _shape_of(call)
        absent_keys = [key for key in pinned.missing if key in arriving_keys]
        following: dict[bytes, ArrivingChunk] = {}
        for arrival, group in groupby(self._arrivals.find(absent_keys, shape), key=lambda chunk: chunk.arrival):
            chunks = list(group)
            keys, positions = [chunk.key for chunk in chunks], [chunk.at for chunk in chunks]
            places = self._tiers.follow(pinned, arrival.slots, keys, positions)
            following |= {keys[at]: chunks[at] for at in places}
        return following

    async def _in_object_tier(self, call: DeliverOrder, keys: Sequence[bytes]) -> dict[bytes, ObjectChunk]:
        """Return the chunks that the object tier has, as far as is known."""
        loads, absent = self._parts.reading.loads, frozenset(keys)
        if loads is None or not absent:
            return {}
        return await loads.find([record for record in _records_of(call) if record.key in absent], _shape_of(call))

    def _deny(self, call: DeliverOrder) -> None:
        """Tell the index which chunks of a delivery are not here."""
        unreadable = [record for record in _records_of(call) if record.key not in self._tiers.residency]
        if self._tiers.objects is not None:  # without an answer of the object tier nothing is known of them
            absent = self._tiers.objects.found_absent([record.key for record in unreadable])
            unreadable = [record for record in unreadable if record.key in absent]
            self._spawn(self._withdraw_objects(self._tiers.objects, unreadable))
        self._tiers.deny(unreadable)

    async def _withdraw_objects(self, objects: ChunkObjects, records: Sequence[ChunkRecord]) -> None:
        """Withdraw the objects that a fetch has found missing.

        They are checked once more: a store may have put them since.
        """
        with contextlib.suppress(QuireError):
            absent = await objects.still_absent(record.key for record in records)
            await self._registry.withdraw([record for record in records if record.key in absent], OBJECT_TIER)

    def _ended(self, call: DeliverOrder) -> None:
        self._room.give_back(call.tenant.tenant)
        self._transfers.end((call.delivery_id, call.node_index))

    async def _run(self, delivery: NodeDelivery, call: DeliverOrder, pinned: PinnedCopies) -> NodeOutcome:
        name = delivery_name(self._config.node_id, call.delivery_id, call.node_index)
        self.running[name] = delivery
        try:
            outcome = await delivery.run()
        finally:
            del self.running[name]
            if delivery.settled:
                self._ended(call)
                self._tiers.unpin(pinned)
            else:
                self._spawn(self._linger(delivery, call, pinned))
        if outcome.error_code and self._tiers.objects is not None:
            self._deny(call)
        if outcome.bytes_moved:
            self._on_read(call.descriptor.keys, call.ranges, call.descriptor.num_layers * call.descriptor.slice_bytes)
        self.delivered_bytes += outcome.bytes_moved
        self._delivered.add(outcome.bytes_moved, {"order": outcome.order.name.lower(), "scheduled": outcome.scheduled})
        return outcome

    async def _linger(self, delivery: NodeDelivery, call: DeliverOrder, pinned: PinnedCopies) -> None:
        await delivery.linger()
        self._ended(call)
        self._tiers.unpin(pinned)


def _shape_of(call: DeliverOrder) -> Shape:
    return Shape(call.descriptor.num_layers, call.descriptor.slice_bytes)


def _arriving_keys(call: DeliverOrder) -> list[bytes]:
    """Return the keys whose store was running when the gateway looked."""
    return [key for run in call.arriving for key in call.descriptor.keys.run(run.first, run.count)]


def _over(call: DeliverOrder, keys: Sequence[bytes]) -> dict[bytes, ArrivingChunk]:
    """Return the keys whose store was running and is over, as chunks of a failed store: each fails alone."""
    arriving_keys = frozenset(_arriving_keys(call))
    error = ChunkMissing("its store has failed, or has not begun in time", field="chunk_keys")
    return {chunk.key: chunk for chunk in never([key for key in keys if key in arriving_keys], _shape_of(call), error)}


def _records_of(call: DeliverOrder) -> list[ChunkRecord]:
    """Index records of the chunks that a delivery is to deliver."""
    return [
        record
        for run in call.ranges
        for record in records(
            call.descriptor.keys, run.first, run.count, unchained=call.unchained, namespace=call.namespace
        )
    ]


def _without(call: DeliverOrder, absent: frozenset[bytes]) -> tuple[ChunkRange, ...]:
    """Return the remaining ranges of a call."""
    node, keys = call.ranges[0].node_id, call.descriptor.keys
    remaining = [at for run in call.ranges for at in range(run.first, run.stop) if keys.at(at) not in absent]
    return tuple(ranges_of(node, remaining))
