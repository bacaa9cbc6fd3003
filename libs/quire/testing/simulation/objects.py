"""An object tier in memory: slow, failing, full. An object is there when its PUT ends, not when it begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from quire.chunk_object import header_at_end
from quire.errors import Unavailable
from quire.testing.simulation.loop import SimulatedLoop


class SimObjects:
    """The `ObjectTier` port. `failing`: every request fails; `full`: every PUT does; `latency_s`: bounds."""

    description = "simulated"

    def __init__(self, loop: SimulatedLoop, latency_s: tuple[float, float] = (0.002, 0.03)) -> None:
        self._loop = loop
        self.latency_s = latency_s
        self.objects: dict[bytes, bytes] = {}
        self.failing = False
        self.full = False

    async def put(self, key: bytes, data: bytes) -> None:
        await self._wait()
        if self.full:
            raise Unavailable("the object tier is full")
        self.objects[key] = data

    async def get(self, key: bytes) -> bytes | None:
        await self._wait()
        return self.objects.get(key)

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self._wait()
        for key in keys:
            self.objects.pop(key, None)

    async def list(self) -> AsyncIterator[list[bytes]]:
        await self._wait()
        keys = list(self.objects)
        for first in range(0, len(keys), 100):
            yield keys[first : first + 100]

    async def header(self, key: bytes) -> bytes | None:
        await self._wait()
        data = self.objects.get(key)
        return header_at_end(data) if data is not None else None

    async def _wait(self) -> None:
        await asyncio.sleep(self._loop.random.uniform(*self.latency_s))
        if self.failing:
            raise Unavailable("the object tier fails")
