"""The router with real services: it names a prompt's blocks as an engine does, and Quire says who has them."""

from __future__ import annotations

import asyncio
import json

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from quire_tools.router.block_names import BlockNaming
from tests.e2e.helpers import fresh_namespace, random_payload, store
from tests.unit.router.fake_engines import FakeEngine, routed

PARENT = bytes(32)


async def test_a_stored_prompt_is_not_counted_as_work(cluster: LocalCluster) -> None:
    """Of a prompt that Quire has, only the last token counts as queued."""
    namespace, salt = fresh_namespace(), b"of the tenant"
    description = {
        "quire_names": "names",
        "quire_blocks": {
            "namespace": namespace.to_record(),
            "hash_tokens": namespace.layout.chunk_tokens,
            "parent": PARENT.hex(),
        },
    }
    naming = BlockNaming.of(description, salt)
    assert naming is not None
    tokens = list(range(100 * namespace.layout.chunk_tokens + 1))
    gate = asyncio.Event()
    async with (
        AsyncClient(cluster.gateway_address) as client,
        FakeEngine("one", description=description, answers_after=gate).run() as one,
        FakeEngine("two", description=description, answers_after=gate).run() as two,
        routed([one, two], gateway=cluster.gateway_address, tenant_salt=salt, tokens_per_s=100.0, assign_s=30.0) as (
            router,
            user,
        ),
    ):
        keys = naming.keys(tokens, "")
        await store(client, naming.namespace, keys, random_payload(naming.namespace, 100), durability=Durability.MEMORY)
        asking = [asyncio.create_task(user.ask(tokens, stream=True)) for _ in range(3)]
        async with asyncio.timeout(30):
            while len(one.asked) + len(two.asked) < 3:
                await asyncio.sleep(0.01)
        assert sorted(engine.queued_tokens for engine in router.engines) in ([0, 3], [1, 2])
        gate.set()
        assert {status for status, *_ in await asyncio.gather(*asking)} == {200}


async def test_without_quire_requests_are_served() -> None:
    description = {
        "quire_names": "names",
        "quire_blocks": {"namespace": fresh_namespace().to_record(), "hash_tokens": 16, "parent": PARENT.hex()},
    }
    (port,) = free_ports(1)
    async with (
        FakeEngine("one", description=description).run() as one,
        FakeEngine("two", description=description).run() as two,
        routed([one, two], gateway=f"127.0.0.1:{port}") as (_, user),
    ):
        answers = [await user.ask(list(range(64)), stream=number % 2 == 0) for number in range(8)]
        assert {status for status, *_ in answers} == {200}


async def test_the_request_is_one_trace() -> None:
    """The client's trace goes on to the engine."""
    async with FakeEngine("one").run() as one, routed([one]) as (_, user):
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        question = {"prompt": [1, 2, 3]}
        async with user.session.post("/v1/completions", json=question, headers={"traceparent": trace}) as answer:
            assert answer.status == 200, json.dumps(await answer.json())
        assert one.traces[0].split("-")[1] == trace.split("-")[1]
