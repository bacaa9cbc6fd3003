"""Who is in the cluster: one hash in Redis, each member with the time until which it counts as alive."""

from __future__ import annotations

from typing import cast

import cbor2
import redis.asyncio as redis

from quire.model.errors import NameTaken
from quire.model.nodes import Location, Node, Role
from quire_server.redis.connection import metadata_errors

_KEY = "quire:nodes"
_EXPIRIES_KEY = "quire:nodes-until"

# KEYS: members. ARGV: 1 node, 2 incarnation. Removes the member unless a newer incarnation has taken its name.
_LEAVE = """
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.find(entry, ARGV[2], 1, true) then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
"""


# KEYS: members, expiries. ARGV: 1 node, 2 incarnation, 3 entry, 4 expiry in ms, 5 now in ms. Returns 0 if another
# incarnation that is alive has the name.
_RENEW = """
local entry, expiry = redis.call('HGET', KEYS[1], ARGV[1]), redis.call('HGET', KEYS[2], ARGV[1])
if entry and expiry and tonumber(expiry) > tonumber(ARGV[5]) and not string.find(entry, ARGV[2], 1, true) then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[4])
return 1
"""


class Membership:
    """Heartbeats in, live members out."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._leave = client.register_script(_LEAVE)
        self._renew = client.register_script(_RENEW)

    async def renew(self, node: Node, now_ms: int, expires_ms: int) -> None:
        """Count `node` as alive until `expires_ms` (Unix epoch). Raises `NameTaken`: another process has its name."""
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
            arguments: list[str | bytes | int] = [
                node.node_id,
                node.incarnation,
                cbor2.dumps(entry),
                expires_ms,
                now_ms,
            ]
            taken = not await self._renew(keys=[_KEY, _EXPIRIES_KEY], args=arguments)
        if taken:
            raise NameTaken(f"a node named {node.node_id!r} is alive; give this one another name", field="node_id")

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
