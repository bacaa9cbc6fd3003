"""Checks that the data plane reaches the cluster, before a node receives an address of memory here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from quire.client.delivery import seen
from quire.model.errors import PeerLost, QuireError
from quire.model.nodes import Node
from quire.transport import Peer, Transport

NO_WAY: Final = (
    "see UCX_NET_DEVICES and UCX_TLS; to containers on this machine, UCX_TCP_BRIDGE_ENABLE=y goes over their bridge"
)
_PATIENCE_S: Final = 6.0
_RETRY_S: Final = 0.2
_NEXT_S: Final = 0.3
_ANSWER_S: Final = 3.0
_LOOK_S: Final = 0.001


class RouteCheck:
    """Reaches one storage node of `members`, once.

    UCX ends a process that is connected to by a peer to which it has no way back, so this comes before a node receives
    an address of memory here. And a node that was reached is known to be dead when it dies: of one that never was,
    nothing is known but that it may be writing.
    """

    def __init__(self, transport: Transport, members: Callable[[], Awaitable[Iterable[Node]]]) -> None:
        self._transport = transport
        self._members = members
        self._reached = False
        self._trying: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Return when a storage node was reached, or when the cluster has none. Concurrent callers share the try.

        A node that died a moment ago is a member until its time is over: the others are tried, and the members asked
        for again. Raises `PeerLost` when none was reached for longer than a dead node stays a member.
        """
        if self._reached:
            return
        if self._trying is None or self._trying.done():
            self._trying = asyncio.create_task(self._try())
            self._trying.add_done_callback(seen)
        trying = self._trying
        await asyncio.wait([trying])
        if trying.cancelled():
            raise PeerLost("the client was closed")
        trying.result()

    def close(self) -> None:
        """Stop trying: those who wait get `PeerLost`."""
        if self._trying is not None:
            self._trying.cancel()

    async def _try(self) -> None:
        loop = asyncio.get_running_loop()
        deadline, failure = loop.time() + _PATIENCE_S, None
        while True:
            nodes = [node for node in await self._members() if node.worker_address]
            if not nodes and failure is None:
                return
            try:
                if nodes:
                    await self._connect(nodes, deadline)
                    return
            except PeerLost as error:
                failure = error
            if failure is not None and loop.time() > deadline:
                raise failure
            await asyncio.sleep(_RETRY_S)

    async def _connect(self, nodes: list[Node], deadline: float) -> None:
        """Try members in order; start with the next one also if one is slow. Raises `PeerLost`."""
        loop, peers = asyncio.get_running_loop(), list[Peer]()
        with self._transport.expecting():
            for node in nodes:
                peer: Peer | None = None
                try:
                    peer = self._transport.connect(node.worker_address)
                    peers.append(peer)
                except QuireError as error:
                    failure: QuireError | None = error
                is_last = node is nodes[-1] or loop.time() > deadline
                if await _any_reached(peers, _ANSWER_S if is_last else _NEXT_S):
                    self._reached = True
                    return
                failure = peer.error if peer is not None else failure
                if is_last:
                    break
        raise PeerLost(f"no way to {node.node_id} by {self._transport.name} ({failure or 'no answer'}); {NO_WAY}")


async def _any_reached(peers: list[Peer], wait_s: float) -> bool:
    """Within that time; False at once if they are all lost."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while not any(peer.reached for peer in peers):
        if loop.time() >= deadline or all(peer.error is not None for peer in peers):
            return False
        await asyncio.sleep(_LOOK_S)
    return True
