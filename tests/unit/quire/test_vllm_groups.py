"""Decisions of the vLLM connector for models whose layers keep different parts of a prefix, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.integrations.vllm.groups import Group, Kind
from quire.integrations.vllm.plan import LoadPlan, StepPlan, Unstored
from tests.unit.quire.vllm_scheduler import REQUEST_BLOCKS, Client, Request, World, close_clients

FULL = Group(0, ("full",), Kind.FULL, 32, 8192)
WINDOW = Group(1, ("window",), Kind.WINDOW, 32, 8192, reach=64)
STATE = Group(1, ("state",), Kind.STATE, 32, 8192)
ALL = [10, 11, 12, 13, 14, 15, 16, 17]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_clients()


def _matched(world: World, request: Request, computed: int = 0) -> int | None:
    world.matching.arrived(request)
    world.client.answer()
    return world.matching.matched(request, computed)[0]


def _loads(plan: StepPlan) -> dict[int, LoadPlan]:
    return {load.group: load for load in plan.loads}


@pytest.mark.parametrize(
    ("group", "tokens", "first"),
    [
        (FULL, 256, 0),
        (WINDOW, 63, 0),
        (WINDOW, 95, 1),
        (WINDOW, 96, 1),
        (WINDOW, 256, 6),
        (Group(0, ("chunk",), Kind.CHUNKED, 32, 1, reach=128), 255, 4),
        (Group(0, ("chunk",), Kind.CHUNKED, 32, 1, reach=128), 256, 8),
        (STATE, 256, 7),
    ],
)
def test_what_the_next_token_reads(group: Group, tokens: int, first: int) -> None:
    assert group.first_read(tokens) == first


def test_the_group_that_has_least_counts() -> None:
    """And each has a key space of its own: vLLM has one hash for all."""
    client = Client(8)
    world, request = World(client, groups=(FULL, WINDOW)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 256
    assert len(client.asked) == 2 and not set(client.asked[0]) & set(client.asked[1])


def test_of_a_window_only_what_is_read_is_loaded() -> None:
    world, request = World(Client(8), groups=(FULL, WINDOW)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 256
    world.matching.allocated(request, [ALL, [0, 0, 0, 0, 0, 0, 18, 19]], 256)
    loads = _loads(world.matching.step([], lambda _: []))
    assert (loads[0].first, loads[0].blocks) == (0, tuple(ALL))
    assert (loads[1].first, loads[1].blocks) == (6, (18, 19))


def test_a_window_that_begins_in_what_vllm_has() -> None:
    world, request = World(Client(8), groups=(FULL, WINDOW)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request, 224) == 32
    world.matching.allocated(request, [ALL, [0, 0, 0, 0, 0, 0, 5, 19]], 32)
    loads = _loads(world.matching.step([], lambda _: []))
    assert (loads[0].first, loads[0].blocks) == (7, (17,))
    assert (loads[1].first, loads[1].blocks) == (7, (19,))


def test_a_load_of_which_nothing_is_read_is_still_told() -> None:
    """vLLM waits for its report. The leases of the other groups are released."""
    chunked = [Group(number, (f"{number}",), Kind.CHUNKED, 32, 8192, reach=128) for number in range(2)]
    world, request = World(Client(8), groups=chunked), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 256
    world.matching.allocated(request, [[0] * 8, [0] * 8], 256)
    (load,) = world.matching.step([], lambda _: []).loads
    assert load.blocks == ()
    world.client.answer()
    assert world.client.released == [b"lease2"]


def test_a_prefix_ends_where_blocks_of_all_groups_do() -> None:
    wide = Group(0, ("wide",), Kind.FULL, 96, 8192)
    world, request = World(Client(8), groups=(wide, WINDOW)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 192


def test_a_prefix_ends_at_the_last_state() -> None:
    client = Client(7, states={"m1": {1, 4, 7}})
    world, request = World(client, groups=(FULL, STATE)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 160, "seven blocks of the other group"
    world.matching.allocated(request, [ALL, [0, 0, 0, 0, 25, 0, 0, 0]], 160)
    loads = _loads(world.matching.step([], lambda _: []))
    assert (loads[0].first, loads[0].blocks) == (0, (10, 11, 12, 13, 14))
    assert (loads[1].first, loads[1].blocks) == (0, (25,)), "the first chunk of what was leased"
    assert len(loads[1].found[0].keys) == 1


def test_without_a_state_nothing_is_loaded() -> None:
    client = Client(7, states={"m1": {7}})
    world, request = World(client, groups=(FULL, STATE)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 0
    world.client.answer()
    assert client.released == [b"lease1"], "of the other group"


def test_states_are_stored_by_themselves_and_once() -> None:
    client = Client(2, states={"m1": {1}})
    world, request = World(client, groups=(FULL, STATE)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 64
    tables = [ALL, [0, 21, 0, 23, 0, 0, 0, 27]]
    offered = {"r": [(1, 21, 64), (1, 23, 128), (1, 27, 250)]}

    def stored() -> list[tuple[int, int, tuple[int, ...]]]:
        plan = world.matching.step([("r", 64, 64)], lambda _: tables, offered)
        return [(store.group, len(store.keys[0]), store.blocks) for store in plan.stores]

    assert stored() == [(1, 1, (23,)), (0, 4, (12, 13))], "Quire has the first, and the last is within a block"
    assert stored() == []


def test_what_has_left_its_window_ends_what_is_stored() -> None:
    """Chunks behind it would have no parent."""
    world, request = World(Client(0), groups=(FULL, WINDOW)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 0
    tables = [ALL, [0, 0, 22, 23, 24, 25, 26, 27]]

    def stored(computed: int) -> list[int]:
        return [store.group for store in world.matching.step([("r", computed, 32)], lambda _: tables).stores]

    assert stored(96) == [0] and stored(128) == [0]


def test_groups_share_staging_memory() -> None:
    client = Client(8)
    world = World(client, groups=(FULL, WINDOW), staged_blocks_max=6, direct=False)
    request = Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 128, "four blocks and two of the window"
    world.matching.allocated(request, [ALL, ALL], 0)
    tables = [ALL, [*range(20, 28)]]
    client.has = [0]
    fresh = Request("fresh", blocks=REQUEST_BLOCKS)
    assert _matched(world, fresh) == 0
    stores = world.matching.step([("fresh", 0, 256)], lambda _: tables).stores
    assert [len(store.blocks) for store in stores] == [3, 3]


def test_what_one_group_did_not_store_is_stored_again() -> None:
    world, request = World(Client(0), groups=(FULL, WINDOW)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 0
    tables = [ALL, [*range(20, 28)]]
    assert len(world.matching.step([("r", 0, 64)], lambda _: tables).stores) == 2
    world.matching.unstored([Unstored(request_id="r", group=1, first=0, later=True)])
    (store,) = world.matching.step([("r", 64, 8)], lambda _: tables).stores
    assert (store.group, store.first, store.blocks) == (1, 0, (20, 21))


def test_a_state_that_was_not_stored_stops_no_later_one() -> None:
    client = Client(2, states={"m1": {1}})
    world, request = World(client, groups=(FULL, STATE)), Request(blocks=REQUEST_BLOCKS)
    assert _matched(world, request) == 64
    tables = [ALL, [0, 21, 0, 23, 0, 0, 0, 27]]

    def stored(block: int, tokens: int) -> list[int | None]:
        plan = world.matching.step([], lambda _: tables, {"r": [(1, block, tokens)]})
        return [store.state for store in plan.stores]

    assert stored(23, 128) == [3]
    world.matching.unstored([Unstored(request_id="r", group=1, first=0, later=False, state=3)])
    assert stored(23, 128) == [3] and stored(27, 256) == [7]


def test_states_have_room_before_blocks() -> None:
    client = Client(0, states={"m1": {1}})
    world, request = World(client, groups=(FULL, STATE)), Request(blocks=REQUEST_BLOCKS)
    _matched(world, request)
    stores = world.matching.step([("r", 0, 128)], lambda _: [ALL, [0, 21, 0, 23]], {"r": [(1, 23, 128)]}).stores
    assert [store.group for store in stores] == [1, 0]


def test_a_look_up_that_ends_when_its_request_runs_is_given_back() -> None:
    """vLLM scheduled the request without an answer, as one that reads no cache."""
    client = Client(8)
    world, request = World(client, groups=(FULL, WINDOW)), Request(blocks=REQUEST_BLOCKS)
    assert world.matching.matched(request, 0) == (None, False)
    client.answer()
    world.matching.step([("r", 0, 32)], lambda _: [ALL, ALL])
    client.answer()
    assert sorted(client.released) == [b"lease1", b"lease2"]
