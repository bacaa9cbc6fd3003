"""Objects of chunks: which of several is read, and which are deleted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.model.errors import DeadlineExceeded, Unavailable
from quire.model.records import ChunkRecord
from quire.testing import FakeClock
from quire.testing.objects import MemoryObjects
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.tiers.object_tier import ChunkObjects, pack_object
from quire_storage.tiers.tiers import Tiers

KEYS = [bytes([number]) * 32 for number in range(40)]


def _chunk(key: bytes) -> Chunk:
    payload = np.zeros((2, 4096), dtype=np.uint8)
    return Chunk(ChunkRecord(key, b"", key, b""), 2, 4096, row_checksums(payload))


@pytest.mark.parametrize(("stored", "known"), [(7, 7), (7, 0), (7, 9), (0, 0), (0, 9)])
async def test_an_object_of_any_generation_is_found(stored: int, known: int) -> None:
    """The index names another one where it was rebuilt, or none where it does not answer. 0: of an earlier release."""
    tier, key = MemoryObjects(), KEYS[0]
    payload = np.zeros((2, 4096), dtype=np.uint8)
    await tier.put((key, stored), pack_object(_chunk(key), payload))
    store = ChunkObjects(tier, FakeClock(), 1.0)
    found = await store.chunk(key, known)
    assert found is not None and found[0].chunk.key == key and await store.chunk(KEYS[1], known) is None
    headers = await store.headers({KEYS[1]: known, key: known})
    assert [chunk.key for chunk in headers] == [key] and headers[0].same_content(_chunk(key))
    assert store.found_absent(KEYS[:2]) == {KEYS[1]}
    assert await store.still_absent(KEYS[:2]) == {KEYS[1]}


async def test_of_several_objects_any_sound_one_is_read() -> None:
    tier, key = MemoryObjects(), KEYS[0]
    sound = pack_object(_chunk(key), np.zeros((2, 4096), dtype=np.uint8))
    await tier.put((key, 5), sound)
    await tier.put((key, 7), sound[:100] + b"x" + sound[101:])
    await tier.put((key, 9), sound[:100])
    store = ChunkObjects(tier, FakeClock(), 1.0)
    assert await store.chunk(key, 7) is not None
    assert [chunk.key for chunk in await store.headers({key: 9})] == [key], "the header of 9 is cut off"
    assert [record.key async for record in store.records()] == [key, key], "the one whose header is there, and the 2nd"


async def test_late_requests_affect_no_object_of_a_later_entry() -> None:
    """A DELETE and a PUT that the store carries out after the chunk was stored anew."""
    tier, clock, key = MemoryObjects(), FakeClock(), KEYS[0]
    store, payload = ChunkObjects(tier, clock, 1.0), np.zeros((2, 4096), dtype=np.uint8)
    deleted: list[Any] = []
    carry_out = tier.delete

    async def delete(names: Any) -> None:
        deleted.extend(names)
        await carry_out(names)

    tier.delete = delete  # type: ignore[method-assign]
    await store.put(_chunk(key), payload, 5)
    await tier.put((key, 0), b"of an earlier release")
    await store.delete([key], clock.now_ms() + 60_000)
    assert tier.objects == {} and set(deleted) == {(key, 5), (key, 0)}
    await store.put(_chunk(key), payload, 6)
    kept = dict(tier.objects)
    await carry_out(deleted)
    assert tier.objects == kept
    await tier.put((key, 5), b"a late PUT")
    assert await store.chunk(key, 6) is not None


async def test_objects_are_not_deleted_after_their_time() -> None:
    """By then the chunk may be stored again: what a slow store lists may be of a later entry."""
    tier, clock = MemoryObjects(), FakeClock()
    store = ChunkObjects(tier, clock, 5.0)
    await tier.put((KEYS[0], 5), b"x")
    with pytest.raises(DeadlineExceeded):
        await store.delete(KEYS[:1], clock.now_ms() + 4_999)
    assert tier.objects


async def test_the_index_is_asked_for_the_names_of_objects() -> None:
    """In one call. Without an answer the names are looked for."""
    asked: list[list[bytes]] = []

    async def object_generations(records: Any) -> tuple[dict[bytes, int], bool]:
        asked.append([record.key for record in records])
        if len(asked) > 1:
            raise Unavailable("no index")
        return {KEYS[0]: 7}, True

    tiers: Any = object.__new__(Tiers)
    records = [_chunk(key).record for key in KEYS[:3]]
    tiers._registry = SimpleNamespace(object_generations=object_generations)
    assert await tiers.object_generations(records[:2]) == {KEYS[0]: 7, KEYS[1]: 0}
    assert await tiers.object_generations(records[2:]) == {KEYS[2]: 0}
    assert asked == [KEYS[:2], KEYS[2:3]]
    assert await tiers.object_generations([]) == {} and len(asked) == 2
