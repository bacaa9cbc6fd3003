"""Deliveries of chunks whose store is still running: stores are announced, and look-ups wait for them.

A store is announced when its chunks are placed, while the nodes already read them: an announcement that is late, or
lost, costs a follower a wait and the store nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from quire.model.errors import InvalidRequest, QuireError
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.ranges import ChunkRange
from quire.telemetry import logger
from quire_server.clock import Clock
from quire_server.core.placement import addresses_of, extend
from quire_server.lookups import LookupAnswer, Question

_LOOK_S: Final = 0.002
_LOOK_S_MAX: Final = 0.05
_LOOK_SLOWER: Final = 1.5
_CLOSE_S: Final = 1.0


class RunningStores(Protocol):
    """See `quire_server.redis.RunningStores`."""

    async def begin(self, keys: ChunkKeys, ranges: Sequence[ChunkRange], store_id: bytes, until_ms: int) -> None: ...
    async def end(self, keys: ChunkKeys, ranges: Sequence[ChunkRange], store_id: bytes) -> None: ...
    async def find(self, keys: ChunkKeys, now_ms: int) -> list[ChunkRange]: ...


class Readable(Protocol):
    """See `quire_server.lookups.Lookups`."""

    async def lookup(self, question: Question) -> LookupAnswer: ...
    async def peek(self, question: Question) -> LookupAnswer: ...


class Members(Protocol):
    """See `quire_server.membership.cluster_view`."""

    def storage_nodes(self) -> Mapping[str, Node]: ...


class Announcements:
    """Announces the stores of this gateway, as long as they run. `permit_ms`: of transfers without one of their own."""

    def __init__(self, running: RunningStores, clock: Clock, permit_ms: int) -> None:
        self._running = running
        self._clock = clock
        self._permit_ms = permit_ms
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def announced(
        self, keys: ChunkKeys, ranges: Sequence[ChunkRange], store_id: bytes, transfer_ms: int
    ) -> Iterator[None]:
        """Let followers find the chunks of a store, whose nodes take `ranges` of a prefix, inside the block."""
        until_ms = self._clock.now_ms() + (transfer_ms or self._permit_ms)
        announcing = self._spawn(self._running.begin(keys, ranges, store_id, until_ms))
        try:
            yield
        finally:
            self._spawn(self._withdraw(announcing, keys, ranges, store_id))

    async def _withdraw(
        self, announcing: asyncio.Task[None], keys: ChunkKeys, ranges: Sequence[ChunkRange], store_id: bytes
    ) -> None:
        await asyncio.wait([announcing])
        await self._running.end(keys, ranges, store_id)

    async def close(self) -> None:
        """Let withdrawals end, for a moment."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@dataclass(frozen=True, slots=True)
class Followed:
    """The readable part of a prefix, and behind it the part whose stores are running."""

    readable: LookupAnswer
    arriving: tuple[ChunkRange, ...]

    @property
    def chunks(self) -> int:
        """Chunks of both parts."""
        return self.arriving[-1].stop if self.arriving else self.readable.matched_chunks


class Following:
    """Look-ups that count chunks whose store is running."""

    def __init__(self, lookups: Readable, running: RunningStores, view: Members, clock: Clock) -> None:
        self._lookups = lookups
        self._running = running
        self._view = view
        self._clock = clock

    async def until_they_arrive(
        self, question: Question, wait_s: float, *, first: int = 0, part_s: float = math.inf
    ) -> None:
        """Wait until every chunk can be read or arrives.

        Args:
            question: Names the chunks.
            wait_s: For how long at most.
            first: First chunk that is wanted.
            part_s: For how long at most if some of the wanted chunks can be read or arrive.

        Raises:
            InvalidRequest: The question is about unchained keys, or wants advice.
        """
        if question.unchained or question.prompt_tokens:
            raise InvalidRequest("prefixes are followed, and without advice", field="follow_ms")
        began_s, pause_s = self._clock.monotonic_s(), _LOOK_S
        while True:
            running = await self._running.find(question.keys, self._clock.now_ms())
            readable = (await self._lookups.peek(question)).matched_chunks
            arriving = self._behind(readable, running)
            covered = arriving[-1].stop if arriving else readable
            limit_s = min(wait_s, part_s) if covered > first else wait_s
            left_s = began_s + limit_s - self._clock.monotonic_s()
            if covered == len(question.keys) or left_s <= 0:
                return
            await self._clock.sleep(min(pause_s, left_s))
            pause_s = min(_LOOK_S_MAX, pause_s * _LOOK_SLOWER)

    async def lookup(self, question: Question) -> Followed:
        """Return the chunks that can be read or arrive now."""
        running = await self._running.find(question.keys, self._clock.now_ms())  # before, so that none is in neither
        answer = await self._lookups.lookup(question)
        arriving = self._behind(answer.matched_chunks, running)
        names = {node.node_id for node in answer.nodes}
        unnamed = [run for run in arriving if run.node_id not in names]
        nodes = [*answer.nodes, *addresses_of(unnamed, self._view.storage_nodes())]
        return Followed(replace(answer, nodes=nodes), tuple(arriving))

    def _behind(self, first: int, running: Sequence[ChunkRange]) -> list[ChunkRange]:
        """Return what arrives at live nodes from chunk `first` on, without a gap; of several stores the latest."""
        live, arriving, at = self._view.storage_nodes(), list[ChunkRange](), first
        while covering := next((run for run in running if run.first <= at < run.stop and run.node_id in live), None):
            extend(arriving, ChunkRange(covering.node_id, at, covering.stop - at))
            at = covering.stop
        return arriving


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except QuireError as error:
        logger().warning("a store is not announced to followers", error=str(error))
