"""The ways in which cached KV reaches a consumer that computes layer after layer (ObjectCache, §5.5).

The consumer is emulated: it waits for a layer, then for the layer's compute window. What is waited for is real.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.layout import KvLayout
from quire_tools.timed_delivery import Timing, consume

Bytes = npt.NDArray[np.uint8]
_LEASE_MS: Final = 300_000
_STORE_BYTES: Final = 16 << 20


class LocalPaths:
    """KV in this process's memory: layer-major (the floor), or chunk by chunk. `chunks`: the most that is asked for."""

    def __init__(self, layout: KvLayout, chunks: int) -> None:
        self._layout = layout
        self._layers = layout.num_layers
        rng = np.random.default_rng(7)
        self._chunk_major = rng.integers(0, 256, (chunks, self._layers, layout.slice_bytes), dtype=np.uint8)
        self._layer_major = np.ascontiguousarray(self._chunk_major.transpose(1, 0, 2))
        self._target = np.empty_like(self._layer_major)
        self._threads = ThreadPoolExecutor(1, "local")

    async def optimum(self, chunks: int, window_s: float) -> Timing:
        """opt-local-LW: pre-aggregated, so that a layer is one copy."""
        return await self._layerwise(lambda layer: self._copy(layer, chunks), window_s)

    async def layerwise(self, chunks: int, window_s: float) -> Timing:
        """Local-DRAM-LW: a layer is gathered from the chunks while the one before computes."""
        return await self._layerwise(lambda layer: self._gather(layer, chunks), window_s)

    async def chunkwise(self, chunks: int, window_s: float) -> Timing:
        """Local-DRAM-CW: everything is there before the first layer computes."""
        loop, started = asyncio.get_running_loop(), time.monotonic()
        for layer in range(self._layers):
            await loop.run_in_executor(self._threads, self._gather, layer, chunks)
        complete = time.monotonic()

        async def arrival(layer: int) -> float:
            return complete

        return await consume(arrival, self._layers, window_s, started)

    def close(self) -> None:
        self._threads.shutdown()

    async def _layerwise(self, fill: Callable[[int], None], window_s: float) -> Timing:
        loop, started = asyncio.get_running_loop(), time.monotonic()

        def filled(layer: int) -> float:
            fill(layer)
            return time.monotonic()

        filling = [loop.run_in_executor(self._threads, filled, layer) for layer in range(self._layers)]

        async def arrival(layer: int) -> float:
            return await filling[layer]

        return await consume(arrival, self._layers, window_s, started)

    def _copy(self, layer: int, chunks: int) -> None:
        np.copyto(self._target[layer, :chunks], self._layer_major[layer, :chunks])

    def _gather(self, layer: int, chunks: int) -> None:
        np.copyto(self._target[layer, :chunks], self._chunk_major[:chunks, layer])
