"""Who is in the cluster, in hashes of Redis by member.

What others decide by seldom changes, and is read often: it lies by itself. How much a member has, until when it counts
as alive, and its figures for people lie beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import redis.asyncio as redis
from google.protobuf.message import DecodeError

from quire.model.errors import InvalidRequest, NameTaken
from quire.model.nodes import DecoderInfo, Node, StorageInfo
from quire.telemetry import logger
from quire.wire.convert import node_from, node_to
from quire.wire.v1 import common_pb2
from quire_server.redis.connection import metadata_errors

_KEY = "quire:{nodes}"
_EXPIRIES_KEY = "quire:{nodes}:until"
_USED_KEY = "quire:{nodes}:used"
_FIGURES_KEY = "quire:{nodes}:figures"

_CHANNEL = "quire:nodes-changed"
_LISTEN_S = 4.0

# KEYS: members, figures. ARGV: 1 node, 2 incarnation, 3 channel. Removes the member unless a newer incarnation has its
# name.
_LEAVE = """
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.find(entry, ARGV[2], 1, true) then
  redis.call('PUBLISH', ARGV[3], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
"""

# KEYS: members, expiries, bytes used, figures. ARGV: 1 node, 2 incarnation, 3 entry, 4 time to live in ms, 5 channel,
# 6 bytes used, 7 figures. By the clock of Redis: those who write and those who read have clocks of their own. Returns
# 0 if another incarnation that is alive has the name. One that joins or is alive again is made known on the channel.
_RENEW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entry, expiry = redis.call('HGET', KEYS[1], ARGV[1]), redis.call('HGET', KEYS[2], ARGV[1])
local alive = entry and expiry and tonumber(expiry) > now
local same = entry and string.find(entry, ARGV[2], 1, true)
if alive and not same then return 0 end
if not (alive and same) then redis.call('PUBLISH', ARGV[5], ARGV[1]) end
if entry ~= ARGV[3] then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('HSET', KEYS[3], ARGV[1], ARGV[6])
redis.call('HSET', KEYS[4], ARGV[1], ARGV[7])
redis.call('HSET', KEYS[2], ARGV[1], string.format('%.0f', now + ARGV[4]))
return 1
"""


# KEYS: members, expiries, bytes used; of all at one moment, and what time it is.
_LIVE = """
local function all(key) return redis.call('HGETALL', key) end
return {all(KEYS[1]), all(KEYS[2]), all(KEYS[3]), redis.call('TIME')}
"""


class Membership:
    """Heartbeats in, live members out."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._leave = client.register_script(_LEAVE)
        self._renew = client.register_script(_RENEW)
        self._live = client.register_script(_LIVE)
        self._known: dict[bytes, tuple[bytes, bytes, Node]] = {}  # entry, bytes used, and what they mean

    async def renew(self, node: Node, ttl_ms: int) -> None:
        """Count `node` as alive for so long. Raises `NameTaken`: another process has its name."""
        async with metadata_errors():
            arguments: list[str | bytes | int] = [
                node.node_id,
                node.incarnation,
                node_to(facts_of(node)).SerializeToString(),
                ttl_ms,
                _CHANNEL,
                node.used_bytes,
                common_pb2.Node(stats=node.stats, tenant_stats=node.tenant_stats, notes=node.notes).SerializeToString(),
            ]
            taken = not await self._renew(keys=[_KEY, _EXPIRIES_KEY, _USED_KEY, _FIGURES_KEY], args=arguments)
        if taken:
            raise NameTaken(f"a node named {node.node_id!r} is alive; give this one another name", field="node_id")

    async def leave(self, node_id: str, incarnation: str) -> bool:
        """Forget a node that is stopping, unless it has restarted since; whether it was forgotten."""
        async with metadata_errors():
            return bool(await self._leave(keys=[_KEY, _FIGURES_KEY], args=[node_id, incarnation, _CHANNEL]))

    async def changes(self) -> AsyncIterator[None]:
        """One at the beginning, and one whenever a member joins, comes back or leaves. One that dies is none."""
        async with metadata_errors(), contextlib.aclosing(self._client.pubsub()) as channel:
            await channel.subscribe(_CHANNEL)
            yield
            while True:
                if await channel.get_message(ignore_subscribe_messages=True, timeout=_LISTEN_S) is not None:
                    yield

    async def live(self) -> list[Node]:
        """Members whose time is not over, by name, without their figures for people."""
        async with metadata_errors():
            found = await self._live(keys=[_KEY, _EXPIRIES_KEY, _USED_KEY])
        entries, expiries, used = (dict(zip(each[::2], each[1::2], strict=True)) for each in found[:3])
        seconds, microseconds = found[3]
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        known: dict[bytes, tuple[bytes, bytes, Node]] = {}
        for name, raw in entries.items():
            if int(expiries.get(name, b"0")) > now_ms:
                before = self._known.get(name)
                size = used.get(name, b"0")
                if before is not None and before[:2] == (raw, size):
                    known[name] = before
                elif (node := _node(name, raw)) is not None:
                    known[name] = raw, size, _with_used(node, int(size))
        self._known = known
        return [node for _, _, node in sorted(known.values(), key=lambda each: each[2].node_id)]

    async def described(self) -> list[Node]:
        """Members whose time is not over, by name, with all that they tell of themselves."""
        nodes = await self.live()
        if not nodes:
            return []
        async with metadata_errors():
            found: Any = self._client.hmget(_FIGURES_KEY, [node.node_id for node in nodes])
            figures = [common_pb2.Node.FromString(raw or b"") for raw in await found]
        return [
            replace(node, stats=dict(each.stats), tenant_stats=dict(each.tenant_stats), notes=dict(each.notes))
            for node, each in zip(nodes, figures, strict=True)
        ]


def facts_of(node: Node) -> Node:
    """What others decide by, but for how much it has."""
    return replace(_with_used(node, 0), stats={}, tenant_stats={}, notes={})


def _with_used(node: Node, size: int) -> Node:
    if isinstance(node.about, StorageInfo | DecoderInfo):
        return replace(node, about=replace(node.about, used_bytes=size))
    return node


def _node(name: bytes, raw: bytes) -> Node | None:
    try:
        return node_from(common_pb2.Node.FromString(raw))
    except (DecodeError, InvalidRequest):
        logger().warning("a member of another release is not understood", node=name.decode())
        return None
