"""Fetching from the object tier takes bounded memory, and ends where there is none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.model.durability import Durability
from quire.model.errors import PoolFull
from quire.model.index import ChunkRecord
from quire.testing import FakeClock
from quire_storage.core import events as ev
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk, Header
from quire_storage.object_store import ObjectStore, pack_object
from quire_storage.tiers import Tiers

KEYS = [bytes([number]) * 32 for number in range(40)]


def _chunk(key: bytes) -> Chunk:
    payload = np.zeros((2, 4096), dtype=np.uint8)
    return Chunk(ChunkRecord(key, b"", key, b""), 2, 4096, row_checksums(payload))


class _Tier:
    description = "counts"

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def get(self, key: bytes) -> bytes:
        self.asked.append(key)
        return bytes(pack_object(_chunk(key), np.zeros((2, 4096), dtype=np.uint8)))


async def test_few_payloads_are_here_at_a_time() -> None:
    """All 40 were, however slowly they were taken."""
    tier: Any = _Tier()
    store = ObjectStore(tier, FakeClock(), 1.0)
    found = []
    async with contextlib.aclosing(store.fetch(KEYS)) as chunks:  # type: ignore[type-var]
        async for header, _ in chunks:
            found.append(header.chunk.key)
            await asyncio.sleep(0)
            assert len(tier.asked) <= len(found) + 8
    assert found == KEYS


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
    tiers._executor = SimpleNamespace(post=posted.append)
    tiers.reserved = reserved
    await tiers._fetch(KEYS)
    assert taken == KEYS[:1]
    assert posted == [ev.FetchFailed(key) for key in KEYS]
