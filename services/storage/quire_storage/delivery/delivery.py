"""A delivery: this node's stripe of every layer into a client's memory.

The way of a layer: its chunk batches are read from the drives, if they are not in memory, and verified while those
before them are on the wire; their slices are gathered from the arena straight into the client's memory, no staging
copy; the layer-ready message follows the completed flush. However it ends, the last message to the client is
`Quiesced`: from then on its memory is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from opentelemetry import trace as otel

from quire.model.descriptor import DeliveryOrder
from quire.model.errors import DeadlineExceeded, InternalError, PeerLost, QuireError
from quire.model.nodes import RunningDelivery
from quire.model.outcome import NodeOutcome
from quire.model.policy import Theta
from quire.model.transfers import DeliverOrder
from quire.telemetry import binary_context, logger, names, tracer
from quire.transport import LayerReady, PayloadStream, Peer, Quiesced, Region, Transport
from quire.transport.messages import ALL_LAYERS, encode_message
from quire_storage.config import StorageConfig
from quire_storage.core.chunks import Copy
from quire_storage.core.plan import check_shapes, choose_order
from quire_storage.delivery.batches import Batches, ReadyBatch
from quire_storage.delivery.fair_queue import Lane, Wire, WireQueue
from quire_storage.delivery.layer_trace import LayerTrace
from quire_storage.delivery.object_loads import ObjectChunk
from quire_storage.delivery.promotions import Promotions
from quire_storage.delivery.rates import Allowance, Rates
from quire_storage.delivery.reading import Reading, Source
from quire_storage.ingest.arrivals import ArrivingChunk
from quire_storage.ports import AdmissionRequest, Clock

_PIECE_BYTES_MIN, _PIECE_BYTES_MAX = 256 << 10, 4 << 20
_FIRST_PIECE_BYTES = 1 << 20
_QUIESCE_TIMEOUT_S = 5.0
_LINGER_S = 60.0
_TURN_S = 0.5
_COPY_BYTES = 8 << 20
Bytes = npt.NDArray[np.uint8]
Send = Callable[[ReadyBatch, LayerTrace], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryParts:
    """Parts that every delivery of a node shares."""

    config: StorageConfig
    transport: Transport
    reading: Reading
    promotions: Promotions
    region: Region
    rates: Rates
    clock: Clock
    wire: Wire
    chunkwise: WireQueue
    theta: Callable[[], Theta]


class NodeDelivery:
    """Runs once. `layers()` yields each finished layer if the call wants them; `run()` returns the outcome.

    `settled`: nothing of it is in flight. `cancelled`: by its caller. `peer`: the client, once it is known.
    """

    def __init__(
        self,
        parts: DeliveryParts,
        call: DeliverOrder,
        chunks: Sequence[Source],
    ) -> None:
        self._parts = parts
        self._call = call
        self._tenant, self._urgency = call.tenant, call.urgency
        self._name = delivery_name(parts.config.node_id, call.delivery_id, call.node_index)
        self._chunks = chunks
        self._failed: dict[int, QuireError] = {}
        self.settled = True
        check_shapes(call.descriptor, [chunk for chunk in chunks if isinstance(chunk, Copy)])
        self._layer_bytes = len(chunks) * call.descriptor.slice_bytes
        theta, is_cold = parts.theta(), any(isinstance(chunk, ObjectChunk) for chunk in chunks)
        theta_bytes = theta.object_bytes if is_cold else theta.held_bytes
        self._follows = False
        self._order = choose_order(call.descriptor.order, call.descriptor.payload_bytes, theta_bytes)
        if any(isinstance(chunk, ArrivingChunk) for chunk in chunks):  # one that waits keeps no turn of others
            self._order = DeliveryOrder.LAYERWISE
            self._follows = True
        self._finished: asyncio.Queue[int | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self.cancelled = False
        self._allowance: Allowance | None = None
        self._layers_sent = 0
        self._started_s = parts.clock.monotonic_s()

    async def layers(self) -> AsyncIterator[int]:
        """Yield each layer when it is complete at the client, until the delivery ends."""
        while (layer := await self._finished.get()) is not None:
            yield layer

    @property
    def progress(self) -> RunningDelivery:
        """Current state, for people."""
        return RunningDelivery(
            delivery_id=self._call.delivery_id,
            tenant=self._tenant.tenant,
            layers=self._call.descriptor.num_layers,
            layers_sent=self._layers_sent,
            bytes_per_layer=self._layer_bytes,
            rate_bytes_per_s=self._allowance.rate_bytes_per_s if self._allowance is not None else 0,
            running_ms=int(1000 * (self._parts.clock.monotonic_s() - self._started_s)),
        )

    def cancel(self) -> None:
        """Stop soon; `run()` then ends with the outcome of a cancelled delivery."""
        self.cancelled = True
        if self._writer is not None:
            self._writer.cancel()

    async def run(self) -> NodeOutcome:
        """Deliver. Raises `TargetInvalid` before the first byte; afterwards every failure is in the outcome."""
        attributes: dict[str, str | int] = {
            "quire.chunks": len(self._chunks),
            "quire.bytes": self._call.descriptor.num_layers * self._layer_bytes,
            "quire.order": self._order.name,
        }
        with tracer().start_as_current_span(names.STORAGE_DELIVER, attributes=attributes) as span:
            try:
                return await self._deliver(span)
            finally:
                self._finished.put_nowait(None)

    async def _deliver(self, span: otel.Span) -> NodeOutcome:
        peer = self._parts.transport.connect(self._call.descriptor.target.worker_address)
        parts, call = self._parts, self._call
        remote = await peer.remote(call.descriptor.target)
        memory = peer.memory(remote)
        try:
            batches = Batches(
                parts.reading,
                parts.promotions,
                call.descriptor,
                call.ranges,
                self._chunks,
                copied=memory is not None,
                tenant=self._tenant.tenant,
                needed_s=self._urgency.needed_s if self._urgency.is_known else None,
            )
        except BaseException:
            remote.close()
            raise
        span.set_attribute("quire.prepared", batches.is_prepared)
        failure = None
        self.settled = False
        try:
            stream = peer.stream(parts.region, remote, self._tenant.tenant)
            failure = await self._attempt(stream, memory, peer, batches, span)
            self._failed = batches.failed()
            with tracer().start_as_current_span(names.STORAGE_QUIESCE):
                chunks = len(self._chunks) - len(self._failed) if failure is None else 0
                self.settled = await self._quiesce(stream, peer, chunks)
        finally:
            if self.settled:
                remote.close()
                await batches.close()
            else:  # puts in flight use the key and the memory
                logger().error("memory that puts in flight may still read is kept until they end")
                self._left = stream, batches, remote
            if self._allowance is not None:
                parts.rates.finish(self._allowance)
        return self._outcome(stream, failure)

    async def linger(self) -> None:
        """Finish a delivery that is not settled.

        Waits until nothing of it is in flight, gives its memory back, and notifies the client, which may have seen no
        connection break.
        """
        stream, batches, remote = self._left
        while not self.settled:
            try:
                await stream.drain(_LINGER_S)
            except DeadlineExceeded:
                continue
            except QuireError:
                pass  # in flight no more
            self.settled = True
        remote.close()
        await batches.close()
        self._say_quiesced(0)

    async def _attempt(
        self, stream: PayloadStream, memory: Bytes | None, peer: Peer, batches: Batches, span: otel.Span
    ) -> QuireError | None:
        """Write everything; what went wrong, if anything did."""
        try:
            if self.cancelled:
                raise PeerLost("the client cancelled")
            if self._left_s <= 0:
                raise DeadlineExceeded("its permit ended before the first byte")
            async with asyncio.timeout(self._left_s):
                self._writer = asyncio.create_task(self._write(stream, memory, batches, span))
                unwatch = peer.on_failure(self._peer_failed)
                try:
                    await self._writer
                finally:
                    unwatch()
        except QuireError as error:
            return error
        except TimeoutError:
            return DeadlineExceeded("not delivered within the time of its permit, or QUIRE_STORAGE_TRANSFER_TIMEOUT_S")
        except asyncio.CancelledError:
            if peer.error is not None:
                return peer.error
            return PeerLost("the delivery was cancelled")
        except Exception as error:
            logger().error("a delivery failed unexpectedly", exc_info=error)
            return InternalError("the storage node's log has the details")
        return None

    @property
    def _left_s(self) -> float:
        """Time for which it may write. Chunks may have been waited for since it was permitted."""
        return min(self._parts.config.transfer_timeout_s, self._call.until_s - self._parts.clock.monotonic_s())

    def _peer_failed(self, _: PeerLost) -> None:
        if self._writer is not None:
            self._writer.cancel()

    async def _write(self, stream: PayloadStream, memory: Bytes | None, batches: Batches, span: otel.Span) -> None:
        """Layerwise by the rate that the scheduler grants, chunkwise when it is the tenant's turn (§3.4).

        Into `memory`, which is of this host, no link is used: streams take turns at the threads that copy.
        """
        if memory is not None:
            await self._write_layers(stream, batches, span, partial(self._copy, stream, memory, batches))
            return
        parts, leave, admitting = self._parts, None, None
        if self._order is DeliveryOrder.CHUNKWISE:
            leave = await parts.chunkwise.enter(
                self._tenant.tenant, self._tenant.weight, 1, _TURN_S, priority=self._urgency.priority
            )
            self._allowance = parts.rates.admit_chunkwise(self._admission())
        lane = parts.wire.lane(self._name, self._weight)
        try:
            if leave is None and batches.staged:  # a delivery that waits for its rate holds no staging memory
                self._allowance = parts.rates.begin(self._admission(), 0)
                await self._admit(self._allowance)
            elif leave is None:  # the first layer goes out on credit while the scheduler is asked
                self._allowance = parts.rates.begin(self._admission(), self._layer_bytes)
                admitting = asyncio.create_task(self._admit(self._allowance))
            if self._allowance is not None and self._follows:
                self._allowance.reported = True  # its client waits for the store: no rate would have changed that
            await self._write_layers(stream, batches, span, partial(self._put, stream, lane))
        finally:
            if admitting is not None:
                admitting.cancel()
                await asyncio.gather(admitting, return_exceptions=True)
            lane.close()
            if leave is not None:
                leave()

    async def _write_layers(self, stream: PayloadStream, batches: Batches, span: otel.Span, send: Send) -> None:
        order = [(layer, batch) for layer in range(self._call.descriptor.num_layers) for batch in batches.batches]
        layerwise = self._order is DeliveryOrder.LAYERWISE
        prepared: deque[asyncio.Task[ReadyBatch]] = deque()
        trace = LayerTrace(self._parts.clock)
        layers = iter(order)

        def look_ahead() -> None:
            while len(prepared) < batches.ahead and (upcoming := next(layers, None)) is not None:
                layer, batch = upcoming
                prepared.append(asyncio.create_task(batches.prepare(batch, layer, self._due_s(layer))))

        try:
            for layer, batch in order:
                look_ahead()
                if batch is batches.batches[0]:
                    trace.begin(span, layer)
                ready = await prepared[0]
                trace.passed("ready")
                prepared.popleft()
                look_ahead()
                if not ready.is_void:
                    await send(ready, trace)
                if ready.block is not None:
                    stream.announce(b"", partial(batches.release, ready))
                if batch is batches.batches[-1]:
                    self._layers_sent = layer + 1
                    ended = trace.end()
                    if layerwise:
                        self._count_layer()
                    if layerwise and not batches.failed():
                        self._announce(stream, layer, span, ended)
                    elif ended is not None:
                        stream.announce(b"", ended)
            if not layerwise and not batches.failed():
                self._announce(stream, ALL_LAYERS, span)
            with tracer().start_as_current_span(names.STORAGE_DRAIN):
                await stream.drain(self._parts.config.transfer_timeout_s)
        finally:
            trace.fail()
            for task in prepared:
                task.cancel()
            await asyncio.gather(*prepared, return_exceptions=True)

    async def _put(self, stream: PayloadStream, lane: Lane, ready: ReadyBatch, trace: LayerTrace) -> None:
        """A layer of a batch by the link: paced, and in its turn."""
        for piece in ready.batch.plan.pieces(ready.layer, ready.shift, self._piece_bytes(ready.layer)):
            await ready.until(piece.stop)
            trace.passed("ready")
            if self._allowance is not None:
                await self._parts.rates.until_due(self._allowance, piece.bytes)
                trace.passed("pace")
            arrived = await lane.turn(piece.bytes)
            trace.passed("turn")
            await stream.gather(piece.offsets, piece.length, piece.remote_offset)
            trace.passed("write")
            if arrived is not None:
                stream.announce(b"", arrived)

    async def _copy(
        self, stream: PayloadStream, memory: Bytes, batches: Batches, ready: ReadyBatch, trace: LayerTrace
    ) -> None:
        """A layer of a batch to memory of this host."""
        for copy, size in batches.carry(ready, memory, _COPY_BYTES):
            await stream.place(copy, size)
            trace.passed("write")

    def _due_s(self, layer: int) -> float:
        """Return when the client needs this layer; 0 for at once.

        Not later than a steady reading has it: of layers that are all needed at the end, each takes its time before.
        """
        if not self._urgency.is_known:
            return 0.0
        steady_s = (layer + 1) * self._urgency.layer_us(self._call.descriptor.num_layers) / 1e6
        return self._started_s + min(self._urgency.needed_s(layer), steady_s)

    async def _admit(self, allowance: Allowance) -> None:
        with tracer().start_as_current_span(names.STORAGE_ADMIT):
            await self._parts.rates.ask(allowance)

    def _admission(self) -> AdmissionRequest:
        return AdmissionRequest(
            delivery=self._name,
            bytes_per_layer=self._layer_bytes,
            compute_window_us=self._urgency.layer_us(self._call.descriptor.num_layers),
            layers=self._call.descriptor.num_layers,
            priority=self._urgency.priority,
            tenant=self._tenant,
        )

    def _weight(self) -> float:
        """Weight of this delivery on the wire: its rate."""
        return float(self._allowance.rate_bytes_per_s) if self._allowance is not None else 0.0

    def _piece_bytes(self, layer: int) -> int:
        """Bytes between two looks at the pacer: a power of two, of two milliseconds' worth, within limits.

        The first layer is verified while it is sent, and on credit: in small steps.
        """
        if self._allowance is None:
            return _PIECE_BYTES_MAX
        rate = self._allowance.rate_bytes_per_s
        worth = min(rate // 500 or _FIRST_PIECE_BYTES, _PIECE_BYTES_MAX if layer else _FIRST_PIECE_BYTES)
        return 1 << min(_PIECE_BYTES_MAX, max(_PIECE_BYTES_MIN, worth)).bit_length() - 1

    def _count_layer(self) -> None:
        if self._allowance is not None and self._allowance.layers_left > 1:
            self._allowance.layers_left -= 1

    def _announce(
        self, stream: PayloadStream, layer: int, span: otel.Span, ended: Callable[[], None] | None = None
    ) -> None:
        def arrived() -> None:
            if ended is not None:
                ended()
            span.add_event(names.EVENT_LAYER, {"quire.layer": layer})
            if self._call.layers_in_stream:
                self._finished.put_nowait(layer)

        message = LayerReady(self._call.delivery_id, self._call.node_index, layer, binary_context())
        stream.announce(encode_message(message), arrived)

    async def _quiesce(self, stream: PayloadStream, peer: Peer, chunks: int) -> bool:
        """Let puts in flight end, by force if need be, and notify the client that its memory is its own.

        `chunks`: how many were delivered. False if a put may still be in flight.
        """
        settled = True
        if chunks < len(self._chunks):
            stream.stop()
            try:
                await stream.drain(_QUIESCE_TIMEOUT_S)
            except DeadlineExceeded:
                peer.abort()
                try:
                    await stream.drain(_QUIESCE_TIMEOUT_S)
                except DeadlineExceeded:
                    settled = False
                except QuireError:
                    pass
            except QuireError:
                pass  # in flight no more: that is all that matters here
        if settled:  # else `linger` says so, once it is
            self._say_quiesced(chunks)
        return settled

    def _say_quiesced(self, chunks: int) -> None:
        """Send it by another connection, if the first one had to be cut."""
        message = Quiesced(self._call.delivery_id, self._call.node_index, chunks, binary_context())
        with contextlib.suppress(QuireError):
            self._parts.transport.connect(self._call.descriptor.target.worker_address).send(encode_message(message))

    def _outcome(self, stream: PayloadStream, failure: QuireError | None) -> NodeOutcome:
        allowance = self._allowance
        delivered = bytes(failure is None and at not in self._failed for at in range(len(self._chunks)))
        message = str(failure) if failure else ""
        if failure is None and self._failed:
            at, failure = min(self._failed.items(), key=lambda item: item[0])
            message = f"{len(self._failed)} chunks failed, first chunk {at} of those asked for: {failure}"
        return NodeOutcome(
            self._parts.config.node_id,
            self._call.ranges,
            delivered,
            stream.bytes_posted,
            self._order,
            allowance.rate_bytes_per_s if allowance else 0,
            scheduled=allowance is not None and allowance.scheduled,
            quiesced=self.settled,
            error_code=failure.code() if failure else "",
            error_message=message,
        )


def delivery_name(node_id: str, delivery_id: bytes, node_index: int) -> str:
    """Name of a delivery at the scheduler."""
    return f"{node_id}/{delivery_id.hex()}/{node_index}"
