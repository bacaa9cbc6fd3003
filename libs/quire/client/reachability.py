"""Whether the data plane reaches the cluster, before a node is told of memory here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from quire.model.errors import PeerLost
from quire.model.nodes import Node
from quire.transport import Transport

NO_WAY: Final = (
    "see UCX_NET_DEVICES and UCX_TLS; to containers on this machine, UCX_TCP_BRIDGE_ENABLE=y goes over their bridge"
)
_PATIENCE_S: Final = 6.0
_RETRY_S: Final = 0.2


class Reachability:
    """Connects to one storage node of `members`, once.

    UCX ends a process that is connected to by a peer to which it has no way back, so this comes before a node hears of
    memory here.
    """

    def __init__(self, transport: Transport, members: Callable[[], Awaitable[Iterable[Node]]]) -> None:
        self._transport = transport
        self._members = members
        self._reached = False

    async def check(self) -> None:
        """Return when a storage node was reached, or when the cluster has none.

        A node that died a moment ago is a member until its time is over: the others are tried, and the members asked
        for again. Raises `PeerLost` when none was reached for longer than a dead node stays a member.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE_S
        while not self._reached:
            nodes = [node for node in await self._members() if node.worker_address]
            if not nodes:
                return
            try:
                self._connect(nodes)
            except PeerLost:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    def _connect(self, nodes: list[Node]) -> None:
        for node in nodes:
            try:
                self._transport.connect(node.worker_address)
            except PeerLost as error:
                failure = PeerLost(f"no way to {node.node_id} by {self._transport.name} ({error}); {NO_WAY}")
            else:
                self._reached = True
                return
        raise failure
