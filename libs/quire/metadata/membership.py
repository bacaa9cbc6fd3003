"""Who is in the cluster: one hash in Redis, each member with the time until which it counts as alive."""

from __future__ import annotations

from typing import cast

import cbor2
import redis.asyncio as redis

from quire.metadata.connection import metadata_errors
from quire.nodes import Location, Node, Role

_KEY = "quire:nodes"

# KEYS: members. ARGV: 1 node, 2 incarnation. Removes the member unless a newer incarnation has taken its name.
_LEAVE = """
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.find(entry, ARGV[2], 1, true) then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
"""


class Membership:
    """Heartbeats in, live members out."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._leave = client.register_script(_LEAVE)

    async def renew(self, node: Node, expires_ms: int) -> None:
        """Count `node` as alive until `expires_ms` (Unix epoch)."""
        entry = {
            "expires_ms": expires_ms,
            "role": node.role.value,
            "grpc": node.grpc_address,
            "worker": node.worker_address,
            "incarnation": node.incarnation,
            "protocol": node.protocol_version,
            "capacity": node.capacity_bytes,
            "used": node.used_bytes,
            "figures": node.figures,
            "host": node.location.host,
            "zone": node.location.zone,
            "details": node.details,
        }
        async with metadata_errors():
            await self._client.hset(_KEY, node.node_id, cbor2.dumps(entry))

    async def leave(self, node_id: str, incarnation: str) -> bool:
        """Forget a node that is stopping, unless it has restarted since; whether it was forgotten."""
        async with metadata_errors():
            return bool(await self._leave(keys=[_KEY], args=[node_id, incarnation]))

    async def live(self, now_ms: int) -> list[Node]:
        """Members whose time is not over, by name."""
        async with metadata_errors():
            entries = await self._client.hgetall(_KEY)
        nodes = []
        for name, raw in cast(dict[bytes, bytes], entries).items():
            entry = cbor2.loads(raw)
            if entry["expires_ms"] > now_ms:
                nodes.append(
                    Node(
                        name.decode(),
                        Role(entry["role"]),
                        entry["grpc"],
                        entry["worker"],
                        entry["incarnation"],
                        entry["protocol"],
                        entry["capacity"],
                        entry["used"],
                        entry["figures"],
                        Location(entry.get("host", ""), entry.get("zone", "")),
                        entry.get("details", {}),
                    )
                )
        return sorted(nodes, key=lambda node: node.node_id)
