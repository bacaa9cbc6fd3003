"""Whether the data plane has a way to the cluster, before a node is told of memory here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quire.model.errors import PeerLost
from quire.model.nodes import Node
from quire.transport import Transport

_NO_WAY: Final = (
    "see UCX_NET_DEVICES and UCX_TLS; to containers on this machine, UCX_TCP_BRIDGE_ENABLE=y goes over their bridge"
)


def check_way(transport: Transport, nodes: Iterable[Node]) -> bool:
    """Connect to the first storage node of `nodes`; whether there is one.

    UCX ends a process that is connected to by a peer to which it has no way back. Raises `PeerLost`.
    """
    for node in nodes:
        if node.worker_address:
            try:
                transport.connect(node.worker_address)
            except PeerLost as error:
                raise PeerLost(f"no way to {node.node_id} by {transport.name} ({error}); {_NO_WAY}") from None
            return True
    return False
