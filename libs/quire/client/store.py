"""A store as the producer sees it: announce each layer, then wait for the acknowledgement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, Final

from quire.client.delivery import end_of, seen
from quire.client.memory.buffers import Buffer, Loan
from quire.client.memory.quiescence import Quiescence, when_unheard
from quire.client.memory.route_check import NO_WAY
from quire.model.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PartlyStored,
    PeerLost,
    QuireError,
    by_code,
)
from quire.model.outcome import NodeOutcome, StoreSummary
from quire.telemetry import binary_context, names, tracer
from quire.transport import LayerProduced, Message, Peer, Quiesced, Transport
from quire.transport.messages import encode_message
from quire.wire.channels import Stop
from quire.wire.convert import addresses_from, outcome_from, ranges_from
from quire.wire.v1 import gateway_pb2 as pb

_QUIET_TIMEOUT_S: Final = 10.0
_TOLD_S: Final = 2.0
"""For how long a gateway may take to tell what became of a node that cannot be told of a layer."""


class StoreSession:
    """Made by `AsyncClient.store`. Call `layer_ready` for each layer in order, then await `commit`.

    `async with await client.store(...)` commits at the end of the block, and aborts where an exception ends it.

    `complete`: the layers were there from the start, and nodes read at once.
    """

    def __init__(
        self,
        *,
        transfer_id: bytes,
        buffer: Buffer,
        loan: Loan,
        transport: Transport,
        on_quiesced: Callable[[], object],
        complete: bool,
        num_layers: int,
        transfer_s: float,
    ) -> None:
        self._num_layers = num_layers
        self._ready: set[int] = set()
        self._transfer_s = transfer_s
        self._transfer_id = transfer_id
        self._buffer = buffer
        self._loan = loan
        self._transport = transport
        self._on_quiesced = on_quiesced
        self._quiescence: Quiescence | None = None
        self._peers: dict[str, Peer] = {}
        self._watches: list[Callable[[], None]] = []
        self._lost: PeerLost | None = None
        self._placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcomes: list[NodeOutcome] = []
        self._task: asyncio.Task[StoreSummary] | None = None
        self._stop: Stop | None = None
        self._cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._complete = self._announced = complete
        self._placed_chunks = self.known_chunks = 0

    async def start(self, responses: AsyncGenerator[Any, None], stop: Stop) -> None:
        """Return when the placement is known. Raises the gateway's error. `stop` ends its responses."""
        self._stop = stop
        self._task = asyncio.create_task(self._follow(responses))
        self._task.add_done_callback(seen)
        try:
            await self._placed
        except asyncio.CancelledError:
            self.abandon()
            raise

    async def __aenter__(self) -> StoreSession:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            with contextlib.suppress(QuireError):  # the buffer then stays lent
                await self.cancel()
            return
        unannounced = [] if self._complete else sorted(set(range(self._num_layers)) - self._ready)
        try:
            if unannounced:
                about = f"layers {unannounced[:8]} of {self._num_layers}"
                raise InvalidRequest(f"{about} were not announced", field="layer")
            await self.commit()
            await self.quiesced(_QUIET_TIMEOUT_S)
        except BaseException:
            with contextlib.suppress(QuireError):
                await self.cancel()
            raise

    def layer_ready(self, layer: int) -> None:
        """The layer of all chunks is in the buffer: storage nodes may read it now. Nothing after the store's end.

        Raises `InvalidRequest` for a layer that the layout does not have.
        """
        if not 0 <= layer < self._num_layers:
            raise InvalidRequest(f"{layer}; there are {self._num_layers} layers", field="layer")
        self._ready.add(layer)
        if self._task is None or self._task.done() or self._cancelled.done() or self._complete:
            return
        self._announced = True
        message = encode_message(LayerProduced(self._transfer_id, layer, binary_context()))
        for node_id, peer in self._peers.items():
            if peer.error is None:
                peer.send(message)
            else:
                self._cannot_tell(node_id, peer, peer.error)

    async def commit(self) -> StoreSummary:
        """Wait for the acknowledgement: every chunk is stored at the requested level.

        Raises the first node's failure, or `PartlyStored`; acknowledged chunks stay stored. Raises `PeerLost` if the
        store was cancelled, or a node cannot receive the announcement of layers.
        """
        assert self._task is not None, "start() comes first"
        summary = await end_of(self._task, "store", self._cancelled)
        for outcome in summary.outcomes:
            if outcome.error_code:
                raise by_code(outcome.error_code)(outcome.error_message)
        marks = b"".join(outcome.delivered for outcome in summary.outcomes)
        if not all(marks):
            error = PartlyStored(f"{sum(map(bool, marks))} of {len(marks)} chunks were acknowledged")
            error.stored_chunks = summary.stored_chunks
            raise error
        return summary

    async def acknowledged(self) -> None:
        """Wait for the acknowledgement as `commit` does, without its summary. Raises as `commit`.

        The nodes' own reports arrive on the data plane, ahead of the gateway's summary. The gateway counts the store
        among the tenant's requests for a few ms more.
        """
        assert self._task is not None, "start() comes first"
        nodes = self._quiescence
        is_whole = nodes is not None and await nodes.is_whole(self._placed_chunks, self._task, self._cancelled)
        if not is_whole or self._cancelled.done():
            await self.commit()

    @property
    def is_lent(self) -> bool:
        """Whether a storage node may still touch the buffer."""
        return self._loan.is_open

    async def cancel(self, timeout_s: float = 10.0) -> None:
        """Give up.

        The buffer may be reused when this returns, and not before: a node might still store bytes that it reads there.

        Raises `DeadlineExceeded` if a node stays silent; the buffer then stays lent.
        """
        self.abandon()
        await self.quiesced(timeout_s)

    def abandon(self) -> None:
        """Stop the store. The buffer stays lent until every storage node has reported that it has stopped reading."""
        if not self._cancelled.done():
            self._cancelled.set_result(None)
            if self._stop is not None:
                self._stop.now()  # the answer names the nodes that may still read
            if self._quiescence is not None and self._quiescence.nodes:
                if self._announced:  # the answer may be lost
                    self._quiescence.give_up()
                else:
                    self._quiescence.all_quiet()

    async def quiesced(self, timeout_s: float) -> None:
        """Return when every storage node has stopped reading the buffer."""
        if self._quiescence is None and self._task is not None:  # where the chunks were placed is not known yet
            await asyncio.wait([self._task], timeout=timeout_s)
        if self._quiescence is not None and self._quiescence.nodes:
            await self._quiescence.wait(timeout_s)
        elif self._loan.is_open:
            raise DeadlineExceeded("where the chunks were placed is not known, and some node may read them")

    @property
    def buffer(self) -> Buffer:
        """Buffer that the chunks are stored from."""
        return self._buffer

    def on_message(self, message: Message) -> None:
        """Take a message of a storage node from the data plane."""
        if isinstance(message, Quiesced) and self._quiescence is not None:
            self._quiescence.node(message.node_index, message.chunks)

    async def _follow(self, responses: AsyncGenerator[Any, None]) -> StoreSummary:
        complete = turned_down = False
        try:
            with tracer().start_as_current_span(names.CLIENT_STORE):
                summary = await self._follow_answers(responses)
            complete = True
            return summary
        except QuireError as error:
            turned_down = error.unsent or (error.answered and not isinstance(error, InternalError))
            if not self._placed.done():
                self._placed.set_exception(error)
            raise
        except asyncio.CancelledError:
            if self._lost is not None:
                raise self._lost from None
            raise
        finally:
            for release in self._watches:
                release()
            self._end_loan(complete, turned_down)
            if not self._placed.done():
                self._placed.cancel()

    async def _follow_answers(self, responses: AsyncGenerator[Any, None]) -> StoreSummary:
        async with contextlib.aclosing(responses):
            async for response in responses:
                if isinstance(response, pb.SessionStopped):
                    self._stopped(response.nodes)
                    raise PeerLost("the store was cancelled")
                kind = response.WhichOneof("event")
                if kind == "placement":
                    self.known_chunks = response.placement.known_chunks
                    self._connect(response.placement)
                    if not self._placed.done():
                        self._placed.set_result(None)
                elif kind == "node":
                    self._outcomes.append(outcome_from(response.node))
                    assert self._quiescence is not None, "the placement comes first"
                    self._quiescence.ended(self._outcomes[-1])
                else:
                    summary = response.summary
                    return StoreSummary(
                        summary.stored_chunks, summary.known_chunks, summary.bytes, tuple(self._outcomes)
                    )
        raise InternalError("the gateway's answers ended without a summary")

    def _stopped(self, touching: Sequence[str]) -> None:
        """The gateway has stopped the transfer; these nodes have not confirmed yet."""
        if self._quiescence is None or not self._quiescence.nodes:
            self._return_buffer()
        else:
            self._quiescence.only(touching)

    def _end_loan(self, complete: bool, turned_down: bool) -> None:
        """No node reads the buffer before it has received the announcement of a layer, or of all of them."""
        if not self._loan.is_open:
            return
        if self._quiescence is None and self._announced and not turned_down:
            when_unheard(self._transfer_s, self._return_buffer)
        elif self._quiescence is None or not self._quiescence.nodes:
            self._return_buffer()
        elif not self._announced:
            self._quiescence.all_quiet()
        elif not complete:
            self._quiescence.give_up()

    def _return_buffer(self) -> None:
        self._loan.end()
        self._on_quiesced()

    def _connect(self, placement: Any) -> None:
        addresses = {node.node_id: node.worker_address for node in addresses_from(placement.nodes)}
        ranges = ranges_from(placement.ranges)
        self._placed_chunks = sum(run.count for run in ranges)
        self._quiescence = Quiescence(
            ranges, addresses, self._transport, self._loan, self._on_quiesced, self._transfer_s
        )
        self._peers = dict(zip(self._quiescence.nodes, self._quiescence.connect(), strict=True))
        if not self._complete:
            for node_id, peer in self._peers.items():
                self._watches.append(peer.on_failure(partial(self._connection_failed, node_id, peer)))

    def _connection_failed(self, node_id: str, peer: Peer, error: PeerLost) -> None:
        if not peer.reached:  # what was sent on it is lost
            self._cannot_tell(node_id, peer, error)

    def _cannot_tell(self, node_id: str, peer: Peer, error: PeerLost) -> None:
        """End the store: the node may live and wait for a layer whose announcement it will never receive."""
        why = f"broke ({error.message})" if peer.reached else f"could not be made ({error.message}); {NO_WAY}"
        failure = PeerLost(f"the connection to {node_id} {why}")
        asyncio.get_running_loop().call_later(_TOLD_S, self._end_if_untold, node_id, failure)

    def _end_if_untold(self, node_id: str, failure: PeerLost) -> None:
        untold = all(outcome.node_id != node_id for outcome in self._outcomes)
        if untold and self._task is not None and not self._task.done():
            self._lost = failure
            self._task.cancel()
