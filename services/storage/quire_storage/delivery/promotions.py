"""Chunks on a drive that are read into memory to stay there: each layer once, for every delivery that wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from quire.telemetry import names, tracer
from quire_storage.core.chunks import Copy, MemoryPlace
from quire_storage.core.plan import SliceChecks
from quire_storage.delivery.reading import Reading, checksums_of
from quire_storage.tiers.tiers import Tiers


class Promotion:
    """Copies on a drive, read into slots of their own, each layer once, for every delivery that wants them."""

    def __init__(
        self, reading: Reading, number: int, copies: Sequence[Copy], places: Sequence[MemoryPlace], tenant: str
    ) -> None:
        self.number = number
        self._tenant = tenant
        self._reading = reading
        self._copies = copies
        self._bases = np.array([place.offset for place in places], dtype=np.int64)
        self._stride = places[0].layer_stride
        pool, arena = reading.tiers.pool, reading.tiers.arena
        assert pool is not None, "what is on a drive is in the pool"
        strides = np.full(len(copies), self._stride)
        self._source = pool.striped(copies, self._bases + arena.address, strides)
        num_layers = copies[0].chunk.num_layers
        self._checks = SliceChecks(checksums_of(copies, num_layers), self._bases, copies[0].chunk.slice_bytes)
        self._layers: dict[int, asyncio.Task[None]] = {}
        self._sound: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every byte of it was read and verified."""
        return len(self._sound) == self._copies[0].chunk.num_layers

    async def layer(self, layer: int, due_s: float) -> None:
        """Return when the layer is in memory, verified. Raises `CorruptData`."""
        if layer not in self._layers:
            self._layers[layer] = asyncio.create_task(self._read(layer, due_s))
            self._layers[layer].add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._layers[layer])

    async def settle(self) -> None:
        """Stop; return when no read is under way. The ring holds a cancelled read until the drives let go."""
        for task in self._layers.values():
            task.cancel()
        await asyncio.gather(*self._layers.values(), return_exceptions=True)

    async def _read(self, layer: int, due_s: float) -> None:
        reading, shift = self._reading, layer * self._stride
        assert reading.ring is not None, "what is on a drive is read through the ring"
        with tracer().start_as_current_span(names.STORAGE_READ, attributes={"quire.layer": layer}):
            await reading.ring.read(self._source.layer(layer), due_s)
        verify = partial(self._checks.corrupt, reading.tiers.arena.view, layer, shift)
        bad = await asyncio.wrap_future(reading.threads.submit(self._tenant, verify))
        if bad:
            await reading.heal_slices(self._copies, self._bases + shift, layer, bad)
        self._sound.add(layer)


class Promotions:
    """Promotions under way at this node."""

    def __init__(self) -> None:
        self._running: dict[int, Promotion] = {}
        self._users: dict[int, int] = {}
        self._settling: set[int] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    def join(
        self, reading: Reading, copies: Sequence[Copy], tenant: str = "", *, prefetch: bool = False
    ) -> tuple[int, dict[int, tuple[Promotion, MemoryPlace]]]:
        """Join or begin promotions of copies that are read from a drive.

        Returns a ticket, and the promoted ones with their places, by number.

        `tenant`: takes the turns at the threads that verify. `prefetch`: a client wants them in memory.
        """
        ticket, slots = reading.tiers.promote(copies, prefetch=prefetch)
        groups: dict[int, list[Copy]] = {}
        for copy in copies:
            if copy.number in slots:
                groups.setdefault(slots[copy.number][0], []).append(copy)
        for number, group in groups.items():
            if number in self._settling:
                # Its last user has left, and its reads are being stopped: these copies are read separately.
                reading.tiers.end_promotion(ticket, number, complete=False)
                for copy in group:
                    del slots[copy.number]
                continue
            if number not in self._running:
                places = [slots[copy.number][1] for copy in group]
                self._running[number] = Promotion(reading, number, group, places, tenant)
            self._users[number] = self._users.get(number, 0) + 1
        return ticket, {copy: (self._running[number], place) for copy, (number, place) in slots.items()}

    async def leave(self, tiers: Tiers, ticket: int, promotion: Promotion) -> None:
        """A delivery needs a promotion no more. It ends, and its slots are freed, also when the caller is cancelled."""
        self._users[promotion.number] -= 1
        last = not self._users[promotion.number]
        if last:
            del self._users[promotion.number], self._running[promotion.number]
            self._settling.add(promotion.number)
        leaving = asyncio.create_task(self._leave(tiers, ticket, promotion, last=last))
        self.keep(leaving)
        await asyncio.shield(leaving)

    def keep(self, cleanup: asyncio.Task[None]) -> None:
        """Hold a task that has to end even if no caller waits for it."""
        self._leaving.add(cleanup)
        cleanup.add_done_callback(self._leaving.discard)

    async def _leave(self, tiers: Tiers, ticket: int, promotion: Promotion, *, last: bool) -> None:
        if last:
            try:
                await promotion.settle()
            finally:
                self._settling.discard(promotion.number)
        tiers.end_promotion(ticket, promotion.number, complete=promotion.complete)
