"""Deliveries of chunks whose store is still running: real services, three storage nodes, UCX or shared memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quire.client import AsyncClient, Buffer
from quire.client.lookup import Prompt
from quire.client.retrieval import Retrieval
from quire.client.store import StoreSession
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest, QuireError
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fresh_namespace, random_payload, some_keys, store

_LIMIT_S = 30.0
_UNUSED = 0xEE


@dataclass
class _Prefix:
    namespace: Namespace
    keys: ChunkKeys
    payload: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, chunks: int) -> _Prefix:
        namespace = fresh_namespace()
        return cls(namespace, some_keys(namespace, chunks), random_payload(namespace, chunks, chunks))

    @property
    def layers(self) -> int:
        return self.namespace.layout.num_layers


@contextlib.asynccontextmanager
async def _storing(client: AsyncClient, prefix: _Prefix, first: int = 0, **options: Any) -> AsyncIterator[StoreSession]:
    """A store whose layers the test announces."""
    buffer = client.allocate(prefix.payload[:, first:].nbytes)
    assert buffer.view is not None
    buffer.view[:] = prefix.payload[:, first:].reshape(-1)
    session = await client.store(prefix.namespace, prefix.keys, first, buffer, **options)
    try:
        yield session
    finally:
        with contextlib.suppress(QuireError):
            await session.cancel()
        buffer.close()


@dataclass
class _Follower:
    """A retrieval that follows stores, and its memory."""

    prefix: _Prefix
    buffer: Buffer
    retrieval: Retrieval

    @classmethod
    async def begin(cls, client: AsyncClient, prefix: _Prefix, follow_s: float = _LIMIT_S) -> _Follower:
        buffer = client.allocate(prefix.payload.nbytes)
        assert buffer.view is not None
        buffer.view[:] = _UNUSED
        retrieval = await client.retrieve(prefix.namespace, prefix.keys, buffer, follow_s=follow_s)
        return cls(prefix, buffer, retrieval)

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        layout = self.prefix.namespace.layout
        return self.buffer.layers(layout.num_layers, len(self.prefix.keys), layout.slice_bytes)

    async def layer(self, layer: int) -> None:
        assert self.retrieval.delivery is not None
        async with asyncio.timeout(_LIMIT_S):
            await self.retrieval.delivery.layer(layer)
        assert np.array_equal(self.rows[layer], self.prefix.payload[layer]), "announced, and not there"

    async def end(self) -> Any:
        """The summary, once the memory is the follower's own again: long before its time is over."""
        assert self.retrieval.delivery is not None
        async with asyncio.timeout(_LIMIT_S / 3):
            summary = await self.retrieval.delivery.summary()
            await self.retrieval.delivery.quiesced(10)
        return summary


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.LOCAL])
@pytest.mark.parametrize("chunks", [1, 40, 700])
async def test_each_layer_comes_before_the_next_one_is_there(
    cluster: LocalCluster, chunks: int, durability: Durability
) -> None:
    """Two followers receive a layer while the store still waits for the one behind; 700 chunks go to several nodes."""
    async with AsyncClient(cluster.gateway_address) as producer, AsyncClient(cluster.gateway_address) as consumer:
        prefix = _Prefix.of(chunks)
        async with _storing(producer, prefix, durability=durability) as session:
            followers = [await _Follower.begin(client, prefix) for client in (consumer, producer)]
            assert all(each.retrieval.found.arriving_chunks == chunks for each in followers)
            assert not (await consumer.lookup(prefix.namespace, prefix.keys)).matched_chunks, "nothing is acknowledged"
            for layer in range(prefix.layers):
                session.layer_ready(layer)
                await asyncio.gather(*(each.layer(layer) for each in followers))
            summaries = [await each.end() for each in followers]
            assert (await session.commit()).stored_chunks == chunks
        assert all(summary.usable_chunks == chunks for summary in summaries)
        assert all(not outcome.error_code for summary in summaries for outcome in summary.outcomes)
        assert (await consumer.lookup(prefix.namespace, prefix.keys)).matched_chunks == chunks


