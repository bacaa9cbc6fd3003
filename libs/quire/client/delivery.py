"""A delivery as its receiver sees it: layers that arrive, an end, and the moment when the memory is its own again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from opentelemetry import trace

from quire.client.memory.buffers import Buffer, Loan
from quire.client.memory.quiescence import Quiescence, when_unheard
from quire.model.errors import DeadlineExceeded, InternalError, PeerLost, QuireError, by_code
from quire.model.outcome import FetchSummary, NodeOutcome
from quire.model.ranges import ChunkRange
from quire.telemetry import names, tracer
from quire.transport import LayerReady, Message, Peer, Quiesced, Stalled, Transport
from quire.transport.messages import ALL_LAYERS, encode_message
from quire.wire.channels import Stop
from quire.wire.convert import outcome_from
from quire.wire.v1 import gateway_pb2 as pb

Result = TypeVar("Result")


class Delivery:
    """Made by `AsyncClient.fetch` and `retrieve`. A layer is ready when every node has written its stripe of it.

    `arrived_ns[l]`: monotonic time of arrival, 0 before. Once the last layer was awaited, each storage node receives
    the time for which its stripes were waited for: schedulers learn from that.
    """

    def __init__(
        self,
        *,
        transfer_id: bytes,
        num_layers: int,
        buffer: Buffer,
        loan: Loan,
        transport: Transport,
        on_quiesced: Callable[[], object],
        transfer_s: float,
    ) -> None:
        self._transfer_s = transfer_s
        self.transfer_id = transfer_id
        self.num_layers = num_layers
        self.buffer = buffer
        self.arrived_ns = [0] * num_layers
        self._transport = transport
        self._loan = loan
        self._on_quiesced = on_quiesced
        self._quiescence: Quiescence | None = None
        self._early: list[Message] = []
        self._abandoned = self._empty = self._stop_answered = False
        self._missing: list[int] = []
        self._stripe_ns: list[list[int]] = []
        self._wanted_ns = [0] * num_layers
        self._peers: list[Peer] = []
        self._layerwise = True
        loop = asyncio.get_running_loop()
        self._ready: list[asyncio.Future[None]] = [loop.create_future() for _ in range(num_layers)]
        self._outcomes: list[NodeOutcome] = []
        self._stop: Stop | None = None
        self._cancelled = loop.create_future()
        self._returned: asyncio.Future[None] = loop.create_future()
        self._task: asyncio.Task[FetchSummary] | None = None
        self._asked = False
        self._span: trace.Span = trace.INVALID_SPAN

    # ---- what callers use

    async def layer(self, layer: int) -> None:
        """Return when `layer` is complete in the buffer. Raises why it will never be."""
        if not self._wanted_ns[layer]:
            self._wanted_ns[layer] = time.monotonic_ns()
        await self.arrival(layer)
        if layer == self.num_layers - 1:
            self._report_stalls()

    async def arrival(self, layer: int) -> None:
        """Return when `layer` is complete, without counting the wait as the engine's: `wanted` reports that."""
        await asyncio.shield(self._ready[layer])

    def wanted(self, at_ns: Sequence[int]) -> None:
        """Report an engine's waits for layers to the storage nodes, once all have arrived: bandwidth goes by them.

        Args:
            at_ns: (layers,), when each was waited for, by `time.monotonic_ns`.
        """
        self._wanted_ns = list(at_ns)
        self._report_stalls()

    @property
    def stall_s(self) -> float:
        """Total time for which layers were waited for."""
        return _waited_ns(self._wanted_ns, self.arrived_ns) / 1e9

    async def summary(self) -> FetchSummary:
        """Wait for the end, good or bad. Raises if the gateway could not be asked, and `PeerLost` after `cancel`."""
        assert self._task is not None, "start() comes first"
        return await end_of(self._task, "delivery", self._cancelled)

    async def is_whole(self, chunks: int) -> bool:
        """Return whether the nodes report that they have delivered all of `chunks` chunks, the number requested.

        Waits for the nodes' reports on the data plane, which arrive ahead of the gateway's summary. The gateway counts
        the delivery among the tenant's requests for a few ms more. Where False, `summary` has the missing chunks and
        the reason.
        """
        if self._quiescence is None or self._task is None:
            return False
        return await self._quiescence.is_whole(chunks, self._task, self._cancelled)

    async def quiesced(self, timeout_s: float) -> None:
        """Return when every storage node has stopped using the buffer.

        Raises `DeadlineExceeded`: then do not reuse it.
        """
        if self._quiescence is None and self._task is not None:  # which nodes there are is not known yet
            await asyncio.wait([self._task], timeout=timeout_s)
        if self._quiescence is not None:
            await self._quiescence.wait(timeout_s)
        elif self._loan.is_open:  # no answer came: nodes that it named may write until their permits end
            await asyncio.wait([self._returned], timeout=timeout_s)
            if not self._returned.done():
                raise DeadlineExceeded(f"no word from the gateway within {timeout_s} s")

    @property
    def is_lent(self) -> bool:
        """Whether a storage node may still touch the buffer."""
        return self._loan.is_open

    async def cancel(self, timeout_s: float = 10.0) -> None:
        """Give up. The buffer may be reused when this returns, and not before: a node might still write to it.

        Raises `DeadlineExceeded` if a node stays silent; the buffer then stays lent.
        """
        self.abandon()
        await self.quiesced(timeout_s)

    def abandon(self) -> None:
        """Stop the delivery; the buffer stays lent until every node has said that it is quiet."""
        if self._abandoned:
            return
        self._abandoned = True
        self._cancelled.set_result(None)
        if self._stop is not None:
            self._stop.now()  # the answer names the nodes that may still write
        if self._quiescence is not None:
            if not self._asked:
                self._quiescence.all_quiet()
            else:  # the answer may be lost
                self._quiescence.give_up()
        self._fail(PeerLost("the delivery was cancelled"))

    # ---- what the client uses

    def place(self, ranges: Sequence[ChunkRange], addresses: Mapping[str, bytes]) -> None:
        """Note which nodes deliver, and watch their connections. Raises `PeerLost` for one that cannot be reached.

        Nodes of a retrieval may have begun: the messages that have arrived from them count.
        """
        self._quiescence = Quiescence(
            ranges, addresses, self._transport, self._loan, self._on_quiesced, self._transfer_s
        )
        nodes = len(self._quiescence.nodes)
        self._missing = [nodes] * self.num_layers
        self._stripe_ns = [[0] * self.num_layers for _ in range(nodes)]
        early, self._early = self._early, []
        for message in early:
            self.on_message(message)
        self._peers = self._quiescence.connect()

    def nothing_comes(self) -> None:
        """End a retrieval of which nothing is stored: no node takes part."""
        self._empty = True
        self._end_loan()

    def start(self, responses: AsyncGenerator[Any, None], stop: Stop) -> None:
        """Follow the gateway's responses. `stop` ends them."""
        self._stop = stop
        self._task = asyncio.create_task(self._follow(responses))
        self._task.add_done_callback(seen)

    def unwatch(self) -> None:
        """Let go of the nodes' connections."""
        if self._quiescence is not None:
            self._quiescence.unwatch()

    def on_message(self, message: Message) -> None:
        """Take a message of a storage node from the data plane."""
        if self._quiescence is None:
            self._early.append(message)
            return
        match message:
            case LayerReady(node_index=node, layer=layer) if layer == ALL_LAYERS:
                self._layerwise = False
                for number in range(self.num_layers):
                    self._stripe(number, node)
            case LayerReady(node_index=node, layer=layer) if layer < self.num_layers:
                self._stripe(layer, node)
            case Quiesced(node_index=index, chunks=chunks):
                self._quiescence.node(index, chunks)

    # ----

    async def _follow(self, responses: AsyncGenerator[Any, None]) -> FetchSummary:
        self._asked = True
        try:
            with tracer().start_as_current_span(names.CLIENT_FETCH) as self._span, self._transport.expecting():
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        if isinstance(response, pb.SessionStopped):
                            self._stopped(response.nodes)
                            raise PeerLost("the delivery was cancelled")
                        kind = response.WhichOneof("event")
                        if kind == "node":
                            self._node_ended(outcome_from(response.node))
                        elif kind == "summary":
                            return self._ended(response.summary)
            if self._empty:
                return FetchSummary(0, 0, ())
            raise InternalError("the gateway's answers ended without a summary")
        except QuireError as error:
            self._fail(error)
            if self._stop_answered:
                raise
            answered = not self._outcomes and error.answered and not isinstance(error, InternalError)
            turned_down = answered or error.unsent
            if self._quiescence is None:
                self._end_unplaced(turned_down)
            elif turned_down:
                self._quiescence.all_quiet()  # by the gateway, before any node heard of it
            else:
                self._quiescence.give_up()
            raise
        except asyncio.CancelledError:
            if self._quiescence is None:
                self._end_unplaced(turned_down=False)
            raise

    def _stopped(self, touching: Sequence[str]) -> None:
        """The gateway has stopped the transfer; these nodes have not confirmed yet."""
        self._stop_answered = True
        if self._quiescence is None:
            self._end_loan()
        else:
            self._quiescence.only(touching)

    def _end_unplaced(self, turned_down: bool) -> None:
        """End the loan: at once if turned down, else when no node can be writing."""
        if turned_down:
            self._end_loan()
        else:
            when_unheard(self._transfer_s, self._end_loan)

    def _end_loan(self) -> None:
        self._loan.end()
        if not self._returned.done():
            self._returned.set_result(None)
        self._on_quiesced()

    def _ended(self, summary: pb.FetchSummary) -> FetchSummary:
        if not any(outcome.error_code for outcome in self._outcomes):
            # Every node has flushed everything: a message that is still on its way brings no news.
            for layer in range(self.num_layers):
                self._missing[layer] = min(1, self._missing[layer])
                self._stripe(layer, None)
        return FetchSummary(summary.usable_chunks, summary.bytes, tuple(self._outcomes), summary.delivered)

    def _node_ended(self, outcome: NodeOutcome) -> None:
        self._outcomes.append(outcome)
        assert self._quiescence is not None, "the nodes are known by then"
        self._quiescence.ended(outcome)
        if outcome.error_code:
            self._fail(by_code(outcome.error_code)(outcome.error_message))

    def _report_stalls(self) -> None:
        """Report to every node for how long its stripes alone were waited for."""
        if not self._layerwise:
            return
        for node, peer in enumerate(self._peers):
            # What the node has said through the gateway may be quicker than its last message.
            now_ns = time.monotonic_ns()
            stall_ns = _waited_ns(self._wanted_ns, [arrived or now_ns for arrived in self._stripe_ns[node]])
            with contextlib.suppress(QuireError):
                peer.send(encode_message(Stalled(self.transfer_id, node, stall_ns // 1000)))

    def _stripe(self, layer: int, node: int | None) -> None:
        if node is not None and node < len(self._stripe_ns):
            self._stripe_ns[node][layer] = time.monotonic_ns()
        if self._missing[layer] > 0:
            self._missing[layer] -= 1
            if self._missing[layer] == 0 and not self._ready[layer].done():
                self.arrived_ns[layer] = time.monotonic_ns()
                self._span.add_event(names.EVENT_LAYER, {"quire.layer": layer})
                self._ready[layer].set_result(None)

    def _fail(self, error: QuireError) -> None:
        for future in self._ready:
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: it need not be awaited


def _waited_ns(wanted_ns: Sequence[int], arrived_ns: Sequence[int]) -> int:
    """Return for how long layers were waited for. Waits that overlap count once."""
    waited, until_ns = 0, 0
    for wanted_at_ns, arrived in zip(wanted_ns, arrived_ns, strict=True):
        if wanted_at_ns and arrived:
            waited += max(0, arrived - max(wanted_at_ns, until_ns))
            until_ns = max(until_ns, arrived)
    return waited


async def end_of(task: asyncio.Task[Result], kind: str, cancelled: asyncio.Future[None]) -> Result:
    """Wait for a transfer's task; one that stops waiting does not stop it. Raises `PeerLost` if it was cancelled."""
    either: list[asyncio.Future[Any]] = [task, cancelled]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not task.done() or task.cancelled():
        raise PeerLost(f"the {kind} was cancelled")
    return task.result()


def seen(task: asyncio.Task[Any]) -> None:
    """Retrieve the task's failure: those who await a layer or the placement have received it."""
    if not task.cancelled():
        task.exception()
