"""One delivery: this node's stripe of every layer into a client's memory.

The way of a layer: its checksums are verified in a thread while the layer before it is on the wire; its slices are
gathered from the arena straight into the client's memory, no staging copy; the layer-ready message follows the
completed flush. However it ends, the last thing the client hears is `Quiesced`: from then on its memory is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from opentelemetry import trace

from quire.descriptor import DeliveryOrder, Descriptor
from quire.errors import CorruptData, DeadlineExceeded, InternalError, PeerLost, QuireError
from quire.outcome import ChunkRun, NodeOutcome
from quire.telemetry import binary_context, logger, names, tracer
from quire.transport import LayerReady, PayloadStream, Peer, Quiesced, Region, Transport
from quire.transport.messages import ALL_LAYERS, encode_message
from quire_storage.config import StorageConfig
from quire_storage.core.chunks import Chunk
from quire_storage.core.plan import DeliveryPlan, choose_order
from quire_storage.ports import Clock
from quire_storage.rates import Allowance, Rates

_PIECE_BYTES_MIN, _PIECE_BYTES_MAX = 256 << 10, 4 << 20
_QUIESCE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DeliverCall:
    """A delivery as it was asked for."""

    lease: bytes
    delivery_id: bytes
    descriptor: Descriptor
    runs: tuple[ChunkRun, ...]
    node_index: int
    compute_window_us: int
    layers_in_stream: bool


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every delivery of a node shares."""

    config: StorageConfig
    transport: Transport
    arena: npt.NDArray[np.uint8]
    region: Region
    rates: Rates
    checkers: Executor
    clock: Clock


