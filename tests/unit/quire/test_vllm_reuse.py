"""Stores of blocks that an engine sees a second time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.integrations.vllm.scheduler.reuse import BlockReuse
from tests.unit.quire.vllm_scheduler import Client, Request, World, close_clients

BLOCKS = [[11, 12, 13, 14, 15, 16]]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_clients()


def _stored(world: World, request: Request, computed: int) -> list[int]:
    """Run a request whole; the blocks that were stored."""
    world.matching.arrived(request)
    world.client.answer()
    world.matching.matched(request, 0)
    world.client.answer()
    stores = world.matching.step([(request.request_id, 0, computed)], lambda _: BLOCKS).stores
    world.matching.finished(request.request_id)
    return [block for store in stores for block in store.blocks]


def test_a_block_is_stored_when_it_is_seen_twice() -> None:
    world = World(Client(0), settings={"store": "reused"})
    assert _stored(world, Request("1"), 128) == []
    assert _stored(world, Request("2"), 128) == [11, 12, 13, 14]
    fresh = Request("3")
    fresh.block_hashes[2] = b"x" * 32
    assert _stored(world, fresh, 128) == [11, 12], "behind a block that is new all are"


def test_what_was_generated_counts_in_the_next_turn() -> None:
    world, first = World(Client(0), settings={"store": "reused"}), Request("1")
    world.matching.arrived(first)
    first.block_hashes += [b"answer".ljust(32)]
    world.matching.finished("1")
    second = Request("2", blocks=6)
    second.block_hashes[4] = b"answer".ljust(32)
    assert _stored(world, second, 192) == [11, 12, 13, 14, 15]


def test_nothing_is_stored_where_a_user_says_never() -> None:
    world = World(Client(0), settings={"store": "never"})
    assert _stored(world, Request("1"), 128) == [] and _stored(world, Request("2"), 128) == []


def test_of_old_requests_the_first_blocks_are_remembered_for_longest() -> None:
    reuse = BlockReuse(hashes_max=3)
    hashes = [bytes([number]) * 32 for number in range(4)]
    reuse.note(hashes)
    assert reuse.seen(hashes) == 3
    reuse.note([b"x" * 32, b"y" * 32])
    assert reuse.seen(hashes) == 1
