"""Who is in the cluster: one hash in Redis, another one says until when each counts as alive."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import redis.asyncio as redis
from google.protobuf.message import DecodeError

from quire.model.errors import InvalidRequest, NameTaken
from quire.model.nodes import Node
from quire.telemetry import logger
from quire.wire.convert import node_from, node_to
from quire.wire.v1 import common_pb2
from quire_server.redis.connection import metadata_errors

_KEY = "quire:{nodes}"
_EXPIRIES_KEY = "quire:{nodes}:until"

_CHANNEL = "quire:nodes-changed"
_LISTEN_S = 4.0

# KEYS: members. ARGV: 1 node, 2 incarnation, 3 channel. Removes the member unless a newer incarnation has its name.
_LEAVE = """
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.find(entry, ARGV[2], 1, true) then
  redis.call('PUBLISH', ARGV[3], ARGV[1])
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
"""

# KEYS: members, expiries. ARGV: 1 node, 2 incarnation, 3 entry, 4 time to live in ms, 5 channel. By the clock of Redis:
# those who write and those who read it have clocks of their own. Returns 0 if another incarnation that is alive has the
# name. One that joins, or is alive again, is made known on the channel.
_RENEW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entry, expiry = redis.call('HGET', KEYS[1], ARGV[1]), redis.call('HGET', KEYS[2], ARGV[1])
local alive = entry and expiry and tonumber(expiry) > now
local same = entry and string.find(entry, ARGV[2], 1, true)
if alive and not same then return 0 end
if not (alive and same) then redis.call('PUBLISH', ARGV[5], ARGV[1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], string.format('%.0f', now + ARGV[4]))
return 1
"""


# KEYS: members, expiries. An entry with the expiry that it came with, and what time it is.
_LIVE = "return {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('TIME')}"


class Membership:
    """Heartbeats in, live members out."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._leave = client.register_script(_LEAVE)
        self._renew = client.register_script(_RENEW)
        self._live = client.register_script(_LIVE)

    async def renew(self, node: Node, ttl_ms: int) -> None:
        """Count `node` as alive for so long. Raises `NameTaken`: another process has its name."""
        async with metadata_errors():
            arguments: list[str | bytes | int] = [
                node.node_id,
                node.incarnation,
                node_to(node).SerializeToString(),
                ttl_ms,
                _CHANNEL,
            ]
            taken = not await self._renew(keys=[_KEY, _EXPIRIES_KEY], args=arguments)
        if taken:
            raise NameTaken(f"a node named {node.node_id!r} is alive; give this one another name", field="node_id")

    async def leave(self, node_id: str, incarnation: str) -> bool:
        """Forget a node that is stopping, unless it has restarted since; whether it was forgotten."""
        async with metadata_errors():
            return bool(await self._leave(keys=[_KEY], args=[node_id, incarnation, _CHANNEL]))

    async def changes(self) -> AsyncIterator[None]:
        """One at the beginning, and one whenever a member joins, comes back or leaves. One that dies is none."""
        async with metadata_errors(), contextlib.aclosing(self._client.pubsub()) as channel:
            await channel.subscribe(_CHANNEL)
            yield
            while True:
                if await channel.get_message(ignore_subscribe_messages=True, timeout=_LISTEN_S) is not None:
                    yield

    async def live(self) -> list[Node]:
        """Members whose time is not over, by name."""
        async with metadata_errors():
            entries_, expiries_, (seconds, microseconds) = await self._live(keys=[_KEY, _EXPIRIES_KEY])
        entries = dict(zip(entries_[::2], entries_[1::2], strict=True))
        expiries = dict(zip(expiries_[::2], expiries_[1::2], strict=True))
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        found = []
        for name, raw in entries.items():
            if int(expiries.get(name, b"0")) > now_ms:
                try:
                    found.append(node_from(common_pb2.Node.FromString(raw)))
                except (DecodeError, InvalidRequest):
                    logger().warning("a member of another release is not understood", node=name.decode())
        return sorted(found, key=lambda node: node.node_id)
