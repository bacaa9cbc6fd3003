"""Token lists are bounded, and hashed in turns of tenants."""

from __future__ import annotations

import asyncio

import pytest

from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace, block_keys
from quire.model.layout import Dtype, KvLayout
from quire_gateway.access.token_hashing import TOKENS_MAX, TokenHashing

LAYOUT = KvLayout(4, 16, 2, 64, Dtype.BF16)


async def test_keys_are_those_of_the_client() -> None:
    space, hashing = Namespace("m", "1", LAYOUT), TokenHashing()
    assert await hashing.keys(space, range(100), "") == block_keys(space, range(100))
    with pytest.raises(InvalidRequest, match="send keys instead"):
        await hashing.keys(space, range(TOKENS_MAX + 1), "")


async def test_a_neighbour_waits_for_one_list() -> None:
    hashing, order = TokenHashing(), list[bytes]()
    greedy, modest = (Namespace("m", "1", LAYOUT, salt) for salt in (b"greedy", b"modest"))

    async def look_up(space: Namespace, count: int) -> None:
        await hashing.keys(space, range(count), space.tenant)
        order.append(space.tenant_salt)

    tasks = [asyncio.create_task(look_up(greedy, 20_000)) for _ in range(8)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(look_up(modest, 32)))
    await asyncio.gather(*tasks)
    assert order.index(b"modest") <= 2, order
