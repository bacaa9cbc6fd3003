"""The storage node: what it holds, the transfers that run, and its place in the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from quire.durability import Durability
from quire.errors import (
    ChunkMissing,
    InvalidRequest,
    LeaseForged,
    NotImplementedHere,
    PeerLost,
    QuireError,
    TooManyRequests,
)
from quire.keys import ChunkKeys
from quire.lease import Lease, LeaseSigner
from quire.metadata.index import OBJECT_TIER, ChunkRecord, records
from quire.nodes import Node
from quire.outcome import NodeOutcome
from quire.rpc.heartbeat import ClusterNews
from quire.telemetry import background, binary_context, counter, logger, meter, names, tracer
from quire.transport import LayerProduced, Quiesced, Stalled, Transport, decode_message
from quire.transport.messages import encode_message
from quire_storage.arena import Arena
from quire_storage.config import StorageConfig
from quire_storage.core.chunks import Chunk
from quire_storage.core.pool_format import pack_header
from quire_storage.core.slack import SlackLimits
from quire_storage.core.slots import Shape
from quire_storage.delivery import DeliverCall, Delivery, Workshop, delivery_name
from quire_storage.errors import DriveFailed, NotReplicated, SlotsUnsettled
from quire_storage.fair import FairGate, Wire
from quire_storage.holdings import Holdings
from quire_storage.housekeeping import Housekeeping
from quire_storage.ingest import IngestCall, Slots, pull
from quire_storage.integrity import Integrity
from quire_storage.object_store import ObjectStore
from quire_storage.pool import Pool, PoolSettings
from quire_storage.ports import Outer
from quire_storage.produced import ProducedLayers
from quire_storage.rates import Rates
from quire_storage.registry import Registry
from quire_storage.replication import Replicator
from quire_storage.ring import Ring
from quire_storage.room import Outside
from quire_storage.store import ChunkStore

_SAY_PAUSE_S, _SAY_PAUSE_S_MAX = 0.2, 10.0


class StorageNode:
    """`me` describes this node to others; called only after `start`."""

    def __init__(self, config: StorageConfig, transport: Transport, outer: Outer, me: Callable[[], Node]) -> None:
        self._config = config
        self._transport = transport
        self._outer = outer
        self._clock = outer.clock
        self._me = me
        self._signer = LeaseSigner(config.cluster_secret.encode())
        self._registry = Registry(config.node_id, outer.index, outer.clock, config.index_timeout_s)
        self._produced = ProducedLayers()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._abandoned: set[bytes] = set()
        self._epoch = ""
        self._theta_bytes = config.theta_bytes
        self._delivering: set[str] = set()
        self._ring: Ring | None = None
        self._pool: Pool | None = None
        self._objects: ObjectStore | None = None
        self._deliveries = 0
        self._ingests = 0
        self._delivered = meter().create_counter(names.DELIVERED_BYTES, "By", "written into clients' memory")
        self._delivered_bytes = self._ingested_bytes = 0
        self._ingested = counter(names.INGESTED_BYTES, "By", "read from clients' memory")
        self._stalls = meter().create_histogram(
            names.STALL_SECONDS,
            "s",
            "for how long a client waited for layers",
            explicit_bucket_boundaries_advisory=names.SECONDS,
        )

    async def start(self) -> None:
        """Recover what the drives hold, open the data plane; the index hears of it with the first heartbeat.

        Raises `ForeignPool`, `DriveUnusable`, `ConfigInvalid`.
        """
        config = self._config
        self._arena = Arena(config.arena_bytes, config.slab_bytes, config.staging_bytes, config.block_bytes)
        self._arena.map(reserved=config.huge_pages)
        self._threads = ThreadPoolExecutor(2, "storage")
        if config.drive_folders:
            await self._open_pool()
        if self._outer.objects is not None:
            self._objects = ObjectStore(
                self._outer.objects, self._clock, config.object_lag_bytes, config.object_timeout_s
            )
        held = Holdings(self._arena, self._pool, self._objects)
        held.on_lost = self._withdraw_soon
        outside = Outside(self._registry.may_go, self._registry.withdraw)
        self._store = ChunkStore(config, held, self._clock, outside)
        self._replicator = Replicator(
            config,
            self._store,
            self._transport,
            self._outer.index,
            self._registry,
            self._outer.peers,
            self._clock,
            self._me,
        )
        self._integrity = Integrity(self._store, self._ring, self._threads, self._clock, self._replicator.copies)
        logger().info("pool recovered", chunks=held.adopt())
        await self._transport.start()
        self._transport.on_message(self._on_message)
        self._region = self._transport.register(self._arena.view)
        self._shop = Workshop(
            config,
            self._transport,
            self._store,
            self._ring,
            self._region,
            Rates(self._outer.rates, self._clock, config.link_bytes_per_s),
            self._threads,
            self._clock,
            self._integrity.heal,
            Wire(config.wire_bytes),
            FairGate(config.chunkwise_max),
            lambda: self._theta_bytes,
        )
        if self._objects is not None:
            self._objects.start(self._integrity.sound, self._in_object)
        self._spawn(Housekeeping(self._store, self._outer.index, self._clock, config.policy_check_s).run())
        if self._pool is not None:
            self._spawn(self._integrity.scrub(config.scrub_bytes_per_s))
            self._spawn(self._replicator.keep_replicated())

    async def close(self) -> None:
        """Let transfers finish for the configured time, then cut them; write what is in memory only."""
        deadline_s = self._clock.monotonic_s() + self._config.stop_grace_s
        while self._deliveries + self._ingests and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._objects is not None:
            await self._objects.close()
        await self._shop.rates.close()
        await self._store.close()
        await self._transport.close()
        if self._pool is not None:
            await self._pool.close()
        self._threads.shutdown()

    # ---- for `quire status`

    @property
    def capacity_bytes(self) -> int:
        return self._pool.map.capacity_bytes if self._pool is not None else self._config.arena_bytes

    @property
    def used_bytes(self) -> int:
        return self._store.used_bytes

    @property
    def figures(self) -> dict[str, float]:
        return {
            **self._store.figures,
            "deliveries": self._deliveries,
            "ingests": self._ingests,
            "delivered bytes": self._delivered_bytes,
            "ingested bytes": self._ingested_bytes,
            **self._shop.rates.figures,
            "corrupt": self._integrity.corrupt,
            "healed": self._integrity.healed,
            "scrubbed": self._integrity.scrubbed,
        }

    @property
    def details(self) -> dict[str, str]:
        return {
            "io": self._ring.description if self._ring is not None else "none, memory only",
            "link": self._config.link,
            "objects": self._objects.description if self._objects is not None else "none",
        }

    def on_news(self, news: ClusterNews) -> None:
        """A new name of the index means that it knows nothing of what is here."""
        self._theta_bytes = news.theta_bytes or self._config.theta_bytes
        if news.index_epoch != self._epoch:
            self._epoch = news.index_epoch
            self._spawn(self._reconcile())

    # ---- requests

    async def deliver(self, call: DeliverCall) -> AsyncIterator[int | NodeOutcome]:
        """Layers as they arrive, if asked for, then the outcome. Closing the iterator early stops the delivery.

        Raises `LeaseForged`, `LeaseExpired`, `ChunkMissing`, `DescriptorInvalid`, `TargetInvalid`: nothing was written.
        """
        lease = self._signer.verify(call.lease, self._clock.now_ms())
        if call.tenant != lease.tenant.tenant:
            raise LeaseForged("it is another tenant's than the transfer", field="lease")
        keys = [call.descriptor.keys.run(run.first, run.count) for run in call.runs]
        if not call.runs or not all(
            lease.covers(self._config.node_id, run.first, part) for run, part in zip(call.runs, keys, strict=True)
        ):
            raise LeaseForged("it does not cover these chunks at this node", field="lease")
        if self._deliveries >= self._config.deliveries_max:
            raise TooManyRequests(f"{self._deliveries} deliveries are running; retry later")
        name = delivery_name(self._config.node_id, call.delivery_id, call.node_index)
        if name in self._delivering:
            raise InvalidRequest("a delivery of this id is running", field="delivery_id")
        self._delivering.add(name)
        try:
            async for event in self._deliver(call, lease, keys):
                yield event
        finally:
            self._delivering.discard(name)

    async def _deliver(
        self, call: DeliverCall, lease: Lease, keys: list[ChunkKeys]
    ) -> AsyncIterator[int | NodeOutcome]:
        chunks = await self._hold(call, ChunkKeys(b"".join(part.packed for part in keys)))
        task, delivery = None, None
        try:
            delivery = Delivery(self._shop, call, lease.tenant, chunks, self._lose)
            task = self._spawn(self._run(delivery, call, chunks), traced=True)
        finally:
            if task is None:
                self._store.let_go(chunks)
        try:
            async for layer in delivery.layers():
                yield layer
            yield await asyncio.shield(task)
        finally:
            if not task.done():
                delivery.cancel()

    async def ingest(self, call: IngestCall) -> NodeOutcome:
        """Store chunks. Acknowledged means readable, and durable as asked."""
        self._check_level(call.durability)
        if self._ingests >= self._config.ingests_max:
            raise TooManyRequests(f"{self._ingests} stores are running; retry later")
        self._ingests += 1
        task = self._spawn(self._ingest(call), traced=True)
        try:
            # A task of its own: a caller that goes away must not leave slots half-written and half-committed.
            return cast(NodeOutcome, await asyncio.shield(task))
        except asyncio.CancelledError:
            if not task.done():
                self._abandoned.add(call.store_id)
                self._produced.fail(call.store_id, PeerLost("the store was abandoned"))
            raise

    async def drop(self, keys: ChunkKeys, *, objects: bool = False) -> int:
        """Forget chunks, in the object tier too if asked; how many were here."""
        dropped = await self._store.drop(keys)
        if objects and self._objects is not None:
            await self._objects.delete(list(keys))
        return dropped

    async def raise_level(self, keys: ChunkKeys, durability: Durability) -> list[bool]:
        """Make chunks that are here durable at a level; for each whether it is now."""
        self._check_level(durability)
        task = self._spawn(self._raise(list(keys), durability), traced=True)
        safe = await asyncio.shield(task)
        return [key in safe for key in keys]

    async def replicate(self, source: Node, keys: ChunkKeys) -> list[bool]:
        """Pull chunks from another node; for each whether it is here now, on a drive."""
        self._check_level(Durability.LOCAL)
        task = self._spawn(self._replicator.pull(source, list(keys)), traced=True)
        return cast(list[bool], await asyncio.shield(task))

    def describe(self, keys: ChunkKeys) -> list[bytes]:
        """Headers of the chunks that are here."""
        return [pack_header(chunk, 0, 0, 0) for key in keys if (chunk := self._store.find(key)) is not None]

    # ---- deliveries

    async def _hold(self, call: DeliverCall, keys: ChunkKeys) -> list[Chunk]:
        try:
            with tracer().start_as_current_span(names.STORAGE_HOLD, attributes={"quire.chunks": len(keys)}):
                return await self._store.hold(keys)
        except ChunkMissing:
            wanted = [record for run in call.runs for record in records(call.descriptor.keys, run.first, run.count)]
            missing = [record for record in wanted if self._store.find(record.key) is None]
            self._spawn(self._registry.withdraw(missing))
            if self._objects is not None:
                absent = self._objects.found_absent([record.key for record in missing])
                no_objects = [record for record in missing if record.key in absent]
                self._spawn(self._registry.withdraw(no_objects, OBJECT_TIER))
            raise

    async def _run(self, delivery: Delivery, call: DeliverCall, chunks: list[Chunk]) -> NodeOutcome:
        self._deliveries += 1
        try:
            outcome = await delivery.run()
        finally:
            self._deliveries -= 1
            self._store.let_go(chunks)
        self._delivered_bytes += outcome.bytes_moved
        self._delivered.add(outcome.bytes_moved, {"order": outcome.order.name.lower(), "scheduled": outcome.scheduled})
        if outcome.error_code == PeerLost.code():
            self._spawn(self._release(call.lease))
        return outcome

    def _withdraw_soon(self, lost: Sequence[ChunkRecord]) -> None:
        self._spawn(self._registry.withdraw(lost))

    def _lose(self, chunks: list[Chunk]) -> None:
        self._spawn(self._integrity.give_up(chunks))

    async def _release(self, lease: bytes) -> None:
        try:
            await self._outer.index.release(lease)
        except QuireError as error:
            logger().warning("the lease of a lost client could not be released", error=str(error))

    # ---- stores

    def _check_level(self, durability: Durability) -> None:
        if durability in (Durability.LOCAL, Durability.REPLICATED) and self._pool is None:
            raise NotImplementedHere("this node has no drive (QUIRE_STORAGE_DRIVES)", field="durability")
        if durability is Durability.OBJECT and self._objects is None:
            raise NotImplementedHere("this node has no object tier (QUIRE_STORAGE_OBJECT_URL)", field="durability")

    async def _ingest(self, call: IngestCall) -> NodeOutcome:
        complete = False
        try:
            with tracer().start_as_current_span(names.STORAGE_INGEST, attributes={"quire.chunks": len(call.records)}):
                outcome = await self._pull_and_commit(call)
            complete = True
            return outcome
        finally:
            self._ingests -= 1
            self._say_quiesced(call, complete=complete)

    async def _pull_and_commit(self, call: IngestCall) -> NodeOutcome:
        shape = Shape(call.layout.num_layers, call.layout.slice_bytes)
        offsets = await self._store.reserve(shape, len(call.records))
        slots = Slots(self._arena.view, self._region, offsets, self._arena.slots.layer_stride(shape))
        unowned = set(offsets.tolist())  # slots that belong to no chunk of the store (yet)
        try:
            pulled = await pull(
                call,
                slots,
                self._transport,
                self._produced,
                self._threads,
                self._config.transfer_timeout_s,
                self._clock.now_ms(),
            )
            if call.store_id in self._abandoned:
                raise PeerLost("the store was abandoned: its buffer may hold something else by now")
            async with self._store.keeping(pulled, call.durability) as fresh:
                # Even if they were evicted from memory by now: then their slots are somebody else's, not ours to free.
                slot_of = {id(chunk): offset for chunk, offset in zip(pulled, offsets.tolist(), strict=True)}
                unowned -= {slot_of[id(chunk)] for chunk in fresh}
                with tracer().start_as_current_span(names.STORAGE_COMMIT):
                    indexed = await self._secure(await self._index(pulled, fresh), call.durability)
        except SlotsUnsettled as error:
            logger().error("slots are lost until the next start", slots=len(offsets), error=str(error))
            unowned.clear()
            raise
        finally:
            self._store.give_back(unowned)
        moved = call.layout.payload_bytes(len(call.records))
        self._ingested_bytes += moved
        self._ingested.add(moved)
        present = bytes(record.key in indexed for record in call.records)
        return NodeOutcome(self._config.node_id, call.source_runs, present, moved, quiesced=True)

    async def _index(self, pulled: Sequence[Chunk], fresh: Sequence[Chunk]) -> set[bytes]:
        """Register all of them (whoever stored the known ones may not have got that far); the keys that are indexed.

        Chunks of `fresh` that cannot be indexed are dropped again.
        """
        indexed: set[bytes] = set()
        try:
            async for part in self._registry.registering([chunk.record for chunk in pulled]):
                indexed |= part
                for key in part:
                    if (chunk := self._store.find(key)) is not None:
                        chunk.indexed = True
        finally:
            await self._store.drop_these([chunk for chunk in fresh if chunk.record.key not in indexed])
        return indexed

    async def _secure(self, keys: set[bytes], durability: Durability) -> set[bytes]:
        """What beyond this node's drives the level asks for; the keys that have it."""
        if durability is Durability.REPLICATED:
            safe = await self._replicator.spread(list(keys))
            if not safe and keys:
                raise NotReplicated("no second node took the chunks; they are kept on one")
            return safe
        if durability is Durability.OBJECT and keys:
            assert self._objects is not None, "ingest() checked"
            await self._objects.settle(list(keys))
            found = [chunk for key in keys if (chunk := self._store.find(key)) is not None]
            return await self._registry.add_object_tier([chunk.record for chunk in found])
        return keys

    async def _raise(self, keys: Sequence[bytes], durability: Durability) -> set[bytes]:
        on_drive = await self._store.raise_level(keys, durability)
        return await self._secure(set(on_drive if self._pool is not None else keys), durability)

    def _say_quiesced(self, call: IngestCall, *, complete: bool) -> None:
        self._abandoned.discard(call.store_id)
        message = Quiesced(call.store_id, call.node_index, complete, binary_context())
        with contextlib.suppress(QuireError):
            self._transport.connect(call.source.worker_address).send(encode_message(message))

    # ---- the background

    async def _reconcile(self) -> None:
        """Forget what was evicted while this node was away, then tell the index what is here."""
        drops = [chunk for key in await self._registry.drops() if (chunk := self._store.find(key)) is not None]
        if drops:
            # What was stored here again since, the index knows.
            doomed = await self._registry.not_registered([chunk.record for chunk in drops])
            with contextlib.suppress(DriveFailed):
                logger().info("chunks were evicted meanwhile", chunks=await self._store.drop(doomed))
        await self._registry.register_all(self._store.walk())
        async for part in self._store.walk():
            await self._say_in_object([chunk.record for chunk in part if chunk.in_object])

    async def _in_object(self, chunks: Sequence[Chunk]) -> None:
        await self._store.in_object(chunks)
        self._spawn(self._say_in_object([chunk.record for chunk in chunks]))

    async def _say_in_object(self, stored: Sequence[ChunkRecord]) -> None:
        """Until the index knows. An object whose chunk was evicted meanwhile is removed again."""
        pause_s = _SAY_PAUSE_S
        left = list(stored)
        while left:
            try:
                known = await self._registry.add_object_tier(left)
                left = [record for record in left if record.key not in known]
                gone = [record.key for record in left if self._store.find(record.key) is None]
                if gone and self._objects is not None:
                    await self._objects.delete(gone)
                left = [record for record in left if record.key not in gone]
            except QuireError as error:
                logger().warning("the index does not know yet what is in the object tier", error=str(error))
            if left:
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _SAY_PAUSE_S_MAX)

    async def _open_pool(self) -> None:
        config = self._config
        limits = SlackLimits(age_s_max=config.write_age_s_max, backlog_bytes_max=config.write_backlog_bytes)
        settings = PoolSettings(
            config.node_id, config.drive_bytes, config.slab_bytes, config.chunk_bytes_min, config.stripe_bytes
        )
        drives = self._outer.drives()
        self._pool = Pool(settings, config.drive_folders, drives)
        files = self._pool.open()
        self._ring = Ring(self._outer.block_io(config.io, config.io_depth, direct=drives.direct), self._clock, limits)
        await self._ring.start(files, [self._arena.view])
        logger().info("drives", folders=config.drive_folders, io=self._ring.description)
        await self._pool.recover(self._ring)

    # ---- plumbing

    def _on_message(self, raw: bytes) -> None:
        try:
            message = decode_message(raw)
        except InvalidRequest as error:
            logger().warning("a message that nobody understands", error=str(error))
            return
        if isinstance(message, LayerProduced):
            self._produced.announce(message.transfer_id, message.layer)
        elif isinstance(message, Stalled):
            name = delivery_name(self._config.node_id, message.transfer_id, message.node_index)
            self._stalls.record(message.stall_us / 1e6)
            self._spawn(self._shop.rates.stalled(name, message.stall_us / 1e6))

    def _spawn(self, coroutine: Coroutine[Any, Any, Any], *, traced: bool = False) -> asyncio.Task[Any]:
        """`traced`: part of the current request; else it may outlive it."""
        task = asyncio.create_task(coroutine, context=None if traced else background())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
