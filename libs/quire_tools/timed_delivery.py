"""Deliveries as an engine consumes them, timed: for benchmarks and `quire calibrate`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.client import AsyncClient, Buffer, Lookup
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import ChunkMissing
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.urgency import Urgency

Bytes = npt.NDArray[np.uint8]
_LEASE_MS: Final = 300_000
_STORE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: to the first token, until layer 0 was there, between layers after it, and waited in all."""

    ttft_s: float
    first_s: float
    layer_s: float
    stall_s: float


async def consume(arrival: Callable[[int], Awaitable[float]], layers: int, window_s: float, started: float) -> Timing:
    """Take each layer as it comes and compute for `window_s`. `arrival`: waits for a layer; when it came, monotonic.

    A window begins when the layer is there and the window before is over, as on a device that waits for events: not
    when this loop's timer, which is a millisecond coarse, gets round to it.
    """
    ends, stall_s = started, 0.0
    arrivals = []
    for index in range(layers):
        arrivals.append(await arrival(index))
        stall_s += max(0.0, arrivals[-1] - ends)
        ends = max(ends, arrivals[-1]) + window_s
        if (left_s := ends - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
    layer_s = (arrivals[-1] - arrivals[0]) / max(1, layers - 1)
    return Timing(ends - started, arrivals[0] - started, layer_s, stall_s)


class QuirePaths:
    """KV in the cluster: delivered whole (S3Batch-CW) or layer by layer (S3Agg-LW)."""

    def __init__(self, client: AsyncClient, namespace: Namespace, tokens: int) -> None:
        self._client = client
        self.namespace = namespace
        self.keys = block_keys(namespace, list(range(tokens)), HashAlgorithm.BLAKE3)
        self._found: dict[int, Lookup] = {}
        self._buffer: Buffer | None = None

    async def store(self, durability: Durability) -> None:
        """Random bytes under all keys."""
        layout, keys = self.namespace.layout, self.keys
        step = max(1, min(len(keys), _STORE_BYTES // layout.chunk_bytes))
        buffer = self._client.allocate(layout.payload_bytes(step))
        assert buffer.view is not None
        buffer.view[:] = np.random.default_rng(3).integers(0, 256, buffer.length, dtype=np.uint8)
        for first in range(0, len(keys), step):
            upto = keys.run(0, min(len(keys), first + step))
            session = await self._client.store(self.namespace, upto, first, buffer, durability=durability)
            for layer in range(layout.num_layers):
                session.layer_ready(layer)
            await session.commit()
        buffer.close()

    async def is_stored(self) -> bool:
        """Whether all of it can be read."""
        match = await self._client.lookup(self.namespace, self.keys, lease_ttl_ms=0)
        return match.matched_chunks == len(self.keys)

    async def evict(self) -> None:
        """Out of the cluster again."""
        await self.forget_leases()
        await self._client.evict(self.namespace, self.keys)

    async def give_up_copies(self) -> None:
        """Have only the object tier keep them. Raises `ChunkMissing` where it does not have all of them."""
        await self.forget_leases()
        elsewhere = len(self.keys) - await self._client.demote(self.namespace, self.keys)
        if elsewhere:
            raise ChunkMissing(f"{elsewhere} chunks are not in the object tier alone", field="chunk_keys")

    async def forget_leases(self) -> None:
        """Forget the leases, so that the next look-ups see the tenant's changes."""
        for match in self._found.values():
            await self._client.release(match)
        self._found.clear()

    async def deliver(self, chunks: int, window_s: float, order: DeliveryOrder) -> Timing:
        """A fetch as an engine does it, the look-up included. A window of 0: nothing is computed, nor announced."""
        layout = self.namespace.layout
        if self._buffer is None:
            self._buffer = self._client.allocate(layout.payload_bytes(len(self.keys)))
            assert self._buffer.view is not None
            self._buffer.view[:] = 0  # an engine's blocks have their pages
        started = time.monotonic()
        match = await self._lookup(self.keys.run(0, chunks))
        urgency = Urgency(compute_window_us=max(1, round(window_s * 1e6)) if window_s else 0)
        delivery = await self._client.fetch(match, self._buffer, order=order, urgency=urgency)

        async def arrival(layer: int) -> float:
            await delivery.layer(layer)
            return delivery.arrived_ns[layer] / 1e9

        timing = await consume(arrival, layout.num_layers, window_s, started)
        await delivery.summary()
        await delivery.quiesced(60)
        return timing

    async def close(self) -> None:
        await self.forget_leases()
        if self._buffer is not None:
            self._buffer.close()

    async def _lookup(self, keys: ChunkKeys) -> Lookup:
        match = await self._client.lookup(self.namespace, keys, lease_ttl_ms=_LEASE_MS)
        assert match.matched_chunks == len(keys), "the cluster lost chunks"
        old = self._found.pop(len(keys), None)
        if old is not None:
            await self._client.release(old)
        self._found[len(keys)] = match
        return match
