"""A prompt that one engine computes and another one decodes, without vLLM: what each scheduler decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.integrations.vllm.groups import Group, Kind
from quire.integrations.vllm.plan import Settled, Unstored
from quire.integrations.vllm.settings import Settings
from quire.model.errors import ConfigInvalid, NodeUnavailable
from quire.model.object_part import ObjectPart, ObjectSpeed
from quire.model.ranges import ChunkRange
from tests.unit.quire.vllm_scheduler import GROUP, Client, Request, World, close_clients

STATES = Group(1, ("layers.1",), Kind.STATE, 32, 4096)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_clients()


def _decode(tokens: Any = 128) -> Request:
    """Four blocks and five tokens; `tokens`: what the prefill engine said it stores."""
    parameters = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": None}
    return Request(kv_transfer_params=parameters if tokens is None else {**parameters, "quire_tokens": tokens})


def _matched(world: World, request: Request) -> tuple[int | None, bool]:
    """Return the scheduler's answer once its look-ups are answered."""
    world.matching.matched(request, 0)
    world.client.answer()
    return world.matching.matched(request, 0)


def test_what_is_on_its_way_is_waited_for() -> None:
    """The scheduler keeps no lease on a part of the prompt, and loads all of it as soon as it is stored."""
    world, request = World(Client(0)), _decode()
    assert _matched(world, request) == (None, False)
    world.client.has = [2]
    world.now_s += 0.01
    assert _matched(world, request) == (None, False)
    world.client.has = [4]
    assert world.matching.matched(request, 0) == (None, False), "asked a moment ago"
    world.now_s += 0.01
    assert _matched(world, request) == (128, False)
    assert world.counted["handovers"] == 1 and not world.counted["short_handovers"]
    assert len(world.client.asked) == 3
    assert world.client.released == [b"lease2"]


def test_it_is_asked_for_less_and_less_often() -> None:
    world, request = World(Client(0), settings={"handover_s": 5.0}), _decode()
    while world.now_s < 4.9:
        assert _matched(world, request) == (None, False)
        world.now_s += 0.001
    assert len(world.client.asked) < 80


@pytest.mark.parametrize(("blocks", "loaded"), [(0, 0), (3, 96)])
def test_the_wait_ends(blocks: int, loaded: int) -> None:
    """After the death of the prefill engine its stored blocks are loaded, and the rest is computed."""
    world, request = World(Client(blocks), settings={"handover_s": 2.0}), _decode()
    assert _matched(world, request) == (None, False)
    world.now_s = 2.1
    assert _matched(world, request) == (loaded, False)
    assert world.counted["short_handovers"] == 1


def test_an_engine_that_was_busy_all_the_time_looks_once_more() -> None:
    """The scheduler of a full engine does not call; the prompt's blocks are stored meanwhile."""
    world, request = World(Client(0), settings={"handover_s": 2.0}), _decode()
    world.matching.arrived(request)
    world.client.answer()
    world.client.has = [4]
    world.now_s = 60.0
    assert _matched(world, request) == (128, False)
    assert not world.counted["short_handovers"]


def test_an_engine_with_other_names_is_not_waited_for() -> None:
    """Another tensor parallelism is an example: the prompt is computed at once, and a warning says why."""
    theirs = World(Client(0, 0))
    parameters = _computed(theirs, Request(kv_transfer_params={"do_remote_decode": True}))
    assert parameters is not None
    for asynchronous in (False, True):
        world = World(Client(0), asynchronous=asynchronous)
        assert _matched(world, Request(kv_transfer_params=parameters)) == (0, False)
        assert world.counted["short_handovers"] == world.counted["handovers"] == 1
    same = _computed(World(Client(0)), Request(kv_transfer_params={"do_remote_decode": True}))
    assert _matched(World(Client(0)), Request(kv_transfer_params=same)) == (None, False)


def test_blocks_of_its_own_are_not_waited_for() -> None:
    world, request = World(Client(0)), _decode(64)
    world.matching.arrived(request)
    world.client.answer()
    assert world.matching.matched(request, 64) == (0, False)


def test_blocks_without_names_are_not_waited_for() -> None:
    """Blocks behind an image without a name are an example."""
    world, request = World(Client(2)), _decode(None)
    request.block_hashes = request.block_hashes[:2]
    assert _matched(world, request) == (64, False)


@pytest.mark.parametrize(("number", "blocks", "loaded"), [(96, 3, 96), (100, 3, 96), (0, 0, 0), (None, 4, 128)])
def test_no_more_is_waited_for_than_the_prefill_engine_said(number: int | None, blocks: int, loaded: int) -> None:
    """The request waits for all whole blocks if the prefill engine gave no number."""
    world, request = World(Client(blocks)), _decode(number)
    assert _matched(world, request) == (loaded, False)


