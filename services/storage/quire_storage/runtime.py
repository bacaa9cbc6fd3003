"""The storage node: its parts, the transfers that run, and its place in the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, cast

from quire.model.durability import Durability
from quire.model.errors import ChunkMissing, DescriptorInvalid, InvalidRequest, PeerLost, QuireError, TooManyRequests
from quire.model.index import OBJECT_TIER, records
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node, StorageInfo
from quire.model.outcome import NodeOutcome
from quire.telemetry import background, logger, meter, names, tracer
from quire.transport import LayerProduced, Peer, Stalled, Transport, decode_message
from quire_server.heartbeat import ClusterNews
from quire_storage.arena import Arena
from quire_storage.batches import Promotions, Reading
from quire_storage.config import StorageConfig
from quire_storage.core.pool_format import pack_header
from quire_storage.core.residency import Residency, ResidencySettings
from quire_storage.core.slack import SlackLimits
from quire_storage.delivery import DeliverCall, Delivery, DeliveryParts, delivery_name
from quire_storage.fair_queue import FairQueue, Wire
from quire_storage.housekeeping import Housekeeping
from quire_storage.ingest import IngestCall
from quire_storage.integrity import Integrity
from quire_storage.object_store import ObjectStore
from quire_storage.pool import Pool, PoolSettings
from quire_storage.ports import Ports
from quire_storage.produced import ProducedLayers
from quire_storage.rates import Rates
from quire_storage.reconciler import Reconciler
from quire_storage.registry import Registry
from quire_storage.replication import Replicator
from quire_storage.ring import Ring
from quire_storage.stores import Stores
from quire_storage.tiers import Held, Tiers
from quire_storage.write_behind import WriteBehind

_DEATH_SEEN_S = 60.0


class StorageNode:
    """`me` describes this node to others; called only after `start`. `checked`: see `Tiers`."""

    def __init__(
        self,
        config: StorageConfig,
        transport: Transport,
        ports: Ports,
        me: Callable[[], Node],
        *,
        checked: int = 0,
    ) -> None:
        self._config = config
        self._transport = transport
        self._ports = ports
        self._clock = ports.clock
        self._me = me
        self._checked = checked
        self._registry = Registry(config.node_id, ports.index, ports.clock, config.index_timeout_s)
        self._produced = ProducedLayers()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._theta_bytes = config.theta_bytes
        self._delivering: set[str] = set()
        self._ring: Ring | None = None
        self._pool: Pool | None = None
        self._objects: ObjectStore | None = None
        self._write_behind: WriteBehind | None = None
        self._deliveries = 0
        self._ingests = 0
        self._delivered = meter().create_counter(names.DELIVERED_BYTES, "By", "written into clients' memory")
        self._delivered_bytes = 0
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
        arena = Arena(config.arena_bytes, config.slab_bytes, config.staging_bytes, config.block_bytes)
        arena.map(reserved=config.huge_pages)
        self._threads = self._ports.threads(2)
        if config.drive_folders:
            await self._open_pool(arena)
        if self._ports.objects is not None:
            self._objects = ObjectStore(self._ports.objects, self._clock, config.object_timeout_s)
            self._write_behind = WriteBehind(
                self._objects, self._registry, self._clock, config.object_lag_bytes, config.object_timeout_s
            )
        pool_map = self._pool.map if self._pool is not None else None
        settings = ResidencySettings(pool_high_share=config.pool_high_share, pool_low_share=config.pool_low_share)
        residency = Residency(settings, arena.slots, pool_map, objects=self._objects is not None)
        self._tiers = Tiers(
            residency=residency,
            arena=arena,
            pool=self._pool,
            objects=self._objects,
            write_behind=self._write_behind,
            registry=self._registry,
            clock=self._clock,
            wait_s=config.room_timeout_s,
            checked=self._checked,
        )
        logger().info("pool recovered", chunks=len(residency))
        await self._transport.start()
        self._transport.on_message(self._on_message)
        self._build(arena)

    def _build(self, arena: Arena) -> None:
        """The parts that stand on the tiers, and what runs in the background."""
        config, tiers = self._config, self._tiers
        region = self._transport.register(arena.view)
        self._replicator = Replicator(
            config,
            tiers,
            self._transport,
            self._ports.index,
            self._registry,
            self._ports.peers,
            self._clock,
            self._me,
        )
        self._integrity = Integrity(tiers, self._ring, self._threads, self._clock, self._replicator.copies)
        self._stores = Stores(
            config=config,
            tiers=tiers,
            transport=self._transport,
            region=region,
            replicator=self._replicator,
            produced=self._produced,
            threads=self._threads,
            clock=self._clock,
        )
        reading = Reading(
            tiers=tiers,
            ring=self._ring,
            threads=self._threads,
            heal=self._integrity.heal,
            on_corrupt=self._integrity.give_up,
        )
        self._parts = DeliveryParts(
            config=config,
            transport=self._transport,
            reading=reading,
            promotions=Promotions(),
            region=region,
            rates=Rates(self._ports.rates, self._clock, config.link_bytes_per_s),
            clock=self._clock,
            wire=Wire(config.wire_bytes),
            chunkwise=FairQueue(config.chunkwise_max),
            theta_bytes=lambda: self._theta_bytes,
        )
        self._reconciler = Reconciler(tiers=tiers, registry=self._registry, clock=self._clock, spawn=self._spawn)
        if self._write_behind is not None:
            self._write_behind.start(tiers, self._integrity.sound)
        self._spawn(Housekeeping(tiers, self._ports.index, self._clock, config.policy_check_s).run())
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
        if self._write_behind is not None:
            await self._write_behind.close()
        await self._parts.rates.close()
        await self._tiers.close()
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
        return self._tiers.used_bytes

    @property
    def listed(self) -> tuple[int, int]:
        """How many chunks this node believes the index lists for it, and the digest of their keys."""
        return self._tiers.residency.listed_count, self._tiers.residency.listed_digest

    @property
    def info(self) -> StorageInfo:
        """What others decide by."""
        return StorageInfo(
            worker_address=self._transport.address,
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            link=self._config.link,
            has_object_tier=self._objects is not None,
        )

    @property
    def stats(self) -> dict[str, float]:
        residency = self._tiers.residency
        lag = {"object lag": self._write_behind.lag_chunks} if self._write_behind is not None else {}
        return {
            "chunks": len(residency),
            "memory MiB": self._tiers.arena.slots.used_bytes // 2**20,
            "disk MiB": self._pool.map.used_bytes // 2**20 if self._pool is not None else 0,
            "dirty": residency.dirty_chunks,
            **{f"hits {tier}": residency.hits[tier] for tier in ("memory", "disk", "object")},
            **lag,
            "deliveries": self._deliveries,
            "ingests": self._ingests,
            "delivered bytes": self._delivered_bytes,
            "ingested bytes": self._stores.ingested_bytes,
            **self._parts.rates.stats,
            "corrupt": self._integrity.corrupt,
            "healed": self._integrity.healed,
            "scrubbed": self._integrity.scrubbed,
        }

    @property
    def notes(self) -> dict[str, str]:
        return {
            "io": self._ring.description if self._ring is not None else "none, memory only",
            "link": self._config.link,
            "objects": self._objects.description if self._objects is not None else "none",
        }

    def on_news(self, news: ClusterNews) -> None:
        """What a heartbeat's answer says of the cluster."""
        self._theta_bytes = news.theta_bytes or self._config.theta_bytes
        self._reconciler.on_news(news)

    # ---- requests

    async def deliver(self, call: DeliverCall) -> AsyncIterator[int | NodeOutcome]:
        """Layers as they arrive, if asked for, then the outcome. Closing the iterator early stops the delivery.

        Raises `ChunkMissing`, `DescriptorInvalid`, `TargetInvalid`: nothing was written.
        """
        keys = self._keys_of(call)
        if self._deliveries >= self._config.deliveries_max:
            raise TooManyRequests(f"{self._deliveries} deliveries are running; retry later")
        name = delivery_name(self._config.node_id, call.delivery_id, call.node_index)
        if name in self._delivering:
            raise InvalidRequest("a delivery of this id is running", field="delivery_id")
        self._delivering.add(name)
        try:
            async for event in self._deliver(call, keys):
                yield event
        finally:
            self._delivering.discard(name)

    def _keys_of(self, call: DeliverCall) -> ChunkKeys:
        """What this node is to deliver. Raises `DescriptorInvalid` where that is not its own, or not of the request."""
        descriptor = call.descriptor
        for each in call.ranges:
            inside = descriptor.first_chunk <= each.first < each.stop <= descriptor.stop_chunk
            if each.node_id != self._config.node_id or not inside:
                raise DescriptorInvalid(f"{each} is not this node's to deliver", field="ranges")
        if not call.ranges:
            raise DescriptorInvalid("names no chunk", field="ranges")
        return ChunkKeys(b"".join(descriptor.keys.run(each.first, each.count).packed for each in call.ranges))

    async def _deliver(self, call: DeliverCall, keys: ChunkKeys) -> AsyncIterator[int | NodeOutcome]:
        held = await self._hold(call, keys)
        task, delivery = None, None
        try:
            delivery = Delivery(self._parts, call, held.copies)
            task = self._spawn(self._run(delivery, call, held), traced=True)
        finally:
            if task is None:
                self._tiers.unpin(held)
        try:
            async for layer in delivery.layers():
                yield layer
            yield await asyncio.shield(task)
        finally:
            if not task.done():
                delivery.cancel()

    async def ingest(self, call: IngestCall) -> NodeOutcome:
        """Store chunks. Acknowledged means readable, and durable as asked."""
        self._stores.check_level(call.durability)
        if self._ingests >= self._config.ingests_max:
            raise TooManyRequests(f"{self._ingests} stores are running; retry later")
        self._ingests += 1
        task = self._spawn(self._stores.ingest(call), traced=True)
        task.add_done_callback(self._ingested)
        try:
            # A task of its own: a caller that goes away must not leave slots half-written and half-committed.
            return cast(NodeOutcome, await asyncio.shield(task))
        except asyncio.CancelledError:
            if not task.done():
                self._stores.abandon(call.store_id)
            raise

    def _ingested(self, task: asyncio.Task[Any]) -> None:
        self._ingests -= 1
        if not task.cancelled():
            task.exception()  # seen: the caller may be gone

    async def drop(self, generations: Mapping[bytes, int]) -> int:
        """Forget chunks whose index entries of these generations have ended (0: whatever is here); how many went."""
        return await self._tiers.drop(generations)

    async def delete_objects(self, keys: ChunkKeys, until_ms: int) -> None:
        """Remove objects that no index entry lists. Raises `DeadlineExceeded` after `until_ms` (Unix epoch)."""
        if self._objects is None:
            raise InvalidRequest("this node has no object tier (QUIRE_STORAGE_OBJECT_URL)", field="chunk_keys")
        await self._objects.delete(list(keys), until_ms)

    async def raise_level(self, keys: ChunkKeys, durability: Durability) -> list[bool]:
        """Make chunks that are here durable at a level; for each whether it is now."""
        self._stores.check_level(durability)
        task = self._spawn(self._stores.raise_level(list(keys), durability), traced=True)
        safe = await asyncio.shield(task)
        return [key in safe for key in keys]

    async def replicate(self, source: Node, keys: ChunkKeys) -> list[bool]:
        """Pull chunks from another node; for each whether it is here now, on a drive."""
        self._stores.check_level(Durability.LOCAL)
        task = self._spawn(self._replicator.pull(source, list(keys)), traced=True)
        return cast(list[bool], await asyncio.shield(task))

    def describe(self, keys: ChunkKeys) -> list[bytes]:
        """Headers of the chunks that are here."""
        return [pack_header(header) for key in keys if (header := self._tiers.find(key)) is not None]

    # ---- deliveries

    async def _hold(self, call: DeliverCall, keys: ChunkKeys) -> Held:
        try:
            with tracer().start_as_current_span(names.STORAGE_HOLD, attributes={"quire.chunks": len(keys)}):
                return await self._tiers.pin_all(list(keys))
        except ChunkMissing:
            wanted = [
                record for each in call.ranges for record in records(call.descriptor.keys, each.first, each.count)
            ]
            missing = [record for record in wanted if record.key not in self._tiers.residency]
            if self._objects is not None:  # without an answer of the object tier nothing is known of them
                absent = self._objects.found_absent([record.key for record in missing])
                missing = [record for record in missing if record.key in absent]
                self._spawn(self._registry.withdraw(missing, OBJECT_TIER))
            self._tiers.deny(missing)
            raise

    async def _run(self, delivery: Delivery, call: DeliverCall, held: Held) -> NodeOutcome:
        self._deliveries += 1
        try:
            outcome = await delivery.run()
        finally:
            self._deliveries -= 1
            if delivery.settled:
                self._tiers.unpin(held)
            else:
                self._spawn(self._linger(delivery, held))
        self._delivered_bytes += outcome.bytes_moved
        self._delivered.add(outcome.bytes_moved, {"order": outcome.order.name.lower(), "scheduled": outcome.scheduled})
        if outcome.error_code == PeerLost.code() and delivery.peer is not None and call.lease:
            self._spawn(self._release_if_gone(delivery.peer, call.lease))
        return outcome

    async def _linger(self, delivery: Delivery, held: Held) -> None:
        await delivery.linger()
        self._tiers.unpin(held)

    async def _release_if_gone(self, peer: Peer, lease: bytes) -> None:
        """The lease of a client that died. One that has merely cancelled a delivery keeps it."""
        gone = asyncio.Event()
        unwatch = peer.on_failure(lambda error: gone.set())
        try:
            async with asyncio.timeout(_DEATH_SEEN_S):
                await gone.wait()
            await self._release(lease)
        except TimeoutError:
            return
        finally:
            unwatch()

    async def _release(self, lease: bytes) -> None:
        try:
            await self._ports.index.release(lease)
        except QuireError as error:
            logger().warning("the lease of a lost client could not be released", error=str(error))

    # ----

    async def _open_pool(self, arena: Arena) -> None:
        config = self._config
        limits = SlackLimits(age_s_max=config.write_age_s_max, backlog_bytes_max=config.write_backlog_bytes)
        settings = PoolSettings(
            config.node_id, config.drive_bytes, config.slab_bytes, config.chunk_bytes_min, config.stripe_bytes
        )
        drives = self._ports.drives()
        self._pool = Pool(settings, config.drive_folders, drives)
        files = self._pool.open()
        self._ring = Ring(self._ports.block_io(config.io, config.io_depth, direct=drives.direct), self._clock, limits)
        await self._ring.start(files, [arena.view])
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
            self._spawn(self._parts.rates.stalled(name, message.stall_us / 1e6))

    def _spawn(self, coroutine: Coroutine[Any, Any, Any], *, traced: bool = False) -> asyncio.Task[Any]:
        """`traced`: part of the current request; else it may outlive it."""
        task = asyncio.create_task(coroutine, context=None if traced else background())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
