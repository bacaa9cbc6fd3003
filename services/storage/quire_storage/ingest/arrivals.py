"""Stores that are running, for deliveries that follow them: which chunks they have, and which layers have arrived."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from quire.model.errors import PeerLost, QuireError
from quire.model.transfers import IngestOrder
from quire_storage.core.pool.slots import Shape
from quire_storage.tiers.tiers import Slots

_REMEMBERED_S: Final = 2.0
_REMEMBERED_MAX: Final = 16_384


class Arrival:
    """Chunks of one store, in slots, layer after layer. `failed`: why it ended without keeping them."""

    def __init__(self, keys: Sequence[bytes], store_id: bytes, slots: Slots) -> None:
        self._keys = keys
        self.store_id = store_id
        self.slots = slots
        self.failed: QuireError | None = None
        self._arrived: list[asyncio.Future[None] | bool] = [False] * slots.shape.num_layers

    @cached_property
    def positions(self) -> Mapping[bytes, int]:
        """Position of each chunk among the slots, by key."""
        return {key: at for at, key in enumerate(self._keys)}

    async def layer(self, layer: int) -> None:
        """Wait until a layer of all chunks is in the slots, with its checksums taken. Raises why it will never be."""
        if self.failed is not None:
            raise self.failed
        state = self._arrived[layer]
        if state is True:
            return
        if state is False:
            state = self._arrived[layer] = asyncio.get_running_loop().create_future()
        await asyncio.shield(state)

    def reached(self, layers: range) -> None:
        """The bytes of these layers are in the slots, and their checksums are taken."""
        for layer in layers if self.failed is None else ():
            state, self._arrived[layer] = self._arrived[layer], True
            if isinstance(state, asyncio.Future) and not state.done():
                state.set_result(None)

    def fail(self, error: QuireError) -> None:
        """The store has failed: followers end, also those that wait for nothing but their own bytes."""
        if self.failed is not None:
            return
        self.failed = error
        for state in self._arrived:
            if isinstance(state, asyncio.Future) and not state.done():
                state.set_exception(error)
                state.exception()  # seen: it need not be awaited


@dataclass(frozen=True, slots=True)
class ArrivingChunk:
    """A chunk whose store is running: number `at` of an arrival."""

    key: bytes
    arrival: Arrival
    at: int


class Arrivals:
    """Arrivals that are under way. A store registers when it has slots, and leaves when it is over."""

    def __init__(self) -> None:
        self._running: list[Arrival] = []
        self._failed: OrderedDict[bytes, float] = OrderedDict()
        self._changed: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def arriving(self, order: IngestOrder, slots: Slots) -> Iterator[Arrival]:
        """Let followers find a store's chunks, until it ends; an error that leaves the block is theirs, too."""
        arrival = Arrival(order.records.key_list(), order.store_id, slots)
        self._running.append(arrival)
        self._notify()
        try:
            yield arrival
        except BaseException as error:
            arrival.fail(error if isinstance(error, QuireError) else PeerLost("the store was cancelled"))
            self._note_failure(arrival)
            raise
        finally:
            self._running.remove(arrival)
            self._notify()

    def fail(self, store_id: bytes, error: QuireError) -> None:
        """End the followers of a store that was given up, before it has noticed."""
        for arrival in self._running:
            if arrival.store_id == store_id:
                arrival.fail(error)
                self._note_failure(arrival)
        self._notify()

    def find(self, keys: Sequence[bytes], shape: Shape) -> list[ArrivingChunk]:
        """Return those of the chunks that arrive, in order."""
        chunks: dict[bytes, ArrivingChunk] = {}
        for arrival in self._running:
            if arrival.slots.shape == shape and arrival.failed is None:
                for key in keys:
                    if (at := arrival.positions.get(key)) is not None:
                        chunks.setdefault(key, ArrivingChunk(key, arrival, at))
        return [chunks[key] for key in keys if key in chunks]

    def has_failed(self, key: bytes) -> bool:
        """Whether a store of a chunk has failed lately, and none that arrives has it: it is waited for no longer."""
        failed_s = self._failed.get(key, -math.inf)
        return asyncio.get_running_loop().time() - failed_s < _REMEMBERED_S

    def _note_failure(self, arrival: Arrival) -> None:
        now_s = asyncio.get_running_loop().time()
        for key in arrival.positions:
            self._failed[key] = now_s
            self._failed.move_to_end(key)
        while len(self._failed) > _REMEMBERED_MAX:
            self._failed.popitem(last=False)

    def change(self) -> asyncio.Future[None]:
        """Return a future that is done when a store begins or ends."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None


def never(keys: Sequence[bytes], shape: Shape, error: QuireError) -> list[ArrivingChunk]:
    """Return chunks that are nowhere, as those of a store that has failed."""
    arrival = Arrival(keys, b"", Slots(0, shape, np.zeros(len(keys), dtype=np.int64), 0))
    arrival.fail(error)
    return [ArrivingChunk(key, arrival, at) for at, key in enumerate(keys)]
