"""The storage node: its parts, the transfers that run, and its place in the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from quire.model.errors import InvalidRequest
from quire.model.nodes import Node, StorageInfo
from quire.model.policy import Theta
from quire.telemetry import background, logger
from quire.transport import LayerProduced, Stalled, Transport, decode_message
from quire.transport.fair_threads import FairThreads
from quire_server import tasks
from quire_server.membership.heartbeat import ClusterNews
from quire_storage.cluster.draining import Drainer
from quire_storage.cluster.hot_copies import HotCopies
from quire_storage.cluster.housekeeping import Housekeeping
from quire_storage.cluster.integrity import Integrity
from quire_storage.cluster.node_rpc import NodeRequests
from quire_storage.cluster.reconciler import Reconciler
from quire_storage.cluster.redundancy import CHECKED_AMONG
from quire_storage.cluster.registry import Registry
from quire_storage.cluster.replication import Replicator
from quire_storage.config import StorageConfig
from quire_storage.core.residency import Residency, ResidencySettings
from quire_storage.core.slack import SlackLimits
from quire_storage.delivery.deliveries import Deliveries
from quire_storage.delivery.delivery import DeliveryParts
from quire_storage.delivery.fair_queue import Wire, WireQueue
from quire_storage.delivery.object_loads import LoadParts, ObjectLoads
from quire_storage.delivery.prefetch import Prefetches
from quire_storage.delivery.promotions import Promotions
from quire_storage.delivery.rates import Rates
from quire_storage.delivery.reading import Reading
from quire_storage.delivery.transfers import Transfers
from quire_storage.ingest.announced_layers import AnnouncedLayers
from quire_storage.ingest.arrivals import Arrivals
from quire_storage.ingest.stores import Stores
from quire_storage.ports import Ports
from quire_storage.tiers.arena import Arena
from quire_storage.tiers.object_tier import ChunkObjects
from quire_storage.tiers.pool import Pool, PoolSettings
from quire_storage.tiers.ring import Ring
from quire_storage.tiers.tiers import Tiers
from quire_storage.tiers.write_behind import WriteBehind

_CLEANED_UP_S = 10.0
"""More than a delivery waits for what is in flight, once it is cancelled."""


class StorageNode:
    """`me` describes this node to others; called only after `start`. `checked`: see `Tiers`.

    `deliveries` and `requests` serve its requests, once it has started.
    """

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
        self._produced = AnnouncedLayers()
        self._arrivals = Arrivals()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._theta = self._own_theta = Theta(config.theta_bytes, config.theta_object_bytes)
        self._ring: Ring | None = None
        self._pool: Pool | None = None
        self._objects: ChunkObjects | None = None
        self._write_behind: WriteBehind | None = None

    async def start(self) -> None:
        """Recover the chunks of the drives, open the data plane; the first heartbeat reports to the index.

        Raises `ForeignPool`, `DriveUnusable`, `ConfigInvalid`.
        """
        config = self._config
        arena = Arena(config.arena_bytes, config.slab_bytes, config.staging_bytes, config.block_bytes)
        arena.map(reserved=config.huge_pages)
        self._threads = self._ports.threads(2)
        if config.drive_folders:
            await self._open_pool(arena)
        if self._ports.objects is not None:
            self._objects = ChunkObjects(self._ports.objects, self._clock, config.object_timeout_s)
            self._write_behind = WriteBehind(
                objects=self._objects,
                registry=self._registry,
                clock=self._clock,
                lag_bytes_max=config.object_lag_bytes,
                timeout_s=config.object_timeout_s,
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
            draw=self._ports.draw,
        )
        logger().info("pool recovered", chunks=len(residency))
        await self._transport.start()
        self._transport.on_message(self._on_message)
        self._build(arena)

    def _build(self, arena: Arena) -> None:
        """The parts that stand on the tiers."""
        config, tiers = self._config, self._tiers
        region = self._transport.register(arena.view)
        self._build_copies()
        turns = FairThreads(self._threads)
        self._integrity = Integrity(
            tiers=tiers, ring=self._ring, threads=self._threads, clock=self._clock, copies=self._replicator.copies
        )
        self._stores = Stores(
            config=config,
            tiers=tiers,
            transport=self._transport,
            region=region,
            replicator=self._replicator,
            produced=self._produced,
            arrivals=self._arrivals,
            threads=turns,
            clock=self._clock,
            is_quarantined=self._integrity.is_quarantined,
        )
        reading = Reading(
            tiers=tiers,
            ring=self._ring,
            threads=turns,
            heal=self._integrity.heal,
            loads=self._loads(turns),
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
            chunkwise=WireQueue(config.chunkwise_max),
            theta=lambda: self._theta,
        )
        transfers = Transfers(self._clock)
        self.deliveries = Deliveries(
            config=config,
            parts=self._parts,
            tiers=tiers,
            arrivals=self._arrivals,
            registry=self._registry,
            spawn=self._spawn,
            on_read=self._hot_copies.read,
            transfers=transfers,
        )
        self.prefetches = Prefetches(reading, self._parts.promotions, self._clock)
        self.requests = NodeRequests(
            config=config,
            tiers=tiers,
            stores=self._stores,
            replicator=self._replicator,
            hot_copies=self._hot_copies,
            spawn=self._spawn,
            transfers=transfers,
            registry=self._registry,
            state=lambda: self._drainer.state,
            is_quarantined=self._integrity.is_quarantined,
        )
        self._start_background()

    def _loads(self, threads: FairThreads) -> ObjectLoads | None:
        """Create the part that reads chunks of the object tier, if there is one."""
        if self._objects is None:
            return None
        heal = self._integrity.from_others
        return ObjectLoads(
            LoadParts(tiers=self._tiers, objects=self._objects, threads=threads, clock=self._clock, heal=heal)
        )

    def _start_background(self) -> None:
        """Start the background tasks."""
        config, tiers, clock = self._config, self._tiers, self._clock
        self._reconciler = Reconciler(
            tiers=tiers, registry=self._registry, clock=clock, threads=self._threads, spawn=self._spawn
        )
        if self._write_behind is not None:
            self._write_behind.start(tiers, self._integrity.sound)
        housekeeping = Housekeeping(
            tiers=tiers, index=self._ports.index, clock=clock, threads=self._threads, check_s=config.policy_check_s
        )
        self._spawn(housekeeping.run())
        self._drainer = Drainer(
            config=config,
            tiers=tiers,
            index=self._ports.index,
            peers=self._ports.peers,
            replicator=self._replicator,
            clock=clock,
            activity=lambda: self.requests.activity,
            me=self._me,
        )
        self._spawn(self._drainer.run())
        self._spawn(self._hot_copies.run())
        if self._pool is not None:
            self._spawn(self._integrity.scrub(config.scrub_bytes_per_s))
            self._spawn(self._integrity.retry())
            self._spawn(self._replicator.keep_replicated())

    def _build_copies(self) -> None:
        """Create the parts that copy chunks from node to node."""
        config, tiers = self._config, self._tiers
        self._replicator = Replicator(
            config=config,
            tiers=tiers,
            transport=self._transport,
            index=self._ports.index,
            registry=self._registry,
            peers=self._ports.peers,
            clock=self._clock,
            me=self._me,
        )
        self._hot_copies = HotCopies(
            config=config,
            tiers=tiers,
            replicator=self._replicator,
            index=self._ports.index,
            peers=self._ports.peers,
            clock=self._clock,
            me=self._me,
        )

    async def close(self) -> None:
        """Let transfers finish for the configured time, then cut them; write chunks that are in memory only."""
        deadline_s = self._clock.monotonic_s() + self._config.stop_grace_s
        while len(self.deliveries.running) + self.requests.ingests and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(0.02)
        await tasks.end(self._tasks, again_s=_CLEANED_UP_S)
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
        """The facts that others decide by."""
        return StorageInfo(
            worker_address=self._transport.address,
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            link=self._config.link,
            has_object_tier=self._objects is not None,
            object_speed=self._objects.reads.speed.measured().rounded() if self._objects is not None else None,
            reached=self._drainer.reached,
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
            "deliveries": len(self.deliveries.running),
            "ingests": self.requests.ingests,
            "delivered bytes": self.deliveries.delivered_bytes,
            "ingested bytes": self._stores.ingested_bytes,
            **self._parts.rates.stats,
            "hot copies": self._hot_copies.kept,
            "corrupt": self._integrity.corrupt,
            "healed": self._integrity.healed,
            "quarantined": self._integrity.quarantined,
            "scrubbed": self._integrity.scrubbed,
            "alone": self._replicator.alone,
            "to copy": self._drainer.left,
            "failed drives": len(self._pool.map.failed_drives()) if self._pool is not None else 0,
        }

    @property
    def notes(self) -> dict[str, str]:
        return {
            "io": self._ring.description if self._ring is not None else "none, memory only",
            "link": self._config.link,
            "data plane": self._transport.description,
            "objects": self._objects.description if self._objects is not None else "none",
            **({CHECKED_AMONG: self.replicas} if self._pool is not None else {}),
        }

    @property
    def replicas(self) -> str:
        """Digest of the nodes among which all replicas were last found; empty without drives or replicas."""
        return self._replicator.checked_among if self._pool is not None else ""

    @property
    def compared(self) -> bool:
        """Whether the index lists this node's chunks."""
        return self._reconciler.compared

    def on_news(self, news: ClusterNews) -> None:
        """Take the cluster's part of a heartbeat's answer."""
        own = self._own_theta
        self._theta = Theta(news.theta.held_bytes or own.held_bytes, news.theta.object_bytes or own.object_bytes)
        if news.state is not None:
            self._drainer.told(news.state)
        self._reconciler.on_news(news)

    # ----

    async def _open_pool(self, arena: Arena) -> None:
        config = self._config
        limits = SlackLimits(age_s_max=config.write_age_s_max, backlog_bytes_max=config.write_backlog_bytes)
        settings = PoolSettings(
            node_id=config.node_id,
            drive_bytes=config.drive_bytes,
            slab_bytes=config.slab_bytes,
            chunk_bytes_min=config.chunk_bytes_min,
            stripe_bytes=config.stripe_bytes,
            error_s_max=config.drive_error_s_max,
            write_error_s_max=config.drive_write_error_s_max,
        )
        drives, clock, draw = self._ports.drives(), self._clock, self._ports.draw
        self._pool = Pool(settings, config.drive_folders, drives, monotonic_s=clock.monotonic_s, draw=draw)
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
            logger().warning("a message is not understood", error=str(error))
            return
        if isinstance(message, LayerProduced):
            self._produced.announce(message.transfer_id, message.layer)
        elif isinstance(message, Stalled):
            self.deliveries.stalled(message)

    def _spawn(self, work: Coroutine[Any, Any, Any], *, traced: bool = False) -> asyncio.Task[Any]:
        """`traced`: part of the current request; else it may outlive it."""
        task = asyncio.create_task(work, context=None if traced else background())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
