"""Carries out the orchestrator's decisions: Redis on one side, storage nodes on the other."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire import PROTOCOL_VERSION
from quire.durability import Durability, OnExisting
from quire.errors import InvalidRequest, NotImplementedHere, QuireError
from quire.keys import ChunkKeys
from quire.lease import Lease, LeasedRun, LeaseSigner
from quire.metadata.index import ChunkRecord
from quire.nodes import Node, Role, Segment
from quire.telemetry import logger, names, tracer
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.core.placement import placed_segments, readable_segments
from quire_orchestrator.errors import NoDurableNode
from quire_orchestrator.ports import ChunkHolder, Clock, Index, Members

_PIN_TRIES = 3


@dataclass(frozen=True, slots=True)
class Found:
    """A look-up's answer: the matched run of chunks, where it lies, and the lease on it (empty for none)."""

    matched_chunks: int
    segments: Sequence[Segment]
    lease: bytes
    lease_expires_ms: int
    index_us: int


class Orchestrator:
    """Every method is one request. Holds no state but a short-lived picture of the membership."""

    def __init__(
        self, config: OrchestratorConfig, index: Index, members: Members, holders: ChunkHolder, clock: Clock
    ) -> None:
        self._config = config
        self._index = index
        self._members = members
        self._holders = holders
        self._clock = clock
        self._signer = LeaseSigner(config.cluster_secret.encode())
        self._live: dict[str, Node] = {}
        self._refresher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._refresh()
        self._refresher = asyncio.create_task(self._keep_fresh())

    async def close(self) -> None:
        if self._refresher is not None:
            self._refresher.cancel()

    async def lookup(self, keys: ChunkKeys, lease_ttl_ms: int) -> Found:
        """The longest prefix with live replicas; with a lifetime, leased."""
        if lease_ttl_ms > self._config.lease_ttl_ms_max:
            raise InvalidRequest(f"{lease_ttl_ms} ms, {self._config.lease_ttl_ms_max} at most", field="lease_ttl_ms")
        for _ in range(_PIN_TRIES):
            started = time.perf_counter_ns()
            with tracer().start_as_current_span(names.INDEX_MATCH):
                match = await self._index.match(keys)
            index_us = (time.perf_counter_ns() - started) // 1000
            segments = readable_segments(match, self._storage_nodes())
            matched = sum(segment.chunk_count for segment in segments)
            if matched == 0 or lease_ttl_ms == 0:
                return Found(matched, segments, b"", 0, index_us)
            lease = self._lease(keys, matched, segments, lease_ttl_ms)
            if await self._index.pin(lease.tip_segment, lease.tip, lease.lease_id, lease.expires_ms, lease_ttl_ms):
                return Found(matched, segments, self._signer.sign(lease), lease.expires_ms, index_us)
            # Evicted between the match and the pin: look again.
        return Found(0, [], b"", 0, index_us)

    async def allocate(
        self, keys: ChunkKeys, first: int, durability: Durability, on_existing: OnExisting
    ) -> tuple[list[Segment], int]:
        """Nodes for the chunks that are not stored, and how many from the start are."""
        if durability not in (Durability.MEMORY, Durability.LOCAL):
            raise NotImplementedHere(
                f"durability {durability.value!r}; this version has memory and local", field="durability"
            )
        nodes = list(self._storage_nodes().values())
        if not nodes:
            raise NoDurableNode("no storage node is alive")
        if first > len(keys):
            raise InvalidRequest(f"{first}, but there are {len(keys)} keys", field="first_chunk")
        readable = readable_segments(await self._index.match(keys), self._storage_nodes())
        known = sum(segment.chunk_count for segment in readable)
        if known < first:
            raise InvalidRequest(
                f"chunk {known} is not stored, so chunks from {first} on would have no parent", field="first_chunk"
            )
        if on_existing is OnExisting.VERIFY and known > first:
            held = [_clip(segment, first) for segment in readable if segment.first_chunk + segment.chunk_count > first]
            return held + placed_segments(keys, known, nodes), known
        return placed_segments(keys, max(known, first), nodes), known

    async def commit(self, node_id: str, chunks: Sequence[ChunkRecord]) -> list[bool]:
        """Index replicas that a node has stored; False where the parent is not indexed."""
        with tracer().start_as_current_span(names.INDEX_REGISTER):
            return await self._index.register(node_id, chunks)

    async def withdraw(self, node_id: str, chunks: Sequence[ChunkRecord]) -> int:
        """A node lost chunks, or found them corrupt: look-ups must not promise them any more."""
        return await self._index.unregister(node_id, chunks)

    async def release(self, token: bytes) -> bool:
        """Give a lease back, expired or not; whether it was held."""
        lease = self._signer.verify(token, now_ms=0)
        return await self._index.unpin(lease.tip_segment, lease.tip, lease.lease_id)

    async def evict(self, keys: ChunkKeys, keep: int) -> int:
        """Drop chunks from the end of a chain; how many. Stops at one that others extend or a lease pins."""
        if not 0 <= keep <= len(keys):
            raise InvalidRequest(f"{keep} of {len(keys)}", field="keep_chunks")
        removed = await self._index.evict(keys, keep, self._clock.now_ms())
        by_node: dict[str, list[bytes]] = {}
        for key, holders in removed:
            for holder in holders:
                by_node.setdefault(holder, []).append(key)
        for node_id, gone in by_node.items():
            node = self._live.get(node_id)
            if node is None:
                continue  # it reconciles what it holds when it comes back
            try:
                await self._holders.drop(node, ChunkKeys(b"".join(gone)))
            except QuireError as error:
                logger().warning("a node did not drop chunks", node=node_id, chunks=len(gone), error=str(error))
        return len(removed)

    async def heartbeat(self, node: Node) -> int:
        """Keep a member alive; milliseconds until it should report again."""
        if node.protocol_version != PROTOCOL_VERSION:
            raise InvalidRequest(
                f"{node.protocol_version}, this cluster speaks {PROTOCOL_VERSION}", field="node.protocol_version"
            )
        await self._members.renew(node, self._clock.now_ms() + self._config.member_ttl_ms)
        self._live[node.node_id] = node
        return self._config.heartbeat_ms

    async def leave(self, node_id: str, incarnation: str) -> None:
        await self._members.leave(node_id, incarnation)
        await self._refresh()

    async def nodes(self, role: Role | None) -> list[Node]:
        await self._refresh()
        return [node for node in self._live.values() if role in (None, node.role)]

    def _storage_nodes(self) -> dict[str, Node]:
        return {name: node for name, node in self._live.items() if node.role is Role.STORAGE}

    def _lease(self, keys: ChunkKeys, matched: int, segments: Sequence[Segment], ttl_ms: int) -> Lease:
        runs = tuple(
            LeasedRun(
                segment.node_id,
                segment.first_chunk,
                segment.chunk_count,
                keys.run(segment.first_chunk, segment.chunk_count).digest(),
            )
            for segment in segments
        )
        expires_ms = self._clock.now_ms() + ttl_ms
        return Lease(os.urandom(16), keys.at(matched - 1), keys.segment_of(matched - 1), expires_ms, runs)

    async def _refresh(self) -> None:
        self._live = {node.node_id: node for node in await self._members.live(self._clock.now_ms())}

    async def _keep_fresh(self) -> None:
        while True:
            await self._clock.sleep(self._config.heartbeat_ms / 2000)
            try:
                await self._refresh()
            except QuireError as error:
                logger().warning("membership cannot be read", error=str(error))


def _clip(segment: Segment, first: int) -> Segment:
    """`segment` without its chunks before `first`."""
    skip = max(0, first - segment.first_chunk)
    return Segment(
        segment.node_id,
        segment.grpc_address,
        segment.worker_address,
        segment.first_chunk + skip,
        segment.chunk_count - skip,
    )