@pytest.mark.parametrize("number", ["128", True, -1, 1.5])
def test_a_number_that_is_none_is_as_if_it_were_not_there(number: Any) -> None:
    world, request = World(Client(3)), _decode(number)
    assert _matched(world, request) == (None, False)


def test_a_cache_that_is_away_is_not_waited_for() -> None:
    world, request = World(Client(0)), _decode()
    world.client.fails = NodeUnavailable("no gateway")
    assert _matched(world, request) == (0, False)
    assert world.counted["failed_lookups"] == 1


def test_what_another_engine_has_computed_is_loaded_even_if_computing_it_were_quicker() -> None:
    world = World(Client(4), settings={"cut_off": True})
    for _ in range(50):
        world.matching.step([], lambda _: [[]])
        world.matching._worth.computed(10_000, 1e-3)
        world.matching._worth.loaded(1, 1.0)
    alone, request = Request("alone"), _decode()
    assert _matched(world, alone) == (0, False), "computing is quicker"
    assert _matched(world, request) == (128, False)
    world.matching.allocated(request, [[5, 6, 7, 8, 9]], 128)
    (load,) = world.matching.step([], lambda _: [[]]).loads
    assert load.worth_s == 0.0, "nor is it given up because it is slow"


def test_the_object_tier_is_read_only_where_that_is_quicker() -> None:
    world, request = World(Client(4)), _decode()
    world.client.objects = ObjectPart((ChunkRange("a", 0, 4),), {"a": ObjectSpeed(10_000_000, 1000, 1000)})
    for _ in range(50):
        world.matching._worth.computed(10_000, 1e-3)
        world.matching._worth.loaded(1, 1.0)
    assert _matched(world, request) == (0, False)
    assert world.counted["recomputed_blocks"] == 4


def _computed(world: World, request: Request) -> dict[str, Any] | None:
    """The engine computes the whole prompt, and one token."""
    _matched(world, request)
    world.matching.step([("r", 0, request.num_tokens)], lambda _: [[5, 6, 7, 8, 9]])
    return world.matching.finished("r")


@pytest.mark.parametrize("readable", [0, 2])
@pytest.mark.parametrize("tokens", [128, None])
def test_stores_are_followed_where_no_other_request_waits_for_a_load(readable: int, tokens: int | None) -> None:
    """The request has its blocks at once, and is looked up no more."""
    world, request = World(Client(readable), asynchronous=True, settings={"handover_s": 5.0}), _decode(tokens)
    assert _matched(world, request) == (128, True)
    world.now_s = 1.0
    world.matching.allocated(request, [[5, 6, 7, 8, 9]], 128)
    (load,) = world.matching.step([], lambda _: [[]]).loads
    assert (load.first, load.blocks) == (0, (5, 6, 7, 8)) and load.follow is not None
    assert [len(keys) for keys in load.follow.keys] == [4] and load.follow.wait_s == 4.0
    assert [lookup.lease for lookup in load.found] == ([b"lease1"] if readable else [])
    assert world.counted["handovers"] == 1 and len(world.client.asked) == 1


def test_it_is_followed_too_if_vllm_had_no_blocks_at_first() -> None:
    """A full engine asks again until it has some."""
    world, request = World(Client(2), asynchronous=True, settings={"handover_s": 5.0}), _decode()
    assert _matched(world, request) == (128, True)
    world.now_s = 4.0
    assert world.matching.matched(request, 0) == (128, True)
    assert not world.counted.get("handovers")
    world.matching.allocated(request, [[5, 6, 7, 8, 9]], 128)
    (load,) = world.matching.step([], lambda _: [[]]).loads
    assert load.follow is not None and load.follow.wait_s == 1.0
    assert world.counted["handovers"] == 1


def test_a_request_that_is_preempted_follows_nothing() -> None:
    world, request = World(Client(0), asynchronous=True), _decode()
    assert _matched(world, request) == (128, True)
    world.matching.allocated(request, [[5, 6, 7, 8, 9]], 128)
    world.matching.step([], lambda _: [[]])
    world.matching.settled([Settled(request_id="r", group=0, arrived=True)])
    request.num_preemptions, world.client.has = 1, [4]
    assert world.matching.matched(request, 0) == (None, False)
    world.client.answer()
    assert world.matching.matched(request, 0) == (128, True)
    world.matching.allocated(request, [[5, 6, 7, 8, 9]], 128)
    (load,) = world.matching.step([], lambda _: [[]]).loads
    assert load.follow is None and load.found


def test_what_did_not_come_is_computed_once() -> None:
    """Not waited for again when vLLM has taken the blocks back."""
    world, request = World(Client(0), asynchronous=True), _decode()
    assert _matched(world, request) == (128, True)
    world.matching.allocated(request, [[5, 6, 7, 8, 9]], 128)
    world.matching.step([], lambda _: [[]])
    world.matching.allocated(request, [[5, 6, 7, 8, 9]], 0)  # vLLM does so when the load has ended
    for shard in range(2):
        world.matching.settled([Settled(request_id="r", group=0, arrived=shard > 1)])
    assert world.counted["short_handovers"] == world.counted["handovers"] == 1
    assert world.matching.matched(request, 0) == (0, False)


