"""Requests of simulated clients that are more than a store or a fetch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from quire.client import AsyncClient
from quire.model.descriptor import DeliveryOrder
from quire.model.errors import KeysInvalid, QuireError
from quire.model.keys import ChunkKeys
from quire.model.urgency import Urgency
from tests.simulation.prefixes import Prefix

if TYPE_CHECKING:
    from tests.simulation.world import Day

_FOLLOW_S = 0.3
_ENDED_S = 1.0  # in which a follower ends, once nothing of a store can arrive any more


async def retain(day: Day, client: AsyncClient, prefix: Prefix, rng: random.Random) -> str:
    """Kept for a while, whatever needs room or is evicted. A later one of the same chunks replaces the time."""
    asked_s, seconds, keys = day.loop.time(), rng.uniform(0.5, 6.0), list(prefix.keys)
    for key in keys:  # one of a tenant on a chunk replaces the one before
        day.history.unleased(("retention", key))
    count = await client.retain(prefix.namespace, prefix.keys, seconds)
    if count:
        day.history.leased(("retention", keys[count - 1]), keys[:count], asked_s, seconds)
    return f"done, {count} retained"


async def garbage(day: Day, client: AsyncClient, prefix: Prefix, rng: random.Random) -> str:
    """Invalid keys: repeated ones are refused, unknown ones in between cost a miss.

    A look-up by a sample need not see a repetition; then the fetch of what it found does.
    """
    keys = list(prefix.keys)
    if rng.random() < 0.5:
        repeated = ChunkKeys(b"".join([keys[0], *keys]))
        buffer = client.allocate(prefix.layout.payload_bytes(len(repeated)))
        try:
            if rng.random() < 0.5:
                lookup = await client.lookup(prefix.namespace, repeated)
                if not lookup.matched_chunks:
                    return "done, nothing found"
                await client.fetch(lookup, buffer)
            else:
                await (await client.store(prefix.namespace, repeated, 0, buffer)).commit()
        except KeysInvalid:
            return "done"
        except QuireError as error:
            return type(error).__name__
        raise day.history.fail("a request that names a key twice was taken", keys[0])
    keys[len(keys) // 2] = rng.randbytes(32)
    mixed = Prefix(prefix.namespace, ChunkKeys(b"".join(keys)))
    return await day.fetch(client, mixed, rng, cancel=False)


async def follow(day: Day, client: AsyncClient, prefix: Prefix, rng: random.Random) -> str:
    """Store and receive the same chunks at a time. The store, or the follower, may be given up; either may be first."""
    cancelled = rng.choice(["", "", "store", "follower"])
    prefix = Prefix(prefix.namespace, prefix.keys.run(0, rng.randrange(1, len(prefix.keys) + 1)))
    if rng.random() < 0.7:
        await client.evict(prefix.namespace, prefix.keys)

    async def store() -> str:
        await asyncio.sleep(rng.choice([0.0, 0.002]))
        return await day.store(client, prefix, rng, cancel=cancelled == "store", whole=True)

    async def receive() -> str:
        await asyncio.sleep(rng.choice([0.0, 0.003, 0.02]))
        order, cancel = rng.choice(list(DeliveryOrder)), cancelled == "follower"
        return await day.retrieve(client, prefix, rng, order, Urgency(), cancel=cancel, follow_s=_FOLLOW_S)

    storing, receiving = (asyncio.create_task(_outcome(each)) for each in (store(), receive()))
    await storing
    if not day.faults:
        await asyncio.wait([receiving], timeout=_FOLLOW_S + _ENDED_S)
        if not receiving.done():
            raise day.history.fail("a follower outlives the store", prefix.keys.at(0))
    return f"{storing.result()}, {await receiving}"


async def _outcome(operation: Awaitable[str]) -> str:
    try:
        return await operation
    except QuireError as error:
        return type(error).__name__
