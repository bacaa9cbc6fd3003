"""Tracks the nodes that may still touch a buffer.

These are all storage nodes of a transfer, each until it has reported that it stopped, or has died.

A node has died when a connection to it broke that had been there. One that could not be connected to may be at work
all the same, by a connection of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from quire.client.memory.buffers import Loan
from quire.model.errors import DeadlineExceeded, PeerLost
from quire.model.outcome import NodeOutcome
from quire.model.ranges import ChunkRange
from quire.transport import Peer, Transport

MARGIN_S: Final = 120.0
"""How long after the permit's end something of a transfer may be in flight. A node of the release before may begin just
before that end, and then takes a minute by default.
"""


def unheard_s(transfer_s: float) -> float:
    """Return after how many seconds no node can still run a transfer for which no outcome was received.

    Args:
        transfer_s: For how long the client has asked to have the transfer permitted.
    """
    return transfer_s + MARGIN_S


def when_unheard(transfer_s: float, then: Callable[[], object]) -> None:
    """Call `then` once no silent node can be using the transfer's memory."""
    asyncio.get_running_loop().call_later(unheard_s(transfer_s), then)


class Quiescence:
    """The nodes of one transfer, numbered in order of their first range. Ends the loan of memory when all are quiet.

    `transfer_s`: for how long the transfer is permitted, seconds.
    """

    def __init__(
        self,
        ranges: Sequence[ChunkRange],
        addresses: Mapping[str, bytes],
        transport: Transport,
        loan: Loan,
        on_quiet: Callable[[], object],
        transfer_s: float,
    ) -> None:
        self._transfer_s = transfer_s
        self._addresses = addresses
        self.nodes = list(dict.fromkeys(run.node_id for run in ranges))
        self._transport = transport
        self._loan = loan
        self._on_quiet = on_quiet
        self._quiet = [False] * len(self.nodes)
        self._chunks = [0] * len(self.nodes)
        self._all_quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watches: list[Callable[[], None]] = []
        self._given_up = False

    def connect(self) -> list[Peer]:
        """Watch the nodes' connections. Raises `PeerLost` for a node that cannot be reached; the others are watched."""
        peers, failure = [], None
        for index, node_id in enumerate(self.nodes):
            try:
                peer = self._transport.connect(self._addresses[node_id])
            except PeerLost as error:
                failure = error
                continue
            self._watches.append(peer.on_failure(partial(self._lost, index, peer)))
            peers.append(peer)
        if failure is not None:
            raise failure
        return peers

    def _lost(self, index: int, peer: Peer, _: PeerLost) -> None:
        if peer.reached:
            self.node(index)

    def give_up(self) -> None:
        """Assume that silent nodes are quiet once every permit for the transfer has ended."""
        if not self._given_up:
            self._given_up = True
            when_unheard(self._transfer_s, self.all_quiet)

    def node(self, index: int, chunks: int = 0) -> None:
        """This node is quiet. `chunks`: how many it has delivered, or keeps, by its own report."""
        if index < len(self._quiet):
            self._quiet[index] = True
            self._chunks[index] = max(chunks, self._chunks[index])
        if all(self._quiet) and not self._all_quiet.done():
            self._all_quiet.set_result(None)
            self.unwatch()
            self._loan.end()
            self._on_quiet()

    def only(self, touching: Sequence[str]) -> None:
        """Wait for these nodes only, which send `Quiesced` or die. The other nodes have finished."""
        for index, node_id in enumerate(self.nodes):
            if node_id not in touching:
                self.node(index)
        self.give_up()

    def ended(self, outcome: NodeOutcome) -> None:
        """A node's last word through the gateway; where it is the gateway's, the node may never have been asked."""
        if not outcome.quiesced:
            self.give_up()
        elif outcome.node_id in self.nodes:
            self.node(self.nodes.index(outcome.node_id))

    def all_quiet(self) -> None:
        """No node was ever asked, or all of them are quiet by now."""
        for index in range(len(self.nodes)):
            self.node(index)

    async def is_whole(self, chunks: int, *ends: asyncio.Future[Any]) -> bool:
        """Return whether the nodes report that they have delivered, or keep, this many chunks in all.

        Waits until all nodes are quiet, or for any of `ends`. False where only the gateway's summary has the result.
        """
        if not self.nodes:
            return False
        await asyncio.wait([self._all_quiet, *ends], return_when=asyncio.FIRST_COMPLETED)
        return all(self._quiet) and sum(self._chunks) == chunks

    async def wait(self, timeout_s: float) -> None:
        """Return when all are quiet. Raises `DeadlineExceeded`: then the buffer must not be reused."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._all_quiet)
        except TimeoutError:
            silent = [node for node, quiet in zip(self.nodes, self._quiet, strict=True) if not quiet]
            raise DeadlineExceeded(f"no word from {', '.join(silent)} within {timeout_s} s") from None

    def unwatch(self) -> None:
        """Let go of the nodes' connections."""
        for release in self._watches:
            release()
        self._watches.clear()
