"""An object tier in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from quire.model.chunk_object import ObjectRange, header_at_end

Name = tuple[bytes, int]


class MemoryObjects:
    """The `ObjectTier` port of a storage node."""

    description = "memory of this process"

    def __init__(self) -> None:
        self.objects: dict[Name, bytes] = {}

    def of(self, key: bytes) -> list[bytes]:
        """Return a chunk's objects of all generations, the newest first."""
        return [data for name, data in reversed(self.objects.items()) if name[0] == key]

    async def put(self, name: Name, data: bytes) -> None:
        self.objects.pop(name, None)
        self.objects[name] = bytes(data)

    async def get(self, name: Name) -> bytes | None:
        return self.objects.get(name)

    async def read(self, name: Name, start: int, stop: int, *, described: bool = True) -> ObjectRange | None:
        data = self.objects.get(name)
        if data is None:
            return None
        return ObjectRange(memoryview(data)[start:stop], len(data) if described else 0)

    async def delete(self, names: Sequence[Name]) -> None:
        for name in names:
            self.objects.pop(name, None)

    async def generations(self, key: bytes) -> list[int]:
        return [generation for stored_key, generation in reversed(self.objects) if stored_key == key and generation]

    async def list(self) -> AsyncIterator[list[Name]]:
        names = list(self.objects)
        for first in range(0, len(names), 100):
            yield names[first : first + 100]

    async def header(self, name: Name) -> bytes | None:
        data = self.objects.get(name)
        return header_at_end(data) if data is not None else None
