"""Stores that are running, as deliveries that follow them see them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.model.errors import PeerLost
from quire.model.keys import ChunkKeys
from quire.model.records import records
from quire_storage.core.pool.slots import Shape
from quire_storage.ingest.arrivals import Arrival, Arrivals
from quire_storage.tiers.tiers import Slots

SHAPE = Shape(3, 4096)
KEYS = [bytes([number]) * 32 for number in range(4)]


def _slots() -> Slots:
    return Slots(1, SHAPE, np.arange(4, dtype=np.int64) * 16_384, 4096)


def _order(store_id: bytes = b"s" * 16) -> Any:
    return SimpleNamespace(records=records(ChunkKeys(b"".join(KEYS)), 0, len(KEYS)), store_id=store_id)


async def test_a_layer_is_there_once_its_checksums_are_taken() -> None:
    """Whoever asks later does not wait, and layers may be taken out of order."""
    arrival = Arrival(KEYS, b"s" * 16, _slots())
    waiting = [asyncio.create_task(arrival.layer(1)) for _ in range(2)]
    await asyncio.sleep(0)
    arrival.reached(range(2, 3))
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    arrival.reached(range(2))
    await asyncio.gather(*waiting, arrival.layer(0), arrival.layer(2))


async def test_a_follower_that_is_cancelled_costs_the_others_nothing() -> None:
    arrival = Arrival(KEYS, b"s" * 16, _slots())
    one, other = (asyncio.create_task(arrival.layer(0)) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.sleep(0)
    arrival.reached(range(3))
    await asyncio.wait([other], timeout=10)
    assert one.cancelled() and other.done() and other.exception() is None


@pytest.mark.parametrize("how", ["error", "cancelled", "given up"])
async def test_followers_fail_with_the_store(how: str) -> None:
    """What arrives afterwards is announced to none, and its chunks are not waited for again."""
    arrivals, release = Arrivals(), asyncio.Event()

    async def store() -> None:
        with arrivals.arriving(_order(), _slots()):
            await release.wait()
            raise PeerLost("the client has gone")

    storing = asyncio.create_task(store())
    await asyncio.sleep(0)
    (chunk, *_) = arrivals.find(KEYS, SHAPE)
    following, changed = asyncio.create_task(chunk.arrival.layer(0)), arrivals.change()
    await asyncio.sleep(0)
    if how == "error":
        release.set()
    elif how == "cancelled":
        storing.cancel()
    else:
        arrivals.fail(b"s" * 16, PeerLost("the store was abandoned"))
    with pytest.raises(PeerLost):
        await following
    assert changed.done() and all(map(arrivals.has_failed, KEYS))
    chunk.arrival.reached(range(3))
    with pytest.raises(PeerLost):
        await chunk.arrival.layer(1)
    assert not arrivals.find(KEYS, SHAPE)
    storing.cancel()
    await asyncio.gather(storing, return_exceptions=True)


async def test_a_store_that_begins_is_noticed() -> None:
    arrivals = Arrivals()
    changed = arrivals.change()
    with arrivals.arriving(_order(), _slots()):
        assert changed.done()
        assert [chunk.at for chunk in arrivals.find(KEYS[1:3], SHAPE)] == [1, 2]
        assert not arrivals.find(KEYS, Shape(3, 8192)), "of another shape"
        changed = arrivals.change()
    assert changed.done() and not arrivals.find(KEYS, SHAPE)
    assert not any(map(arrivals.has_failed, KEYS)), "a store that ends well has not failed"
