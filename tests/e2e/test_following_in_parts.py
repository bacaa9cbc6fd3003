"""Loads of vLLM that receive a prompt while it is computed in several steps: real services."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest

from quire.client import AsyncClient, Delivery
from quire.integrations.vllm.plan import FollowPlan
from quire.integrations.vllm.workers.following import Target, follow, quiet
from quire.model.durability import Durability
from quire.model.errors import PeerLost
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.urgency import Urgency
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fresh_namespace, random_payload, some_keys, store

CHUNKS, FIRST, LIMIT_S = 40, 4, 30.0


class _Load:
    """A load of the chunks from `FIRST` on, as a worker begins it."""

    def __init__(self, client: AsyncClient, namespace: Namespace, keys: ChunkKeys, wait_s: float) -> None:
        layout = namespace.layout
        self._layers, self._slab_bytes = layout.num_layers, layout.slice_bytes
        count = len(keys) - FIRST
        self.buffer = client.allocate(count * layout.num_layers * layout.slice_bytes)
        self.delivery: Delivery | None = None
        self.abandoned = False
        self.arrived = 0
        plan = FollowPlan(namespaces=(namespace,), keys=(keys,), wait_s=wait_s)
        target = Target.staged(self.buffer, count, layout.slice_bytes)
        self.task = asyncio.create_task(follow(client, plan, 0, FIRST, target, Urgency(), self))

    def note(self, *, arrived: int) -> None:
        self.arrived = arrived

    def chunks(self, first: int, stop: int) -> npt.NDArray[np.uint8]:
        """(layers, chunks, slab bytes) of chunks of the prompt."""
        rows = self.buffer.layers(self._layers, CHUNKS - FIRST, self._slab_bytes)
        return rows[:, first - FIRST : stop - FIRST]

    async def end(self) -> int:
        """How many chunks came."""
        async with asyncio.timeout(LIMIT_S):
            return await self.task


@contextlib.asynccontextmanager
async def _loading(
    cluster: LocalCluster, wait_s: float
) -> AsyncIterator[tuple[AsyncClient, _Load, Namespace, ChunkKeys]]:
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys = some_keys(namespace, CHUNKS)
        load = _Load(client, namespace, keys, wait_s)
        yield client, load, namespace, keys
        load.task.cancel()
        await asyncio.gather(load.task, return_exceptions=True)
        if load.delivery is not None:
            load.delivery.abandon()
            await quiet(load.delivery)
        load.buffer.close()


async def _until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_each_part_is_there_before_the_next_one_is_stored(cluster: LocalCluster) -> None:
    async with _loading(cluster, LIMIT_S) as (client, load, namespace, keys):
        payload = random_payload(namespace, CHUNKS)
        for stop in (10, 25, CHUNKS):
            first = max(FIRST, {10: 0, 25: 10, CHUNKS: 25}[stop])
            await store(client, namespace, keys.run(0, stop), payload[:, :stop], durability=Durability.MEMORY)
            await _until(
                lambda first=first, stop=stop: np.array_equal(load.chunks(first, stop), payload[:, first:stop])
            )
            assert stop == CHUNKS or not load.task.done()
        assert await load.end() == CHUNKS
        assert np.array_equal(load.chunks(FIRST, CHUNKS), payload[:, FIRST:])


async def test_what_is_stored_when_the_wait_is_over_has_come(cluster: LocalCluster) -> None:
    async with _loading(cluster, 1.0) as (client, load, namespace, keys):
        payload = random_payload(namespace, CHUNKS)
        await store(client, namespace, keys.run(0, 20), payload[:, :20], durability=Durability.MEMORY)
        assert await load.end() == 20
        assert np.array_equal(load.chunks(FIRST, 20), payload[:, FIRST:20])


@pytest.mark.parametrize("stored", [0, FIRST])
async def test_nothing_comes(cluster: LocalCluster, stored: int) -> None:
    async with _loading(cluster, 0.3) as (client, load, namespace, keys):
        if stored:
            payload = random_payload(namespace, stored)
            await store(client, namespace, keys.run(0, stored), payload, durability=Durability.MEMORY)
        assert (await load.end(), load.arrived) == (FIRST, 0)


async def test_another_engine_may_store_what_one_has_not(cluster: LocalCluster) -> None:
    """A store is cancelled after its first layer; another one of the same chunks begins then."""
    async with _loading(cluster, LIMIT_S) as (client, load, namespace, keys):
        payload = random_payload(namespace, CHUNKS)
        source = client.allocate(payload.nbytes)
        assert source.view is not None
        source.view[:] = payload.reshape(-1)
        session = await client.store(namespace, keys, 0, source)
        session.layer_ready(0)
        await _until(lambda: load.arrived == 1)
        await session.cancel()
        source.close()
        await store(client, namespace, keys, payload, durability=Durability.MEMORY)
        assert await load.end() == CHUNKS
        assert np.array_equal(load.chunks(FIRST, CHUNKS), payload[:, FIRST:])


async def test_a_load_that_is_given_up_ends(cluster: LocalCluster) -> None:
    async with _loading(cluster, LIMIT_S) as (_, load, *_):
        await _until(lambda: load.delivery)
        assert load.delivery is not None
        load.abandoned = True
        load.delivery.abandon()
        with pytest.raises(PeerLost, match="cancelled"):
            await load.end()
