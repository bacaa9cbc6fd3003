"""An object tier in memory: slow, failing, full. An object is there when its PUT ends, not when it begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from random import Random
from typing import Any, Final

from quire.model.chunk_object import ObjectRange
from quire.model.errors import Unavailable
from quire.testing.objects import MemoryObjects, Name
from quire.testing.simulation.loop import SimulatedLoop

_LATE_S: Final = 1.0


class SimObjects:
    """The `ObjectTier` port. `failing`: every request fails, reads of ranges in several ways; `full`: every PUT does.

    `latency_s`: bounds of the time of a request. `refusal`: raised for too many requests.

    `late_s`: if not 0, each PUT and DELETE is executed a second time, up to `late_s` seconds later, as happens when a
    client repeats a request whose first copy is still in flight.
    """

    description = "simulated"

    def __init__(self, loop: SimulatedLoop, latency_s: tuple[float, float] = (0.002, 0.03)) -> None:
        self._loop = loop
        self._stored = MemoryObjects()
        self.latency_s = latency_s
        self.late_s = 0.0
        self.failing = False
        self.full = False
        self.refusal: type[Unavailable] = Unavailable
        self._reads = 0

    def of(self, key: bytes) -> list[bytes]:
        """Return a chunk's objects of all generations, the newest first."""
        return self._stored.of(key)

    async def put(self, name: Name, data: bytes) -> None:
        await self._changed(self._stored.put, name, data)

    async def get(self, name: Name) -> bytes | None:
        await self.wait()
        return await self._stored.get(name)

    async def read(self, name: Name, start: int, stop: int, *, described: bool = True) -> ObjectRange | None:
        """Read a range. While the tier fails: an error, a refusal, a late answer, a truncated or a rotten one."""
        if not self.failing:
            await self.wait()
            return await self._stored.read(name, start, stop)
        await asyncio.sleep(self._loop.random.uniform(*self.latency_s))
        self._reads += 1
        dice = Random(f"{name[0].hex()}/{start}/{self._reads}")  # draws of the loop decide about everything else
        fault = dice.choice(("error", "refusal", "late", "truncated", "rotten"))
        if fault == "error":
            raise Unavailable("the object tier fails")
        if fault == "refusal":
            raise self.refusal("slow down")
        if fault == "late":
            await asyncio.sleep(_LATE_S)
        part = await self._stored.read(name, start, stop)
        if part is None or fault == "late":
            return part
        data = bytearray(part.data)
        if fault == "truncated":
            del data[len(data) // 2 :]
        elif data:
            data[dice.randrange(len(data))] ^= 1
        return ObjectRange(memoryview(bytes(data)), part.size, part.header)

    async def delete(self, names: Sequence[Name]) -> None:
        await self._changed(self._stored.delete, names)

    async def generations(self, key: bytes) -> list[int]:
        await self.wait()
        return await self._stored.generations(key)

    async def list(self) -> AsyncIterator[list[Name]]:
        await self.wait()
        async for page in self._stored.list():
            yield page

    async def header(self, name: Name) -> bytes | None:
        await self.wait()
        return await self._stored.header(name)

    async def _changed(self, change: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        await self.wait(writing=change == self._stored.put)
        if self.late_s:
            delay_s = self._loop.random.uniform(0.0, self.late_s)
            self._loop.call_later(delay_s, lambda: self._loop.create_task(change(*arguments)))
        await change(*arguments)

    async def wait(self, *, writing: bool = False) -> None:
        """Wait for the time of a request. Raises `Unavailable`."""
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
            raise Unavailable("the object tier has no object of this name")
        return memoryview(self.blobs[name])[start:end]

    async def delete(self, name: str) -> None:
        await self._tier.wait()
        self.blobs.pop(name, None)
