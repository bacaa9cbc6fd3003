"""Members of the cluster, in hashes of Redis by member.

The facts that others decide by seldom change, and are read often: they have a hash of their own. Used bytes, expiries
and figures for people have others; so do the states of storage nodes, which outlive their memberships.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import redis.asyncio as redis
from google.protobuf.message import DecodeError

from quire.model.errors import InvalidRequest, NameTaken, QuireError
from quire.model.nodes import DecoderInfo, Node, Role, StorageInfo, StorageState
from quire.telemetry import background, logger
from quire.wire.convert import node_from, node_to, running_from, running_to
from quire.wire.v1 import common_pb2
from quire_server.redis.connection import metadata_errors
from quire_server.redis.scripts import script

_KEY = "quire:{nodes}"
_EXPIRIES_KEY = "quire:{nodes}:until"
_USED_KEY = "quire:{nodes}:used"
_FIGURES_KEY = "quire:{nodes}:figures"
_STATES_KEY = "quire:{nodes}:storage"

_CHANNEL = "quire:nodes-changed"
_LISTEN_S = 4.0


_TOGETHER_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class _Renewal:
    """A renewal that is written together with others."""

    arguments: Sequence[str | bytes | int]
    renewed: asyncio.Future[StorageState | None]


class Membership:
    """Heartbeats in, live members out."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._leave = client.register_script(script("membership_leave"))
        self._renew = client.register_script(script("membership_renew"))
        self._set_state = client.register_script(script("membership_state"))
        self._live = client.register_script(script("membership_live"))
        self._time = client.register_script(script("membership_time"))
        # By name: entry, bytes used, state, and the node that they describe.
        self._known: dict[bytes, tuple[bytes, bytes, bytes, Node]] = {}
        self._renewals: list[_Renewal] = []
        self._writing: set[asyncio.Task[None]] = set()

    async def renew(self, node: Node, ttl_ms: int, *, gather_s: float = 0.0) -> StorageState:
        """Count `node` as alive for that time; return its state.

        Raises `NameTaken`: another process has its name.

        It may wait for `gather_s`, so that the renewals of several nodes take one round trip.
        """
        arguments: list[str | bytes | int] = [
            node.node_id,
            node.incarnation,
            node_to(facts_of(node)).SerializeToString(),
            ttl_ms,
            node.used_bytes,
            _figures_of(node).SerializeToString(),
            StorageState.ACTIVE.value if node.role is Role.STORAGE else "",
        ]
        if gather_s:
            state = await self._gathered(arguments, gather_s)
        else:
            state = (await self._renew_all([arguments]))[0]
        if state is None:
            raise NameTaken(f"a node named {node.node_id!r} is alive; give this one another name", field="node_id")
        return state

    async def _renew_all(self, renewals: Sequence[Sequence[str | bytes | int]]) -> list[StorageState | None]:
        """Return for each waiting node its state, or None if another one has its name."""
        arguments = [_CHANNEL, *chain.from_iterable(renewals)]
        async with metadata_errors():
            done = await self._renew(keys=[_KEY, _EXPIRIES_KEY, _USED_KEY, _FIGURES_KEY, _STATES_KEY], args=arguments)
        return [None if answer == 0 else _state_of(answer) for answer in done]

    async def _gathered(self, arguments: Sequence[str | bytes | int], gather_s: float) -> StorageState | None:
        renewal = _Renewal(arguments, asyncio.get_running_loop().create_future())
        self._renewals.append(renewal)
        if len(self._renewals) == 1:
            writing = asyncio.create_task(self._write_gathered(gather_s), context=background())
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
        return await renewal.renewed

    async def _write_gathered(self, gather_s: float) -> None:
        await asyncio.sleep(gather_s)
        # A member that has left since would be back.
        renewals, self._renewals = [renewal for renewal in self._renewals if not renewal.renewed.done()], []
        for first in range(0, len(renewals), _TOGETHER_MAX):
            batch = renewals[first : first + _TOGETHER_MAX]
            try:
                done: list[StorageState | QuireError | None] = list(
                    await self._renew_all([renewal.arguments for renewal in batch])
                )
            except QuireError as error:
                done = [error] * len(batch)
            for renewal, answer in zip(batch, done, strict=True):
                if renewal.renewed.done():  # who asked has gone
                    continue
                if isinstance(answer, QuireError):
                    renewal.renewed.set_exception(answer)
                else:
                    renewal.renewed.set_result(answer)

    async def leave(self, node_id: str, incarnation: str, *, crashed: bool = False) -> bool:
        """Forget a node that is stopping or has crashed, unless it has restarted since; whether it was forgotten.

        A decommissioned storage node that stops is no longer expected. One that has crashed may be started again.
        """
        async with metadata_errors():
            arguments = [node_id, incarnation, _CHANNEL, "" if crashed else StorageState.DECOMMISSIONED.value]
            return bool(await self._leave(keys=[_KEY, _FIGURES_KEY, _STATES_KEY], args=arguments))

    async def set_state(self, node_id: str, state: StorageState, previous: StorageState) -> bool:
        """Set the state of a storage node; False if it is not in its `previous` state, or not expected.

        One that is decommissioned is expected until it stops.
        """
        arguments = [node_id, state.value, _CHANNEL, previous.value]
        async with metadata_errors():
            return bool(await self._set_state(keys=[_STATES_KEY], args=arguments))

    async def expected(self) -> dict[str, StorageState]:
        """Return the storage nodes that have joined, alive or not, with their states.

        Without those that were decommissioned and have stopped since.
        """
        async with metadata_errors():
            states: Any = self._client.hgetall(_STATES_KEY)
            return {name.decode(): _state_of(state) for name, state in (await states).items()}

    async def changes(self) -> AsyncIterator[None]:
        """Yield a change at the beginning, and whenever a member joins, comes back or leaves, but not when one dies."""
        async with metadata_errors(), contextlib.aclosing(self._client.pubsub()) as channel:
            await channel.subscribe(_CHANNEL)
            yield
            while True:
                if await channel.get_message(ignore_subscribe_messages=True, timeout=_LISTEN_S) is not None:
                    yield

    async def live(self) -> list[Node]:
        """Members whose time is not over, by name, without their figures for people."""
        async with metadata_errors():
            *tables, time = await self._live(keys=[_KEY, _EXPIRIES_KEY, _USED_KEY, _STATES_KEY])
        entries, expiries, used, states = (dict(zip(table[::2], table[1::2], strict=True)) for table in tables)
        now_ms = _ms_of(time)
        parsed: dict[bytes, tuple[bytes, bytes, bytes, Node]] = {}
        for name, raw in entries.items():
            if int(expiries.get(name, b"0")) > now_ms:
                previous = self._known.get(name)
                size, state = used.get(name, b"0"), states.get(name, b"")
                if previous is not None and previous[:3] == (raw, size, state):
                    parsed[name] = previous
                elif (node := _node(name, raw)) is not None:
                    parsed[name] = raw, size, state, replace(_with_used(node, int(size)), state=_state_of(state))
        self._known = parsed
        return sorted((row[-1] for row in parsed.values()), key=lambda node: node.node_id)

    async def now_ms(self) -> int:
        """Read the clock that decides about members' expiry, in ms since the Unix epoch."""
        async with metadata_errors():
            return _ms_of(await self._time(keys=[_KEY], args=[]))

    async def described(self) -> list[Node]:
        """Members whose time is not over, by name, with all that they tell of themselves."""
        nodes = await self.live()
        if not nodes:
            return []
        async with metadata_errors():
            replies: Any = self._client.hmget(_FIGURES_KEY, [node.node_id for node in nodes])
            figures = [common_pb2.Node.FromString(raw or b"") for raw in await replies]
        return [_with_figures(node, raw) for node, raw in zip(nodes, figures, strict=True)]


def _ms_of(time: Sequence[bytes]) -> int:
    """Convert what TIME returns, seconds and microseconds, to ms."""
    return int(time[0]) * 1000 + int(time[1]) // 1000


def facts_of(node: Node) -> Node:
    """Return the facts that others decide by, without the used bytes."""
    facts = replace(node, stats={}, tenant_stats={}, notes={}, running=(), state=StorageState.ACTIVE, is_away=False)
    return _with_used(facts, 0)


def _state_of(value: bytes) -> StorageState:
    """Convert a state in Redis, "" for none; one that this release does not know is not to be relied on."""
    try:
        return StorageState(value.decode()) if value else StorageState.ACTIVE
    except ValueError:
        return StorageState.DRAINING


def _figures_of(node: Node) -> common_pb2.Node:
    """Return its figures for people."""
    return common_pb2.Node(
        stats=node.stats, tenant_stats=node.tenant_stats, notes=node.notes, running=map(running_to, node.running)
    )


def _with_figures(node: Node, figures: common_pb2.Node) -> Node:
    return replace(
        node,
        stats=dict(figures.stats),
        tenant_stats=dict(figures.tenant_stats),
        notes=dict(figures.notes),
        running=tuple(map(running_from, figures.running)),
    )


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
