"""Loads of vLLM that receive a prompt while it is computed in several steps: real services."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest

from quire.client import Delivery, QuireClient
from quire.integrations.vllm.plan import FollowPlan
from quire.integrations.vllm.workers.following import Followed, Target, follow, quiet
from quire.model.durability import Durability
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.urgency import Urgency
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fresh_namespace, random_payload, some_keys, store

CHUNKS, FIRST, LIMIT_S = 40, 4, 30.0


class _Load:
    """A load of the chunks from `FIRST` on, as a worker begins it."""

    def __init__(self, client: QuireClient, namespace: Namespace, keys: ChunkKeys, wait_s: float) -> None:
        layout = namespace.layout
        self._layers, self._slab_bytes = layout.num_layers, layout.slice_bytes
        count = len(keys) - FIRST
        self.buffer = client.allocate(count * layout.num_layers * layout.slice_bytes)
        self.begun: list[Delivery] = []
        self.is_wanted = True
        plan = FollowPlan(namespaces=(namespace,), keys=(keys,), wait_s=wait_s)
        target = Target.staged(self.buffer, count, layout.slice_bytes)
        following = follow(client, plan, 0, first=FIRST, target=target, urgency=Urgency(), on_begin=self._note)
        self.task = asyncio.create_task(following)

    def _note(self, delivery: Delivery) -> bool:
        self.begun.append(delivery)
        return self.is_wanted

    def chunks(self, first: int, stop: int) -> npt.NDArray[np.uint8]:
        """(layers, chunks, slab bytes) of chunks of the prompt."""
        rows = self.buffer.layers(self._layers, CHUNKS - FIRST, self._slab_bytes)
        return rows[:, first - FIRST : stop - FIRST]

    async def end(self) -> Followed:
        async with asyncio.timeout(LIMIT_S):
            followed = await self.task
            if followed.last is not None:
                await followed.last.arrival(self._layers - 1)
                await quiet(followed.last)
        return followed


@contextlib.asynccontextmanager
async def _loading(
    cluster: LocalCluster, wait_s: float
) -> AsyncIterator[tuple[QuireClient, _Load, Namespace, ChunkKeys]]:
    async with QuireClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys = some_keys(namespace, CHUNKS)
        load = _Load(client, namespace, keys, wait_s)
        yield client, load, namespace, keys
        load.task.cancel()
        await asyncio.gather(load.task, return_exceptions=True)
        for delivery in load.begun:
            await quiet(delivery)
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
        followed = await load.end()
        assert followed.chunks == CHUNKS
        assert np.array_equal(load.chunks(FIRST, CHUNKS), payload[:, FIRST:])


async def test_what_is_stored_when_the_wait_is_over_has_come(cluster: LocalCluster) -> None:
    async with _loading(cluster, 1.0) as (client, load, namespace, keys):
        payload = random_payload(namespace, CHUNKS)
        await store(client, namespace, keys.run(0, 20), payload[:, :20], durability=Durability.MEMORY)
        followed = await load.end()
        assert followed.chunks == 20 and not load.task.cancelled()
        assert np.array_equal(load.chunks(FIRST, 20), payload[:, FIRST:20])


@pytest.mark.parametrize("stored", [0, FIRST])
async def test_nothing_comes(cluster: LocalCluster, stored: int) -> None:
    async with _loading(cluster, 0.3) as (client, load, namespace, keys):
        if stored:
            payload = random_payload(namespace, stored)
            await store(client, namespace, keys.run(0, stored), payload, durability=Durability.MEMORY)
        followed = await load.end()
        assert (followed.chunks, followed.last) == (FIRST, None)


async def test_a_load_that_is_given_up_asks_no_more(cluster: LocalCluster) -> None:
    async with _loading(cluster, LIMIT_S) as (_, load, *_):
        await _until(lambda: load.begun)
        load.is_wanted = False
        followed = await load.end()
        assert followed.last is None and len(load.begun) < 20
