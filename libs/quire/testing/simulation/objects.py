"""An object tier in memory: slow, failing, full. An object is there when its PUT ends, not when it begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from quire.model.chunk_object import header_at_end
from quire.model.errors import Unavailable
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
        await self.wait(writing=True)
        self.objects[key] = data

    async def get(self, key: bytes) -> bytes | None:
        await self.wait()
        return self.objects.get(key)

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self.wait()
        for key in keys:
            self.objects.pop(key, None)

    async def list(self) -> AsyncIterator[list[bytes]]:
        await self.wait()
        keys = list(self.objects)
        for first in range(0, len(keys), 100):
            yield keys[first : first + 100]

    async def header(self, key: bytes) -> bytes | None:
        await self.wait()
        data = self.objects.get(key)
        return header_at_end(data) if data is not None else None

    async def wait(self, *, writing: bool = False) -> None:
        """As long as a request takes. Raises `Unavailable`."""
        await asyncio.sleep(self._loop.random.uniform(*self.latency_s))
        if self.failing:
            raise Unavailable("the object tier fails")
        if writing and self.full:
            raise Unavailable("the object tier is full")


class SimBlobs:
    """The S3 frontend's `Blobs` port, in the same object tier: as slow, failing and full as that."""

    def __init__(self, tier: SimObjects, loop: SimulatedLoop) -> None:
        self._tier = tier
        self._loop = loop
        self.blobs: dict[str, bytes] = {}
        self.missed: list[str] = []

    def new_name(self) -> str:
        return f"{self._loop.random.getrandbits(128):032x}"

    async def write(self, name: str, data: bytes) -> None:
        await self._tier.wait(writing=True)
        self.blobs[name] = bytes(data)

    async def read(self, name: str, start: int, end: int) -> memoryview:
        await self._tier.wait()
        if name not in self.blobs:
            self.missed.append(name)
            raise Unavailable("the object tier has not (any more) what was looked for")
        return memoryview(self.blobs[name])[start:end]

    async def delete(self, name: str) -> None:
        await self._tier.wait()
        self.blobs.pop(name, None)
