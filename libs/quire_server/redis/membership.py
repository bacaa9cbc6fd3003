"""Who is in the cluster: one hash in Redis, another one says until when each counts as alive."""

from __future__ import annotations

from typing import cast

import redis.asyncio as redis
from google.protobuf.message import DecodeError

from quire.model.errors import InvalidRequest, NameTaken
from quire.model.nodes import Node
from quire.telemetry import logger
from quire.wire.convert import node_from, node_to
from quire.wire.v1 import common_pb2
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
        async with metadata_errors():
            arguments: list[str | bytes | int] = [
                node.node_id,
                node.incarnation,
                node_to(node).SerializeToString(),
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
        # In one transaction: an entry with the expiry that it came with.
        async with metadata_errors(), self._client.pipeline(transaction=True) as both:
            both.hgetall(_KEY)
            both.hgetall(_EXPIRIES_KEY)
            entries, expiries = cast(list[dict[bytes, bytes]], await both.execute())
        found = []
        for name, raw in entries.items():
            if int(expiries.get(name, b"0")) > now_ms:
                try:
                    found.append(node_from(common_pb2.Node.FromString(raw)))
                except (DecodeError, InvalidRequest):
                    logger().warning("a member of another release is not understood", node=name.decode())
        return sorted(found, key=lambda node: node.node_id)
