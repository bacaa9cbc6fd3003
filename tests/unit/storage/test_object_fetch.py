"""Fetching from the object tier takes bounded memory, and ends where there is none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.model.durability import Durability
from quire.model.errors import DeadlineExceeded, PoolFull, Unavailable
from quire.model.index import ChunkRecord
from quire.testing import FakeClock
from quire.testing.objects import MemoryObjects
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk, Header
from quire_storage.core.residency import events as ev
from quire_storage.ports import ObjectName
from quire_storage.tiers.object_tier import ChunkObjects, pack_object
from quire_storage.tiers.tiers import Tiers

KEYS = [bytes([number]) * 32 for number in range(40)]


def _chunk(key: bytes) -> Chunk:
    payload = np.zeros((2, 4096), dtype=np.uint8)
    return Chunk(ChunkRecord(key, b"", key, b""), 2, 4096, row_checksums(payload))


class _Tier:
    description = "counts"

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def get(self, name: ObjectName) -> bytes:
        self.asked.append(name[0])
        return bytes(pack_object(_chunk(name[0]), np.zeros((2, 4096), dtype=np.uint8)))


async def test_few_payloads_are_here_at_a_time() -> None:
    """All 40 were, however slowly they were taken."""
    tier: Any = _Tier()
    store = ChunkObjects(tier, FakeClock(), 1.0)
    found = []
    async with contextlib.aclosing(store.fetch(dict.fromkeys(KEYS, 1))) as chunks:  # type: ignore[type-var]
        async for header, _ in chunks:
            found.append(header.chunk.key)
            await asyncio.sleep(0)
            assert len(tier.asked) <= len(found) + 8
    assert found == KEYS


@pytest.mark.parametrize(("stored", "known"), [(7, 7), (7, 0), (7, 9), (0, 0), (0, 9)])
async def test_an_object_of_any_generation_is_found(stored: int, known: int) -> None:
    """The index names another one where it was rebuilt, or none where it does not answer. 0: of an earlier release."""
    tier, key = MemoryObjects(), KEYS[0]
    payload = np.zeros((2, 4096), dtype=np.uint8)
    await tier.put((key, stored), pack_object(_chunk(key), payload))
    store = ChunkObjects(tier, FakeClock(), 1.0)
    found = [header.chunk.key async for header, _ in store.fetch({key: known, KEYS[1]: known})]
    assert found == [key]
    assert store.found_absent(KEYS[:2]) == {KEYS[1]}
    assert await store.still_absent(KEYS[:2]) == {KEYS[1]}


async def test_of_several_objects_any_sound_one_is_read() -> None:
    tier, key = MemoryObjects(), KEYS[0]
    sound = pack_object(_chunk(key), np.zeros((2, 4096), dtype=np.uint8))
    await tier.put((key, 5), sound)
    await tier.put((key, 7), sound[:100] + b"x" + sound[101:])
    await tier.put((key, 9), sound[:100])
    store = ChunkObjects(tier, FakeClock(), 1.0)
    assert [header.chunk.key async for header, _ in store.fetch({key: 7})] == [key]
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
    assert [header.chunk.key async for header, _ in store.fetch({key: 6})] == [key]


async def test_objects_are_not_deleted_after_their_time() -> None:
    """By then the chunk may be stored again: what a slow store lists may be of a later entry."""
    tier, clock = MemoryObjects(), FakeClock()
    store = ChunkObjects(tier, clock, 5.0)
    await tier.put((KEYS[0], 5), b"x")
    with pytest.raises(DeadlineExceeded):
        await store.delete(KEYS[:1], clock.now_ms() + 4_999)
    assert tier.objects


async def test_the_index_is_asked_for_the_names_of_objects() -> None:
    """In one call, of those chunks only that are fetched. Without an answer the names are looked for."""
    asked: list[list[bytes]] = []

    async def object_generations(records: Any) -> tuple[dict[bytes, int], bool]:
        asked.append([record.key for record in records])
        if len(asked) > 1:
            raise Unavailable("no index")
        return {KEYS[0]: 7}, True

    tiers: Any = object.__new__(Tiers)
    records = [_chunk(key).record for key in KEYS[:3]]
    tiers._registry = SimpleNamespace(object_generations=object_generations)
    assert await tiers.object_generations(KEYS[:2], records) == {KEYS[0]: 7, KEYS[1]: 0}
    assert await tiers.object_generations(KEYS[2:5], records) == dict.fromkeys(KEYS[2:5], 0)
    assert asked == [KEYS[:2], KEYS[2:3]]
    assert await tiers.object_generations(KEYS[5:6], records) == {KEYS[5]: 0} and len(asked) == 2


async def test_without_memory_a_fetch_ends_at_once() -> None:
    """Each chunk waited for memory by itself, and readers until the last had failed."""
    posted: list[Any] = []
    taken: list[bytes] = []

    async def fetch(keys: Any) -> AsyncIterator[tuple[Header, Any]]:
        for key in keys:
            taken.append(key)
            yield Header(_chunk(key), Durability.OBJECT), np.zeros((2, 4096), dtype=np.uint8)

    @contextlib.asynccontextmanager
    async def reserved(shape: Any, count: int) -> AsyncIterator[Any]:
        raise PoolFull("no memory")
        yield

    tiers: Any = object.__new__(Tiers)
    tiers.objects = SimpleNamespace(fetch=fetch)
    tiers._records = {}
    tiers._executor = SimpleNamespace(post=posted.append)
    tiers.reserved = reserved
    await tiers._fetch(KEYS)
    assert taken == KEYS[:1]
    assert posted == [ev.FetchFailed(key) for key in KEYS]
