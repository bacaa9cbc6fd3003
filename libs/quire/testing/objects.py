"""An object tier in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from quire.model.chunk_object import header_at_end


class MemoryObjects:
    """The `ObjectTier` port of a storage node."""

    description = "memory of this process"

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}

    async def put(self, key: bytes, data: bytes) -> None:
        self.objects[key] = bytes(data)

    async def get(self, key: bytes) -> bytes | None:
        return self.objects.get(key)

    async def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    async def list(self) -> AsyncIterator[list[bytes]]:
        keys = list(self.objects)
        for first in range(0, len(keys), 100):
            yield keys[first : first + 100]

    async def header(self, key: bytes) -> bytes | None:
        data = self.objects.get(key)
        return header_at_end(data) if data is not None else None
