"""Assignment of prompts to engines through the real services."""

from __future__ import annotations

import pytest

from quire.client import AsyncClient
from quire.model.assignment import Engine
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fresh_namespace, random_payload, some_keys, store


async def test_what_is_stored_and_what_engines_have_counts(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 200), random_payload(namespace, 200)
        tokens = 200 * namespace.layout.chunk_tokens + 8
        slow = [Engine(name=name, tokens_per_s=100.0, queued_tokens=queued) for name, queued in (("a", 0), ("b", 500))]
        computed = await client.assign(namespace, keys, tokens, slow)
        assert (computed.engine, computed.take_chunks) == ("a", 0)
        assert computed.ttft_s[1] - computed.ttft_s[0] == pytest.approx(5.0, abs=1e-3)
        await store(client, namespace, keys, payload, durability=Durability.MEMORY)
        loaded = await client.assign(namespace, keys, tokens, slow)
        assert (loaded.engine, loaded.take_chunks) == ("a", 200)
        assert loaded.ttft_s[0] < computed.ttft_s[0] / 10
        own = [*slow, Engine(name="c", tokens_per_s=100.0, cached_tokens=tokens)]
        assert (await client.assign(namespace, keys, tokens, own)).engine == "c"


@pytest.mark.parametrize("tokens", [-1, 0, 10, 1 << 32])
async def test_a_prompt_is_no_shorter_than_its_chunks(cluster: LocalCluster, tokens: int) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        with pytest.raises(InvalidRequest, match="prompt_tokens"):
            await client.assign(namespace, some_keys(namespace, 2), tokens, [Engine(name="a", tokens_per_s=1.0)])
        with pytest.raises(InvalidRequest, match="engines"):
            await client.assign(namespace, some_keys(namespace, 2), 100, [])