@pytest.mark.usefixtures("each_way")
async def test_a_follower_may_come_first(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as producer, AsyncClient(cluster.gateway_address) as consumer:
        prefix = _Prefix.of(60)
        following = asyncio.create_task(_Follower.begin(consumer, prefix))
        await asyncio.sleep(0.2)
        assert not following.done()
        async with _storing(producer, prefix, complete=True) as session:
            follower = await asyncio.wait_for(following, _LIMIT_S)
            for layer in range(prefix.layers):
                await follower.layer(layer)
            assert (await follower.end()).usable_chunks == 60
            await session.commit()


@pytest.mark.usefixtures("each_way")
async def test_a_prefix_is_partly_readable_and_partly_arrives(cluster: LocalCluster) -> None:
    """The follower receives both parts, and nothing behind them, when its wait ends."""
    async with AsyncClient(cluster.gateway_address) as producer, AsyncClient(cluster.gateway_address) as consumer:
        prefix = _Prefix.of(600)
        await store(producer, prefix.namespace, prefix.keys.run(0, 300), prefix.payload[:, :300])
        middle = _Prefix(prefix.namespace, prefix.keys.run(0, 500), prefix.payload[:, :500])
        async with _storing(producer, middle, 300) as session:
            follower = await _Follower.begin(consumer, prefix, follow_s=0.3)
            found = follower.retrieval.found
            assert (found.matched_chunks, found.arriving_chunks) == (500, 200)
            for layer in range(prefix.layers):
                session.layer_ready(layer)
            summary = await follower.end()
            assert summary.usable_chunks == 500
            assert np.array_equal(follower.rows[:, :500], prefix.payload[:, :500])
            assert (follower.rows[:, 500:] == _UNUSED).all()
            await session.commit()
            assert found.lease and await consumer.release(found), "over what was readable"


@pytest.mark.usefixtures("each_way")
async def test_a_store_that_is_given_up_ends_its_followers_at_once(cluster: LocalCluster) -> None:
    """The result is partial and typed: the readable chunks have come, and the acknowledged ones stay."""
    async with AsyncClient(cluster.gateway_address) as producer, AsyncClient(cluster.gateway_address) as consumer:
        prefix = _Prefix.of(80)
        await store(producer, prefix.namespace, prefix.keys.run(0, 30), prefix.payload[:, :30])
        async with _storing(producer, prefix, 30) as session:
            follower = await _Follower.begin(consumer, prefix)
            session.layer_ready(0)
            await follower.layer(0)
            await session.cancel()
            summary = await follower.end()
        assert summary.usable_chunks == 30
        assert {each.error_code for each in summary.outcomes if each.error_code} == {"PeerLost"}
        assert np.array_equal(follower.rows[:, :30], prefix.payload[:, :30])
        assert (follower.rows[1:, 30:] == _UNUSED).all(), "of a layer that never was nothing is sent"
        with pytest.raises(QuireError):
            assert follower.retrieval.delivery is not None
            await follower.retrieval.delivery.layer(1)
        assert (await consumer.lookup(prefix.namespace, prefix.keys)).matched_chunks == 30


async def test_a_producer_that_dies_ends_its_followers(cluster: LocalCluster) -> None:
    prefix = _Prefix.of(20)
    async with AsyncClient(cluster.gateway_address) as consumer:
        producer = AsyncClient(cluster.gateway_address)
        await producer.start()
        buffer = producer.allocate(prefix.payload.nbytes)
        session = await producer.store(prefix.namespace, prefix.keys, 0, buffer)
        follower = await _Follower.begin(consumer, prefix)
        session.layer_ready(0)
        await producer.close()
        summary = await follower.end()
        assert summary.usable_chunks == 0 and any(each.error_code for each in summary.outcomes)


async def test_no_more_than_half_of_a_requests_time_is_waited(cluster: LocalCluster) -> None:
    """The client receives an answer before its own deadline."""
    prefix = _Prefix.of(2)
    async with AsyncClient(cluster.gateway_address, timeout_s=6.0) as client:
        buffer = client.allocate(prefix.payload.nbytes)
        retrieval = await client.retrieve(prefix.namespace, prefix.keys, buffer, follow_s=60.0)
        assert retrieval.delivery is None and not buffer.is_busy
        for wrong in (-1.0, float("inf"), float("nan")):
            with pytest.raises(InvalidRequest, match="follow_s"):
                await client.retrieve(prefix.namespace, prefix.keys, buffer, follow_s=wrong)
        buffer.close()


async def test_a_follower_that_is_given_up_costs_the_store_nothing(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as producer, AsyncClient(cluster.gateway_address) as consumer:
        prefix = _Prefix.of(40)
        async with _storing(producer, prefix) as session:
            follower = await _Follower.begin(consumer, prefix)
            assert follower.retrieval.delivery is not None
            await follower.retrieval.delivery.cancel(10)
            for layer in range(prefix.layers):
                session.layer_ready(layer)
            assert (await session.commit()).stored_chunks == 40
        assert not follower.buffer.is_busy


@pytest.mark.parametrize(("unchained", "prompt"), [(True, None), (False, Prompt(10_000, "a100-80gb"))])
async def test_what_is_followed_is_a_prefix_without_advice(
    cluster: LocalCluster, unchained: bool, prompt: Prompt | None
) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        prefix = _Prefix.of(4)
        buffer = client.allocate(prefix.payload.nbytes)
        with pytest.raises(InvalidRequest, match="follow_ms"):
            await client.retrieve(
                prefix.namespace,
                prefix.keys,
                buffer,
                follow_s=1.0,
                unchained=unchained,
                prompt=prompt,
                lease_ttl_ms=0,
            )
        buffer.close()
