"""The storage node: what it holds, the transfers that run, and its place in the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np

from quire.durability import Durability
from quire.errors import (
    ContentConflict,
    InvalidRequest,
    LeaseForged,
    NotImplementedHere,
    PeerLost,
    QuireError,
    TooManyRequests,
)
from quire.keys import ChunkKeys
from quire.lease import LeaseSigner
from quire.metadata.index import ChunkRecord, records
from quire.outcome import NodeOutcome
from quire.telemetry import binary_context, logger, meter, names, tracer
from quire.transport import LayerProduced, Quiesced, Transport, decode_message
from quire.transport.messages import encode_message
from quire_storage.config import StorageConfig
from quire_storage.core.chunks import Chunk, ChunkTable
from quire_storage.core.slots import Shape, SlotAllocator
from quire_storage.delivery import DeliverCall, Delivery, Workshop
from quire_storage.errors import SlotsUnsettled
from quire_storage.ingest import IngestCall, Slots, pull
from quire_storage.ports import Clock, ClusterIndex, DurablePool, RateSource
from quire_storage.produced import ProducedLayers
from quire_storage.rates import Rates

_INDEX_RETRY_S = 0.02
_REINDEX_PAUSE_S_MAX = 30.0


class StorageNode:
    """`pool` is None for a node that keeps chunks in memory only."""

    def __init__(
        self,
        config: StorageConfig,
        transport: Transport,
        index: ClusterIndex,
        rate_source: RateSource,
        pool: DurablePool | None,
        clock: Clock,
    ) -> None:
        self._config = config
        self._transport = transport
        self._index = index
        self._pool = pool
        self._clock = clock
        self._rate_source = rate_source
        self._signer = LeaseSigner(config.cluster_secret.encode())
        self._slots = SlotAllocator(config.arena_bytes, config.slab_bytes)
        self._table = ChunkTable()
        self._produced = ProducedLayers()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._committing = asyncio.Lock()
        self._abandoned: set[bytes] = set()
        self._deliveries = 0
        self._ingests = 0
        self._corrupt_total = 0
        self._delivered = meter().create_counter(names.DELIVERED_BYTES, "By")
        self._ingested = meter().create_counter(names.INGESTED_BYTES, "By")
        self._checksum_failures = meter().create_counter(names.CHECKSUM_FAILURES)

    async def start(self) -> None:
        """Recover what the pool holds, open the data plane, tell the index what is here."""
        self._arena_memory = mmap.mmap(-1, self._config.arena_bytes)
        self._arena_memory.madvise(mmap.MADV_HUGEPAGE)
        self._arena = np.frombuffer(self._arena_memory, dtype=np.uint8)
        self._threads = ThreadPoolExecutor(2, "storage")
        self._pool_thread = ThreadPoolExecutor(1, "pool")
        if self._pool is not None:
            recovered = await self._in_pool_thread(self._pool.recover, self._arena)
            self._adopt(recovered)
        await self._transport.start()
        self._transport.on_message(self._on_message)
        region = self._transport.register(self._arena)
        rates = Rates(self._rate_source, self._clock, self._config.link_bytes_per_s)
        self._shop = Workshop(self._config, self._transport, self._arena, region, rates, self._threads, self._clock)
        if len(self._table):
            self._spawn(self._reindex([chunk.record for chunk in self._table]))

    async def close(self) -> None:
        """Let transfers finish for the configured time, then cut them."""
        running = [task for task in self._tasks if not task.done()]
        if running:
            await asyncio.wait(running, timeout=self._config.stop_grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transport.close()
        self._threads.shutdown()
        self._pool_thread.shutdown()
        if self._pool is not None:
            self._pool.close()

    @property
    def used_bytes(self) -> int:
        return self._slots.used_bytes

    @property
    def figures(self) -> dict[str, float]:
        """For `quire status`."""
        return {
            "chunks": len(self._table),
            "deliveries": self._deliveries,
            "ingests": self._ingests,
            "corrupt": self._corrupt_total,
        }

    async def deliver(self, call: DeliverCall) -> AsyncIterator[int | NodeOutcome]:
        """Layers as they arrive, if asked for, then the outcome. Closing the iterator early stops the delivery.

        Raises `LeaseForged`, `LeaseExpired`, `ChunkMissing`, `DescriptorInvalid`, `TargetInvalid`: nothing was written.
        """
        lease = self._signer.verify(call.lease, self._clock.now_ms())
        keys = [call.descriptor.keys.run(run.first, run.count) for run in call.runs]
        if not call.runs or not all(
            lease.covers(self._config.node_id, run.first, part) for run, part in zip(call.runs, keys, strict=True)
        ):
            raise LeaseForged("it does not cover these chunks at this node", field="lease")
        if self._deliveries >= self._config.deliveries_max:
            raise TooManyRequests(f"{self._deliveries} deliveries are running; retry later")
        chunks = self._pin(call, ChunkKeys(b"".join(part.packed for part in keys)))
        task, delivery = None, None
        try:
            delivery = Delivery(self._shop, call, chunks, self._lose)
            task = self._spawn(self._run(delivery, call, chunks))
        finally:
            if task is None:
                self._unpin(chunks)
        try:
            async for layer in delivery.layers():
                yield layer
            yield await asyncio.shield(task)
        finally:
            if not task.done():
                delivery.cancel()

    async def ingest(self, call: IngestCall) -> NodeOutcome:
        """Store chunks. Acknowledged means readable, and durable as asked."""
        if call.durability not in (Durability.MEMORY, Durability.LOCAL):
            raise NotImplementedHere(f"{call.durability.value!r}", field="durability")
        if call.durability is Durability.LOCAL and self._pool is None:
            raise NotImplementedHere("this node has no disk (QUIRE_STORAGE_FOLDER)", field="durability")
        if self._ingests >= self._config.ingests_max:
            raise TooManyRequests(f"{self._ingests} stores are running; retry later")
        self._ingests += 1
        task = self._spawn(self._ingest(call))
        try:
            # A task of its own: a caller that goes away must not leave slots half-written and half-committed.
            return cast(NodeOutcome, await asyncio.shield(task))
        except asyncio.CancelledError:
            if not task.done():
                self._abandoned.add(call.store_id)
                self._produced.fail(call.store_id, PeerLost("the store was abandoned"))
            raise

    async def drop(self, keys: ChunkKeys) -> int:
        """Forget chunks; how many were here."""
        removed = self._detach([chunk for key in keys if (chunk := self._table.get(key)) is not None])
        await self._finish_removal(removed)
        return len(removed)

    # ---- deliveries

    def _pin(self, call: DeliverCall, keys: ChunkKeys) -> list[Chunk]:
        try:
            return self._table.pin(keys)
        except QuireError:
            missing = [
                record
                for run in call.runs
                for record in records(call.descriptor.keys, run.first, run.count)
                if self._table.get(record.key) is None
            ]
            self._spawn(self._withdraw(missing))
            raise

    async def _run(self, delivery: Delivery, call: DeliverCall, chunks: list[Chunk]) -> NodeOutcome:
        self._deliveries += 1
        try:
            outcome = await delivery.run()
        finally:
            self._deliveries -= 1
            self._unpin(chunks)
        self._delivered.add(outcome.bytes_moved)
        if outcome.error_code == PeerLost.code():
            self._spawn(self._release(call.lease))
        return outcome

    def _unpin(self, chunks: list[Chunk]) -> None:
        for chunk in self._table.unpin(chunks):
            self._slots.free(chunk.offset)

    def _lose(self, chunks: list[Chunk]) -> None:
        """Chunks that failed their checksums: unreadable from now on, here and in the index."""
        self._checksum_failures.add(len(chunks))
        self._corrupt_total += len(chunks)
        logger().error("chunks do not match their checksums", chunks=[chunk.record.key.hex() for chunk in chunks])
        removed = self._detach(chunks)
        self._spawn(self._withdraw([chunk.record for chunk, _ in removed]))
        self._spawn(self._finish_removal(removed))

    async def _withdraw(self, lost: Sequence[Any]) -> None:
        try:
            await self._index.withdraw(self._config.node_id, lost)
        except QuireError as error:
            logger().warning("lost chunks could not be withdrawn", chunks=len(lost), error=str(error))

    async def _release(self, lease: bytes) -> None:
        try:
            await self._index.release(lease)
        except QuireError as error:
            logger().warning("the lease of a lost client could not be released", error=str(error))

    # ---- stores

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
        offsets = self._slots.allocate(shape, len(call.records))
        slots = Slots(self._arena, self._shop.region, offsets, self._slots.layer_stride(shape))
        unowned = set(offsets.tolist())  # slots that belong to no chunk of the table (yet)
        try:
            pulled = await pull(
                call, slots, self._transport, self._produced, self._threads, self._config.transfer_timeout_s
            )
            fresh = await self._commit(call, pulled)
            unowned -= {chunk.offset for chunk in fresh}
        except SlotsUnsettled as error:
            logger().error("slots are lost until the next start", slots=len(offsets), error=str(error))
            unowned.clear()
            raise
        finally:
            for offset in unowned:
                self._slots.free(offset)
        # Those that were here already are indexed too: whoever stored them may not have got that far, or may fail to.
        indexed = await self._index_all([chunk.record for chunk in pulled], fresh)
        moved = call.layout.payload_bytes(len(call.records))
        self._ingested.add(moved)
        present = bytes(record.key in indexed for record in call.records)
        return NodeOutcome(self._config.node_id, call.source_runs, present, moved, quiesced=True)

    async def _commit(self, call: IngestCall, pulled: list[Chunk]) -> list[Chunk]:
        """Make new chunks durable and readable; those that turned out to be here already are compared."""
        with tracer().start_as_current_span(names.STORAGE_COMMIT):
            # One commit at a time: a key that two stores bring at once must get one frame in the log, not two.
            async with self._committing:
                if call.store_id in self._abandoned:
                    raise PeerLost("the store was abandoned: its buffer may hold something else by now")
                fresh = [chunk for chunk in pulled if not self._is_known(chunk)]
                if call.durability is Durability.LOCAL and fresh:
                    assert self._pool is not None, "ingest() checked"
                    await self._in_pool_thread(self._pool.persist, fresh, self._arena)
                for chunk in fresh:
                    self._table.add(chunk)
            return fresh

    def _is_known(self, chunk: Chunk) -> bool:
        known = self._table.get(chunk.record.key)
        if known is None:
            return False
        if not known.same_content(chunk):
            raise ContentConflict(f"key {chunk.record.key.hex()} holds other bytes; they were kept", field="chunk_keys")
        return True

    async def _index_all(self, wanted: Sequence[ChunkRecord], fresh: Sequence[Chunk]) -> set[bytes]:
        """Register; a chunk whose parent is on its way to another node waits for it. Returns the keys that are indexed.

        Chunks of `fresh` that cannot be indexed are dropped again.
        """
        waiting, deadline = list(wanted), self._clock.monotonic_s() + self._config.index_timeout_s
        indexed: set[bytes] = set()
        try:
            while waiting:
                marks = await self._index.commit(self._config.node_id, waiting)
                indexed |= {record.key for record, mark in zip(waiting, marks, strict=True) if mark}
                waiting = [record for record in waiting if record.key not in indexed]
                if waiting and self._clock.monotonic_s() > deadline:
                    break
                if waiting:
                    await self._clock.sleep(_INDEX_RETRY_S)
        finally:
            await self._finish_removal(self._detach([chunk for chunk in fresh if chunk.record.key not in indexed]))
        return indexed

    def _say_quiesced(self, call: IngestCall, *, complete: bool) -> None:
        self._abandoned.discard(call.store_id)
        message = Quiesced(call.store_id, call.node_index, complete, binary_context())
        with contextlib.suppress(QuireError):
            self._transport.connect(call.source.worker_address).send(encode_message(message))

    # ---- removal

    def _detach(self, chunks: Sequence[Chunk]) -> list[tuple[Chunk, bool]]:
        """Make these very chunks unreadable, not others under the same keys; with whether each one's slot is free."""
        found = [chunk for chunk in chunks if self._table.get(chunk.record.key) is chunk]
        return [dropped for chunk in found if (dropped := self._table.drop(chunk.record.key)) is not None]

    async def _finish_removal(self, removed: Sequence[tuple[Chunk, bool]]) -> None:
        """Forget on disk, then free the slots that no delivery reads; the others are freed by the last of them."""
        await self._forget([chunk for chunk, _ in removed])
        for chunk, is_free in removed:
            if is_free:
                self._slots.free(chunk.offset)

    # ---- the pool

    async def _forget(self, chunks: Sequence[Chunk]) -> None:
        durable = [chunk.record.key for chunk in chunks if chunk.durability is Durability.LOCAL]
        if self._pool is not None and durable:
            await self._in_pool_thread(self._pool.forget, durable)

    def _adopt(self, recovered: Sequence[Chunk]) -> None:
        for chunk in recovered:
            if self._slots.adopt(chunk.offset, Shape(chunk.num_layers, chunk.slice_bytes)):
                self._table.add(chunk)
            else:
                logger().error("a recovered chunk does not fit the pool's geometry", key=chunk.record.key.hex())
        logger().info("pool recovered", chunks=len(self._table), bytes=self._slots.used_bytes)

    async def _reindex(self, held: Sequence[Any]) -> None:
        """Tell the index what this node holds. Parents may be on nodes that are still coming up: try again."""
        waiting, pause_s = list(held), 0.2
        while waiting:
            try:
                marks = await self._index.commit(self._config.node_id, waiting)
                waiting = [record for record, indexed in zip(waiting, marks, strict=True) if not indexed]
            except QuireError as error:
                logger().warning("the index does not take this node's chunks yet", error=str(error))
            if waiting:
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _REINDEX_PAUSE_S_MAX)

    async def _in_pool_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool_thread, function, *arguments)

    # ---- plumbing

    def _on_message(self, raw: bytes) -> None:
        try:
            message = decode_message(raw)
        except InvalidRequest as error:
            logger().warning("a message that nobody understands", error=str(error))
            return
        if isinstance(message, LayerProduced):
            self._produced.announce(message.transfer_id, message.layer)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
