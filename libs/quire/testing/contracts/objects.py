"""The object tier's port: objects by chunk key and generation."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.model.chunk_object import header_at_end, write_chunk_object

ObjectTier = Any
"""What `quire.testing.objects.MemoryObjects` does."""


def _object(key: bytes) -> bytes:
    """A chunk object with a header that names its key."""
    payload = np.frombuffer(key * 8, dtype=np.uint8).reshape(2, 128)
    return write_chunk_object(payload, bytes(4096))


class ObjectTierContract:
    """Fixture `tier`: an empty one."""

    async def test_what_was_put_is_there_until_it_is_deleted(self, tier: ObjectTier) -> None:
        first, second = (b"1" * 32, 7), (b"2" * 32, 7)
        assert await tier.get(first) is None
        await tier.put(first, b"first")
        await tier.put(first, b"second")
        await tier.put(second, b"other")
        assert await tier.get(first) == b"second", "a second put replaces"
        await tier.delete([first])
        assert await tier.get(first) is None and await tier.get(second) == b"other"

    async def test_deleting_what_is_not_there_is_no_error(self, tier: ObjectTier) -> None:
        names = [(bytes([number]) * 32, number % 2) for number in range(20)]
        for name in names[::2]:
            await tier.put(name, b"x")
        await tier.delete(names[::-1])
        await tier.delete([])
        assert [item async for page in tier.list() for item in page] == []

    async def test_objects_of_one_key_are_told_apart_by_generation(self, tier: ObjectTier) -> None:
        """An object of an earlier release counts as generation 0."""
        key = b"k" * 32
        for generation in (3, 2**64 - 1, 0):
            await tier.put((key, generation), str(generation).encode())
        await tier.put((b"l" * 32, 3), b"another key's")
        assert sorted(await tier.generations(key)) == [3, 2**64 - 1]
        await tier.delete([(key, 3)])
        assert await tier.generations(key) == [2**64 - 1]
        assert await tier.get((key, 2**64 - 1)) == str(2**64 - 1).encode() and await tier.get((key, 0)) == b"0"
        assert await tier.generations(b"n" * 32) == []

    async def test_every_object_is_listed_once(self, tier: ObjectTier) -> None:
        names = [(index.to_bytes(32, "big"), index % 3) for index in range(250)]
        for name in names:
            await tier.put(name, b"x")
        await tier.delete(names[:50])
        listed = [name async for page in tier.list() for name in page]
        assert sorted(listed) == names[50:]

    async def test_a_header_is_read_without_the_bytes(self, tier: ObjectTier) -> None:
        """Reading a header returns None without an object, and for an object that is too short."""
        await tier.put((b"k" * 32, 1), _object(b"k" * 32))
        await tier.put((b"s" * 32, 1), b"short")
        header = await tier.header((b"k" * 32, 1))
        assert header is not None and len(header) == 4096
        assert await tier.header((b"n" * 32, 1)) is None and await tier.header((b"s" * 32, 1)) is None

    async def test_a_range_is_one_request(self, tier: ObjectTier) -> None:
        """Fewer bytes where the object ends; with its size, and with its header if the tier has that as metadata."""
        name, raw = (b"k" * 32, 1), _object(b"k" * 32)
        await tier.put(name, raw)
        part = await tier.read(name, 128, 256)
        assert bytes(part.data) == raw[128:256] and part.size == len(raw)
        assert part.header is None or part.header == header_at_end(raw)
        end = await tier.read(name, len(raw) - 10, len(raw) + 10)
        assert bytes(end.data) == raw[-10:]
        assert await tier.read((b"n" * 32, 1), 0, 10) is None
        assert not (await tier.read(name, len(raw) + 10, len(raw) + 20)).data, "behind its end"

    async def test_it_says_what_it_is(self, tier: ObjectTier) -> None:
        assert tier.description