def test_what_vllm_does_not_take_is_not_followed() -> None:
    world, request = World(Client(2), asynchronous=True), _decode()
    assert _matched(world, request) == (128, True)
    world.matching.allocated(request, [[5, 6, 7, 8, 9]], 0)
    assert not world.matching.step([], lambda _: [[]]).loads
    world.client.answer()
    assert world.client.released == [b"lease1"]


def _states() -> World:
    return World(Client(0), groups=(GROUP, STATES), asynchronous=True)


def _little_memory() -> World:
    return World(Client(0), staged_blocks_max=3, direct=False, asynchronous=True)


@pytest.mark.parametrize("world", [_states, _little_memory])
def test_what_cannot_be_followed_is_waited_for(world: Callable[[], World]) -> None:
    """States are no prefix, and a load that does not fit staging memory is cut where it is readable."""
    assert _matched(world(), _decode()) == (None, False)


def test_the_prefill_engine_says_what_it_stores() -> None:
    world, request = World(Client(1)), Request(kv_transfer_params={"do_remote_decode": True})
    parameters = _computed(world, request)
    assert parameters is not None and parameters["quire_tokens"] == 128
    assert parameters["do_remote_prefill"] is True and parameters["do_remote_decode"] is False
    assert {"remote_engine_id", "remote_block_ids", "remote_host", "remote_port"} < parameters.keys()


def test_what_found_no_room_in_an_earlier_step_is_not_said_to_be_stored() -> None:
    world, request = World(Client(0)), Request(kv_transfer_params={"do_remote_decode": True})
    _matched(world, request)
    world.matching.step([("r", 0, request.num_tokens)], lambda _: [[5, 6, 7, 8, 9]])
    world.matching.unstored([Unstored(request_id="r", group=0, first=2, later=True, state=None)])
    parameters = world.matching.finished("r")
    assert parameters is not None and parameters["quire_tokens"] == 64


def test_a_prompt_that_is_handed_over_is_stored_the_first_time_it_is_seen() -> None:
    world = World(Client(0), settings={"store": "reused"})
    parameters = _computed(world, Request(kv_transfer_params={"do_remote_decode": True}))
    assert parameters is not None and parameters["quire_tokens"] == 128


@pytest.mark.parametrize("hint", [None, {}, {"do_remote_decode": False}])
def test_other_requests_are_handed_to_none(hint: dict[str, Any] | None) -> None:
    assert _computed(World(Client(0)), Request(kv_transfer_params=hint)) is None


def test_an_engine_that_stores_nothing_hands_nothing_over() -> None:
    """The decode engine of a pair: it loads, and its steps have no stores."""
    world, request = World(Client(2), stores=False), Request(kv_transfer_params={"do_remote_decode": True})
    assert _matched(world, request) == (64, False)
    assert not world.matching.step([("r", 0, 133)], lambda _: [[5, 6, 7, 8, 9]]).stores
    assert world.client._held, "the lease is given back though nothing is stored"
    assert world.matching.finished("r") is None


def test_an_engine_that_loads_nothing_stores_behind_what_there_is() -> None:
    """The prefill engine of a pair: vLLM would let a load write into blocks that a step still writes."""
    world, request = World(Client(2), loads=False), Request(kv_transfer_params={"do_remote_decode": True})
    assert _matched(world, request) == (0, False)
    (store,) = world.matching.step([("r", 0, 133)], lambda _: [[5, 6, 7, 8, 9]]).stores
    assert (store.first, store.blocks, store.handed_over) == (2, (7, 8), True)


def test_an_engine_that_loads_nothing_waits_for_nothing() -> None:
    """A proxy that sends decode requests to a prefill engine gets its answers at once."""
    world, request = World(Client(0), loads=False), _decode()
    assert _matched(world, request) == (0, False)


def test_without_its_states_a_prefix_is_of_no_use() -> None:
    """The end of the last state counts, not that of the blocks."""
    world = World(Client(0), groups=(GROUP, STATES))
    request = Request(kv_transfer_params={"do_remote_decode": True})
    _matched(world, request)
    world.matching.step([("r", 0, 133)], lambda _: [[5, 6, 7, 8, 9], [1]], {"r": [(1, 1, 96)]})
    parameters = world.matching.finished("r")
    assert parameters is not None and parameters["quire_tokens"] == 96


@pytest.mark.parametrize("time_s", [-1.0, float("inf"), float("nan")])
def test_a_wait_has_an_end(time_s: float) -> None:
    with pytest.raises(ConfigInvalid, match="handover_s"):
        Settings.read({"gateway": "g:1", "handover_s": time_s})