class Delivery:
    """Runs once. `layers()` yields each finished layer if the call asks for it; `run()` returns the outcome."""

    def __init__(
        self, shop: Workshop, call: DeliverCall, chunks: list[Chunk], on_corrupt: Callable[[list[Chunk]], None]
    ) -> None:
        self._shop = shop
        self._call = call
        self._chunks = chunks
        self._on_corrupt = on_corrupt
        self._plan = DeliveryPlan(call.descriptor, call.runs, chunks)
        self._order = choose_order(call.descriptor.order, call.descriptor.payload_bytes, shop.config.theta_bytes)
        self._finished: asyncio.Queue[int | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._cancelled = False
        self._allowance: Allowance | None = None

    async def layers(self) -> AsyncIterator[int]:
        """Layers as they are complete at the client, until the delivery ends."""
        while (layer := await self._finished.get()) is not None:
            yield layer

    def cancel(self) -> None:
        """Stop soon; `run()` then ends with an outcome that says so."""
        self._cancelled = True
        if self._writer is not None:
            self._writer.cancel()

    async def run(self) -> NodeOutcome:
        """Deliver. Raises `TargetInvalid` before the first byte; afterwards every failure is in the outcome."""
        attributes: dict[str, str | int] = {
            "quire.chunks": len(self._chunks),
            "quire.bytes": self._plan.payload_bytes,
            "quire.order": self._order.name,
        }
        with tracer().start_as_current_span(names.STORAGE_DELIVER, attributes=attributes) as span:
            try:
                return await self._deliver(span)
            finally:
                self._finished.put_nowait(None)

    async def _deliver(self, span: trace.Span) -> NodeOutcome:
        peer = self._shop.transport.connect(self._call.descriptor.target.worker_address)
        remote = peer.remote(self._call.descriptor.target)
        started = self._shop.clock.monotonic_s()
        try:
            stream = peer.stream(self._shop.region, remote)
            failure = await self._attempt(stream, peer, span)
            await self._quiesce(stream, peer, complete=failure is None)
        finally:
            remote.close()
            if self._allowance is not None:
                duration_s = self._shop.clock.monotonic_s() - started
                await self._shop.rates.finish(self._allowance, stream.bytes_posted, duration_s)
        return self._outcome(stream, failure)

    async def _attempt(self, stream: PayloadStream, peer: Peer, span: trace.Span) -> QuireError | None:
        """Write everything; what went wrong, if anything did."""
        try:
            if self._cancelled:
                raise PeerLost("the client cancelled")
            async with asyncio.timeout(self._shop.config.transfer_timeout_s):
                self._writer = asyncio.create_task(self._write(stream, span))
                unwatch = peer.on_failure(self._peer_failed)
                try:
                    await self._writer
                finally:
                    unwatch()
        except QuireError as error:
            return error
        except TimeoutError:
            return DeadlineExceeded(f"not delivered within {self._shop.config.transfer_timeout_s} s")
        except asyncio.CancelledError:
            if peer.error is not None:
                return peer.error
            return PeerLost("the delivery was cancelled")
        except Exception as error:
            logger().error("a delivery failed unexpectedly", exc_info=error)
            return InternalError("the storage node's log has the details")
        return None

    def _peer_failed(self, _: PeerLost) -> None:
        if self._writer is not None:
            self._writer.cancel()

    async def _write(self, stream: PayloadStream, span: trace.Span) -> None:
        layerwise = self._order is DeliveryOrder.LAYERWISE
        check = self._check(0)
        try:
            if layerwise:
                self._allowance = await self._admit()
            for layer in range(self._plan.num_layers):
                await check
                if layer + 1 < self._plan.num_layers:
                    check = self._check(layer + 1)
                for piece in self._plan.pieces(layer, self._piece_bytes()):
                    await self._pace(piece.bytes)
                    await stream.gather(piece.offsets, piece.length, piece.remote_offset)
                if layerwise:
                    self._announce(stream, layer, span)
                    self._count_layer()
            if not layerwise:
                self._announce(stream, ALL_LAYERS, span)
            await stream.drain(self._shop.config.transfer_timeout_s)
        finally:
            check.cancel()
            with contextlib.suppress(asyncio.CancelledError, QuireError):
                await check

    async def _admit(self) -> Allowance:
        name = f"{self._shop.config.node_id}/{self._call.delivery_id.hex()}/{self._call.node_index}"
        with tracer().start_as_current_span(names.STORAGE_ADMIT):
            return await self._shop.rates.admit(
                name, self._plan.bytes_per_layer, self._call.compute_window_us, self._plan.num_layers
            )

    async def _pace(self, size: int) -> None:
        if self._allowance is None:
            return
        delay_s = self._allowance.pacer.delay_s(size, self._shop.clock.monotonic_s())
        if delay_s > 0:
            await self._shop.clock.sleep(delay_s)

    def _piece_bytes(self) -> int:
        """Bytes between two looks at the pacer: two milliseconds' worth, within limits."""
        if self._allowance is None:
            return _PIECE_BYTES_MAX
        return min(_PIECE_BYTES_MAX, max(_PIECE_BYTES_MIN, self._allowance.rate_bytes_per_s // 500))

    def _count_layer(self) -> None:
        if self._allowance is not None and self._allowance.layers_left > 1:
            self._allowance.layers_left -= 1

    def _announce(self, stream: PayloadStream, layer: int, span: trace.Span) -> None:
        def arrived() -> None:
            span.add_event(names.EVENT_LAYER, {"quire.layer": layer})
            if self._call.layers_in_stream:
                self._finished.put_nowait(layer)

        message = LayerReady(self._call.delivery_id, self._call.node_index, layer, binary_context())
        stream.announce(encode_message(message), arrived)

    def _check(self, layer: int) -> asyncio.Task[None]:
        """Verify the layer's slices in a thread, while the layer before it is on the wire."""

        async def check() -> None:
            loop = asyncio.get_running_loop()
            bad = await loop.run_in_executor(self._shop.checkers, self._plan.corrupt, self._shop.arena, layer)
            if bad:
                self._on_corrupt([self._chunks[index] for index in bad])
                raise CorruptData(f"{len(bad)} chunks do not match their checksums in layer {layer}")

        return asyncio.create_task(check())

    async def _quiesce(self, stream: PayloadStream, peer: Peer, *, complete: bool) -> None:
        """Let what is in flight end, by force if need be, and tell the client that its memory is its own."""
        if not complete:
            stream.stop()
            try:
                await stream.drain(_QUIESCE_TIMEOUT_S)
            except DeadlineExceeded:
                peer.abort()
                with contextlib.suppress(QuireError):
                    await stream.drain(_QUIESCE_TIMEOUT_S)
            except QuireError:
                pass  # in flight no more: that is all that matters here
        message = Quiesced(self._call.delivery_id, self._call.node_index, complete, binary_context())
        with contextlib.suppress(QuireError):
            peer.send(encode_message(message))

    def _outcome(self, stream: PayloadStream, failure: QuireError | None) -> NodeOutcome:
        allowance = self._allowance
        return NodeOutcome(
            self._shop.config.node_id,
            self._call.runs,
            bytes([failure is None]) * len(self._chunks),
            stream.bytes_posted,
            self._order,
            allowance.rate_bytes_per_s if allowance else 0,
            scheduled=allowance is not None and allowance.scheduled,
            quiesced=not isinstance(failure, PeerLost),
            error_code=failure.code() if failure else "",
            error_message=str(failure) if failure else "",
        )
