"""The worker's half of stores: blocks that were computed, copied layer by layer into staging memory, and sent from it.

The forward pass begins the copy of a layer's new blocks, and waits for nothing: copies run behind it, on a stream of
their own; placement, transfer and acknowledgement happen on the client's loop. vLLM may reuse its blocks at once: what
it begins later runs after the copies. Blocks without room in staging memory are stored later.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from quire.client import Buffer
from quire.integrations.vllm.plan import StoredRun, StorePlan, Unstored
from quire.integrations.vllm.workers.blocks import Bytes
from quire.integrations.vllm.workers.worker import WorkerParts
from quire.model.durability import Durability
from quire.model.errors import DeadlineExceeded, PeerLost, QuireError
from quire.telemetry import logger, within
from quire.transport.devices import PASSED, Event

_QUIET_S: Final = 5.0
_AT_ONCE: Final = 16
_LOOK_S: Final = 0.0005


@dataclass(slots=True, eq=False)
class _Store:
    """Store of one request in a step.

    `copied`: by layer the event behind its copy to staging memory; `begun_layers`: those from the first on whose
    copies have begun; `wake`: on the client's loop, there are more.

    `before`: the request's last store; until it is `over`, no node knows the chunks that this one goes on from.
    """

    plan: StorePlan
    memory: Buffer
    layers: Bytes
    before: _Store | None
    stored: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    copied: dict[int, Event] = field(default_factory=dict)
    begun_layers: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class BlockStores:
    """Runs the stores of one worker and group of layers."""

    def __init__(self, parts: WorkerParts, durability: Durability, *, reports: bool = False) -> None:
        self._reports = reports
        self._stored: deque[StoredRun] = deque()
        self._client, self._blocks, self._pool, self._copies = parts.client, parts.blocks, parts.pool, parts.copies
        self._shard = parts.shard
        self._count = parts.count
        self._durability = durability
        self._step: list[_Store] = []
        self._last_copy: Event = PASSED
        self._room = threading.Semaphore(_AT_ONCE)
        self._unstored: deque[Unstored] = deque()
        self._last: dict[str, _Store] = {}
        self._until: dict[str, int] = {}

    def start(self, plan: StorePlan) -> None:
        """Begin the stores of a step. Chunks that several shards have alike are stored by the first of them."""
        if plan.namespaces[self._shard] in plan.namespaces[: self._shard]:
            return
        stored = max(self._until.get(plan.request_id, 0), plan.known)
        memory = (
            self._room_for(plan) if plan.first <= stored else None
        )  # else planned before this was known to be left out
        if memory is None:
            self._until[plan.request_id] = min(stored, plan.first)
            self._unstored.append(
                Unstored(request_id=plan.request_id, group=plan.group, first=plan.first, later=True, state=plan.state)
            )
            return
        layers = memory.layers(self._blocks.num_layers, len(plan.blocks), self._blocks.slab_bytes)
        store = _Store(plan, memory, layers, self._last.get(plan.request_id))
        self._last[plan.request_id], self._until[plan.request_id] = store, plan.first + len(plan.blocks)
        self._step.append(store)
        self._client.spawn(within(store.plan.trace, self._run, store))

    def finished(self, request_id: str) -> None:
        """Nothing more of this request will be stored."""
        self._last.pop(request_id, None)
        self._until.pop(request_id, None)

    def layer(self, layer: int) -> None:
        """The layer's new blocks are computed."""
        for store in self._step:
            self._copy(store, layer)

    def finish_step(self) -> None:
        """The step is over: vLLM may reuse its blocks."""
        for store in self._step:
            for layer in range(self._blocks.num_layers):  # of blocks that earlier steps computed, if none ran
                self._copy(store, layer)
        self._copies.order(self._last_copy)
        self._step = []

    def stored(self) -> list[StoredRun]:
        """Return the acknowledged stores since the last call, if they are to be reported."""
        return [self._stored.popleft() for _ in range(len(self._stored))]

    def unstored(self) -> list[Unstored]:
        """Return the chunks that were not stored since the last call."""
        return [self._unstored.popleft() for _ in range(len(self._unstored))]

    def _room_for(self, plan: StorePlan) -> Buffer | None:
        if not plan.handed_over and not self._room.acquire(blocking=False):
            return None
        memory = self._pool.take(len(plan.blocks) * self._blocks.num_layers * self._blocks.slab_bytes)
        if memory is None and not plan.handed_over:
            self._room.release()
        return memory

    def _copy(self, store: _Store, layer: int) -> None:
        if layer in store.copied:
            return
        copy = partial(self._blocks.take, layer, store.plan.blocks, store.layers[layer])
        store.copied[layer] = self._last_copy = self._copies.submit(copy, dependency=self._copies.record())
        while store.begun_layers in store.copied:
            store.begun_layers += 1
        self._client.post(store.wake.set)

    # ---- on the client's loop

    async def _run(self, store: _Store) -> None:
        plan, stored = store.plan, 0
        try:
            stored = await self._store(store)
        except QuireError as error:
            logger().warning("blocks were not stored", error=error.code(), message=str(error))
        except Exception as error:
            logger().error("a store broke off", exc_info=error)
        finally:
            if not plan.handed_over:
                self._room.release()
            store.stored = bool(stored)
            store.over.set()
        self._count("stored_blocks", stored)
        if stored == len(plan.blocks) and self._reports:
            name = StoredRun(request_id=plan.request_id, group=plan.group, first=plan.first, state=plan.state)
            self._stored.append(name)
        if stored < len(plan.blocks):
            self._count("unstored_blocks", len(plan.blocks) - stored)
            self._unstored.append(
                Unstored(request_id=plan.request_id, group=plan.group, first=plan.first, later=False, state=plan.state)
            )

    async def _store(self, store: _Store) -> int:
        plan, client = store.plan, self._client.asynchronous
        space, keys, session = plan.namespaces[self._shard], plan.keys[self._shard], None
        try:
            if not await self._continues(store):
                return 0
            session = await client.store(space, keys, plan.first, store.memory, durability=self._durability)
            for layer in range(self._blocks.num_layers):
                await self._layer(store, layer)
                session.layer_ready(layer)
            await session.commit()
            return len(plan.blocks)
        finally:
            for layer in range(self._blocks.num_layers):  # until then the step copies into the memory
                await self._layer(store, layer)
            await self._give_back(store, session)

    async def _continues(self, store: _Store) -> bool:
        """Whether what the store goes on from is stored, once that is known."""
        previous, store.before = store.before, None
        if previous is None:
            return True
        await previous.over.wait()
        return previous.stored or store.plan.first <= previous.plan.first

    async def _layer(self, store: _Store, layer: int) -> None:
        """Return when the layer is in staging memory."""
        while store.begun_layers <= layer:
            store.wake.clear()
            if store.begun_layers <= layer:
                await store.wake.wait()
        while not store.copied[layer].query():
            await asyncio.sleep(_LOOK_S)

    async def _give_back(self, store: _Store, session: object) -> None:
        """Once no node reads the memory."""
        while store.memory.is_busy:
            try:
                if session is None:
                    await asyncio.sleep(_QUIET_S)
                else:
                    await session.quiesced(_QUIET_S)  # type: ignore[attr-defined]
            except (DeadlineExceeded, PeerLost):
                await asyncio.sleep(_QUIET_S)
        self._pool.give_back(store.memory)
