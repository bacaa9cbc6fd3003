"""Chunks that are no prefix: each is stored, read and evicted on its own."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import TYPE_CHECKING

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from tests.simulation.contents import check_chunk
from tests.simulation.prefixes import LAYOUT, Prefix, content

if TYPE_CHECKING:
    from tests.simulation.world import Day

_COUNT = 12
_QUIET_S = 35.0


class UnchainedLoad:
    """What clients do with such chunks of one namespace, and what must hold at the end of a day."""

    def __init__(self, day: Day) -> None:
        self._day = day
        names = (f"unchained {number}".encode() for number in range(_COUNT))
        namespace = Namespace("objects", "v1", LAYOUT, b"tenant-0")
        self.chunks = Prefix(namespace, ChunkKeys(b"".join(hashlib.sha256(name).digest() for name in names)))

    async def operate(self, client: AsyncClient, rng: random.Random) -> str:
        """Store some of the chunks, read all that are there, or evict one."""
        match rng.choice(["store", "store", "read", "read", "evict"]):
            case "store":
                return await self._store(client, rng)
            case "read":
                await self._read(client)
                return "done"
            case _:
                one = self.chunks.keys.pick([rng.randrange(_COUNT)])
                return f"done, {await client.evict(self.chunks.namespace, one)} went"

    async def check(self, client: AsyncClient) -> None:
        """All that was acknowledged can be read."""
        history = self._day.history
        promised = [key for key in self.chunks.keys if key in history.promises]
        for _ in range(_COUNT + self._day.storage_nodes + 1):
            delivered = await self._read(client)
            missing = [key for key in promised if key not in delivered]
            if not missing:
                return
            await asyncio.sleep(1.0)
        raise history.fail("acknowledged, and no part of any prefix: it cannot be read", missing[0])

    async def _store(self, client: AsyncClient, rng: random.Random) -> str:
        day, layout = self._day, self.chunks.layout
        keys = self.chunks.keys.pick(sorted(rng.sample(range(_COUNT), rng.randrange(1, 5))))
        level, began_s, disturbed = rng.choice(list(Durability)), day.loop.time(), day.disturbed
        day.history.stores(list(keys), began_s)
        async with day.buffer(client, self.chunks, len(keys)) as buffer:
            rows = buffer.layers(layout.num_layers, len(keys), layout.slice_bytes)
            for at, key in enumerate(keys):
                rows[:, at] = content(key, 0, layout)
                day.history.sent(key, 0)
            session = await client.store(
                self.chunks.namespace, keys, 0, buffer, durability=level, complete=True, unchained=True
            )
            day.acknowledge(await day.finish(session), keys, level, began_s, disturbed)
        return "done"

    async def _read(self, client: AsyncClient) -> set[bytes]:
        """Read all that are there, and check their bytes; the keys of those that arrived."""
        layout, keys = self.chunks.layout, list(self.chunks.keys)
        async with self._day.buffer(client, self.chunks, _COUNT) as buffer:
            rows = buffer.layers(layout.num_layers, _COUNT, layout.slice_bytes)
            retrieval = await client.retrieve(
                self.chunks.namespace, self.chunks.keys, buffer, lease_ttl_ms=0, unchained=True
            )
            if retrieval.delivery is None:
                return set()
            try:
                summary = await retrieval.delivery.summary()
                marks = zip(retrieval.found.there, summary.delivered, strict=True)
                delivered = [at for at, mark in marks if mark]
                for at in delivered:
                    check_chunk(self._day.history, keys[at], rows[:, at], layout)
                return {keys[at] for at in delivered}
            finally:
                await retrieval.delivery.quiesced(_QUIET_S)
