"""What the vLLM connector decides, without vLLM: look-ups, promises, names, settings, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.client import Buffer
from quire.integrations.cost import Cost
from quire.integrations.staging import StagingPool
from quire.integrations.vllm.naming import BlockFormat, namespace_of
from quire.integrations.vllm.plan import LoadTime, Settled, Unstored
from quire.integrations.vllm.scheduler.load_cost import LinkTime, LoadCost, late
from quire.integrations.vllm.settings import Settings
from quire.integrations.weights import weights_digest
from quire.model.errors import ConfigInvalid, NodeUnavailable
from quire.model.hashing import engine_keys
from quire.model.keys import ChunkKeys
from quire.model.object_part import ObjectPart, ObjectSpeed
from quire.model.ranges import ChunkRange
from quire.transport.memory import MemoryTransport
from tests.unit.quire.vllm_scheduler import SPACE, Client, Request, World, close_clients

FORMAT = BlockFormat(
    group="full 0 layers.0",
    kernel="CPU_ATTN/vec",
    dtype="bfloat16",
    cache_dtype="auto",
    shape=(2, 32, 64),
    strides=(2048, 64, 1),
    layers=4,
    kv_heads=2,
    head_dim=32,
    block_tokens=32,
    kept_tokens=32,
    mla=False,
    slab_bytes=8192,
    page_bytes=8192,
)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_clients()


def _settled(request_id: str, arrived: bool) -> Settled:
    return Settled(request_id=request_id, group=0, arrived=arrived)


def test_the_scheduler_is_never_held_up() -> None:
    """It is told to ask again, until the answer is there; then of what it has computed itself nothing is promised."""
    world, request = World(Client(3)), Request()
    assert world.matching.matched(request, 0) == (None, False)
    assert world.matching.matched(request, 0) == (None, False)
    world.client.answer()
    assert len(world.client.asked) == 1 and world.client.asked[0] == engine_keys(
        replace(SPACE, model_id="m0"), ChunkKeys(b"".join(request.block_hashes))
    )
    assert world.matching.matched(request, 0) == (96, False)
    assert world.matching.matched(request, 32) == (64, False)
    world.matching.allocated(request, [[7, 8, 9, 10]], 64)
    (load,) = world.matching.step([], lambda _: [[]]).loads
    assert (load.first, load.blocks) == (1, (8, 9))
    assert not world.client.released, "the lease is the load's"


def test_the_last_token_is_always_computed() -> None:
    world, request = World(Client(9)), Request(blocks=2)
    request.num_tokens = 64
    world.matching.arrived(request)
    world.client.answer()
    assert world.matching.matched(request, 0) == (32, False)
    assert world.matching.matched(request, 32) == (0, False)


def test_the_shard_that_has_least_counts() -> None:
    world, request = World(Client(3, 1)), Request()
    world.matching.arrived(request)
    world.client.answer()
    assert world.matching.matched(request, 0) == (32, False)
    empty = World(Client(3, 0))
    empty.matching.arrived(request)
    empty.client.answer()
    assert empty.matching.matched(request, 0) == (0, False)
    empty.client.answer()
    assert empty.client.released == [b"lease1"]


def test_no_answer_in_time_is_a_miss_and_quire_is_left_alone() -> None:
    """Twice as long each time; what comes after all is given back."""
    world = World(Client(3), settings={"lookup_timeout_s": 1.0, "away_s": 2.0})
    first, second, third = (Request(name) for name in ("1", "2", "3"))
    world.matching.arrived(first)
    world.now_s = 0.9
    assert world.matching.matched(first, 0) == (None, False)
    world.now_s = 1.1
    assert world.matching.matched(first, 0) == (0, False)
    assert world.matching.matched(second, 0) == (0, False), "not even asked"
    assert not world.matching.step([("1", 0, 128), ("2", 0, 128)], lambda _: [[1, 2, 3, 4]]).stores
    world.client.answer()
    world.client.answer()
    assert world.client.released == [b"lease1"] and world.counted == {"failed_lookups": 1}
    world.now_s = 3.2
    world.client.fails = NodeUnavailable("away")
    assert world.matching.matched(third, 0) == (None, False)
    world.client.answer()
    assert world.matching.matched(third, 0) == (0, False)
    world.now_s = 7.0
    assert world.matching.matched(Request("4"), 0) == (0, False), "away for four seconds now"
    world.now_s = 7.3
    assert world.matching.matched(Request("5"), 0) == (None, False)


def test_a_request_that_waited_long_is_looked_up_again() -> None:
    """Its lease might run out before its blocks are asked for."""
    world, request = World(Client(3)), Request()
    world.matching.arrived(request)
    world.client.answer()
    world.now_s = 31.0
    assert world.matching.matched(request, 0) == (None, False)
    world.client.answer()
    assert world.matching.matched(request, 0) == (96, False) and world.client.released == [b"lease1"]


def test_blocks_are_stored_once_and_again_where_vllm_was_taken_back() -> None:
    world, request = World(Client(1)), Request()
    world.matching.arrived(request)
    world.client.answer()
    world.matching.matched(request, 0)
    world.matching.allocated(request, [[1, 2, 3, 4]], 32)
    blocks = [1, 2, 3, 4]
    world.matching.settled([_settled("r", True)])

    def stored(computed: int, tokens: int) -> list[tuple[int, tuple[int, ...]]]:
        return [
            (store.first, store.blocks)
            for store in world.matching.step([("r", computed, tokens)], lambda _: [blocks]).stores
        ]

    assert stored(32, 40) == [(1, (2,))]
    assert stored(72, 10) == []
    assert stored(82, 51) == [(2, (3, 4))]
    world.matching.settled([_settled("r", False)])
    assert stored(133, 1) == [(0, (1, 2, 3, 4))], "a load failed: what Quire was to have it may not"
    request.block_hashes.append(b"e" * 32)
    request.num_tokens = 165
    blocks.append(5)
    assert stored(134, 26) == [(4, (5,))], "what is generated too"


def test_what_is_computed_behind_a_layerwise_load_is_stored_once_all_shards_have_it() -> None:
    """The other shards' values go into what each of them computes, and vLLM may plan a step before it hears of one."""
    world, request = World(Client(1, 1)), Request()
    world.matching.arrived(request)
    world.client.answer()
    world.matching.matched(request, 0)
    world.matching.allocated(request, [[1, 2, 3, 4]], 32)

    def stored() -> list[int]:
        return [store.first for store in world.matching.step([("r", 32, 101)], lambda _: [[1, 2, 3, 4]]).stores]

    assert stored() == [] and stored() == []
    world.matching.settled([_settled("another", True)])
    assert stored() == []
    world.matching.settled([_settled("r", True), _settled("r", False)])
    assert stored() == [0], "what Quire had is stored again, too: a shard of it is missing"


def test_what_another_request_computes_behind_a_layerwise_load_waits_too() -> None:
    """vLLM shares the blocks as soon as they are allocated, before they have arrived."""
    world, loading, sharing = World(Client(1)), Request("l"), Request("s")
    for request in (loading, sharing):
        world.matching.arrived(request)
    world.client.answer()
    world.matching.matched(loading, 0)
    world.matching.allocated(loading, [[1, 2, 3, 4]], 32)
    assert world.matching.matched(sharing, 32) == (0, False), "vLLM has the block itself"

    def stored(blocks: list[int]) -> list[str]:
        return [store.request_id for store in world.matching.step([("s", 32, 101)], lambda _: [blocks]).stores]

    assert stored([1, 5, 6, 7]) == []
    world.matching.settled([_settled("l", False)])
    assert stored([1, 5, 6, 7]) == ["s"]


def test_a_preempted_request_is_looked_up_again() -> None:
    """What it had computed was stored meanwhile."""
    world, request = World(Client(0)), Request()
    world.matching.arrived(request)
    world.client.answer()
    assert world.matching.matched(request, 0) == (0, False)
    request.num_preemptions = 1
    world.client.has = [4]
    assert world.matching.matched(request, 0) == (None, False)
    world.client.answer()
    assert world.matching.matched(request, 0) == (128, False)


def test_what_is_cached_locally_and_not_in_quire_is_stored() -> None:
    world, request = World(Client(0)), Request()
    world.matching.arrived(request)
    world.client.answer()
    assert world.matching.matched(request, 96) == (0, False)
    (store,) = world.matching.step([("r", 96, 37)], lambda _: [[1, 2, 3, 4]]).stores
    assert (store.first, store.blocks, len(store.keys[0])) == (0, (1, 2, 3, 4), 4)


def test_what_finds_no_room_is_stored_later_and_what_failed_is_not() -> None:
    world, request = World(Client(0), staged_blocks_max=3), Request()
    world.matching.arrived(request)
    world.client.answer()

    def stored() -> list[tuple[int, int]]:
        plan = world.matching.step([("r", 133, 1)], lambda _: [[1, 2, 3, 4]])
        return [(store.first, len(store.blocks)) for store in plan.stores]

    assert [stored(), stored(), stored()] == [[(0, 3)], [(3, 1)], []]
    world.matching.unstored([Unstored(request_id="r", group=0, first=0, later=True)])
    assert stored() == [(0, 3)]
    world.matching.unstored([Unstored(request_id="r", group=0, first=0, later=False)])
    assert stored() == [] and stored() == []


def test_no_more_is_promised_than_there_is_room_to_land() -> None:
    world, request = World(Client(9), staged_blocks_max=2, direct=False), Request()
    world.matching.arrived(request)
    world.client.answer()
    assert world.matching.matched(request, 0) == (64, False)
    assert world.matching.matched(request, 32) == (64, False)


def test_a_finished_request_gives_its_lease_back() -> None:
    world, request = World(Client(3)), Request()
    world.matching.arrived(request)
    world.client.answer()
    world.matching.matched(request, 0)
    world.matching.finished("r")
    world.client.answer()
    assert world.client.released == [b"lease1"]
    assert world.matching.step([], lambda _: [[]]).abandoned == ["r"]


def test_after_a_reset_keys_are_others() -> None:
    world = World(Client(3))
    world.matching.arrived(Request("1"))
    world.matching.reset()
    world.matching.arrived(Request("2"))
    world.client.answer()
    assert world.client.asked[0] != world.client.asked[1]
    assert not world.matching.step([("1", 0, 128)], lambda _: [[1, 2, 3, 4]]).stores, "its blocks are of before"


def test_everything_that_changes_bytes_changes_the_name(tmp_path: Path) -> None:
    about: dict[str, Any] = {
        "model": "m", "weights": "w", "engine": {"vllm": "0.32"}, "tenant_salt": b"", "shard": 0, "shards": 2
    }  # fmt: skip
    names = {
        namespace_of(FORMAT, **about).digest(),
        namespace_of(replace(FORMAT, kernel="CPU_ATTN/amx"), **about).digest(),
        namespace_of(replace(FORMAT, group="full 0 layers.1"), **about).digest(),
        namespace_of(replace(FORMAT, strides=(64, 128, 1)), **about).digest(),
        namespace_of(replace(FORMAT, dtype="float16"), **about).digest(),
        *(
            namespace_of(FORMAT, **(about | change)).digest()
            for change in (
                {"model": "n"}, {"weights": "v"}, {"engine": {"vllm": "0.33"}}, {"tenant_salt": b"s"}, {"shard": 1}
            )
        ),
    }  # fmt: skip
    assert len(names) == 10
    with pytest.raises(ConfigInvalid, match="the tensor has only a part of it"):
        namespace_of(replace(FORMAT, page_bytes=8320), **about)
    scaled = namespace_of(replace(FORMAT, dtype="uint8", slab_bytes=4352, page_bytes=4352), **about)
    assert (scaled.layout.slice_bytes, scaled.layout.chunk_tokens) == (4352, 32), "with scales beside the elements"
    wide = namespace_of(replace(FORMAT, dtype="int8", slab_bytes=32 * 16896, page_bytes=32 * 16896), **about)
    assert wide.layout.slice_bytes == 32 * 16896, "wider than a row of a layout may be"
    halves = [namespace_of(replace(FORMAT, block_tokens=64, interleave=size), **about) for size in (1, 2)]
    assert halves[0] != halves[1] and halves[0].layout.chunk_tokens == 64, "a rank keeps half of a block's tokens"
    assert namespace_of(replace(FORMAT, interleave=2), **about) == namespace_of(FORMAT, **about)
    latent = replace(FORMAT, mla=True, kv_heads=1, head_dim=128)
    assert namespace_of(latent, **about).shard_count == 1, "latents are the same in every shard"
    parts = [namespace_of(latent, **(about | {"shard": at, "shards": 4}), context_ranks=2) for at in range(4)]
    assert parts[0] == parts[2] != parts[1] == parts[3], "but for the tokens that context parallelism divides"
    with pytest.raises(ConfigInvalid, match="weights"):
        weights_digest(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"x" * 4096)
    before = weights_digest(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"x" * 2048 + b"y" + b"x" * 2047)
    assert weights_digest(tmp_path) != before


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "gateway"),
        ({"gateway": "g:1", "laod": "async"}, "laod"),
        ({"gateway": "g:1", "load": "now"}, "layerwise"),
        ({"gateway": "g:1", "durability": "forever"}, "durability"),
        ({"gateway": "g:1", "staging_bytes": "much"}, "staging_bytes"),
        ({"gateway": "g:1", "staging_bytes": True}, "staging_bytes"),
        ({"gateway": "g:1", "timeout_s": 0}, "timeout_s"),
        ({"gateway": "g:1", "tenant_salt": "xyz"}, "tenant_salt"),
    ],
)
def test_settings_that_mean_nothing_are_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        Settings.read(extra)


@pytest.fixture
def pool() -> Iterator[StagingPool]:
    yield StagingPool(Buffer.allocate(MemoryTransport(), 1 << 20))


def test_staging_memory_is_joined_again(pool: StagingPool) -> None:
    parts = [pool.take(200_000) for _ in range(5)]
    assert all(parts) and pool.take(200_000) is None
    for at in (3, 1, 4, 0, 2):
        part = parts[at]
        assert part is not None
        pool.give_back(part)
    whole = pool.take(1 << 20)
    assert whole is not None and whole.length == 1 << 20


def test_costs_are_a_start_and_so_much_for_each() -> None:
    cost = Cost()
    cost.add(10, 1.0)
    cost.add(20, 1.5)
    assert cost.seconds(30) is None, "too little was seen"
    cost.add(40, 2.5)
    assert cost.seconds(100) == pytest.approx(5.5)
    same = Cost()
    for _ in range(3):
        same.add(10, 2.0)
    assert same.seconds(20) == pytest.approx(4.0), "of one size alone no overhead is known"
    for _ in range(24):
        cost.add(10, 10.0)
    assert cost.seconds(10) == pytest.approx(10.0), "what was long ago does not count"


def test_what_takes_longer_to_load_is_computed_and_tried_again_with_a_little() -> None:
    worth = LoadCost()
    assert worth.load(30, 960), "nothing is known"
    for _ in range(3):
        worth.computed(1000, 1.0)
        worth.computed(10, 9.0)  # no prefill
        worth.loaded(30, 0.5)
    assert worth.load(30, 960)
    for _ in range(24):
        worth.loaded(30, 5.0)
    assert not worth.load(30, 960)
    assert worth.tried(30, 10.0) == 1 and worth.tried(30, 11.0) == 0, "a tenth of a second's worth, every two"
    for _ in range(24):
        worth.loaded(1, 0.01)
    assert worth.load(30, 960), "the link is free again"
    assert [worth.tried(8, at) for at in (12.1, 14.2)] == [2, 8], "of two sizes, to know of an overhead"


def test_blocks_of_the_object_tier_cost_what_the_cluster_expects_until_loads_of_such_were_seen() -> None:
    worth = LoadCost()
    for _ in range(3):
        worth.computed(1000, 1.0)
        worth.loaded(30, 0.1)
    assert worth.load(30, 1000) and worth.load(30, 1000, cold_s=0.9)
    assert not worth.load(30, 1000, cold_s=1.5), "the tier is slow"
    for _ in range(3):
        worth.loaded(30, 0.2, cold=True)
    assert worth.load(30, 1000, cold_s=1.5), "but a node had them in its memory"
    for _ in range(24):
        worth.loaded(30, 3.0, cold=True)
    assert not worth.load(30, 1000, cold_s=0.5) and worth.load(30, 1000), "others cost what they did"


def test_what_the_object_tier_takes_longer_for_than_computing_is_computed() -> None:
    """The same prefix is loaded where a node has it."""
    for speed, tokens in ((ObjectSpeed(1_000_000, 1, 1 << 30), 0), (ObjectSpeed(1, 1, 1 << 40), 128)):
        world = World(Client(4))
        world.client.objects = ObjectPart((ChunkRange("node", 1, 3),), {"node": speed})
        for at in range(3):
            world.matching.step([(f"x{at}", 0, 1000)], lambda _: [[]])
            world.now_s += 0.1
            world.matching.ended()
        world.matching.loaded([LoadTime(4, 0.001)] * 3)
        request = Request()
        world.matching.arrived(request)
        world.client.answer()
        assert world.matching.matched(request, 0) == (tokens, False)


@pytest.mark.parametrize("tokens", [1, 1000])
def test_a_step_takes_what_steps_like_it_took(tokens: int) -> None:
    worth = LoadCost()
    assert worth.step_s(tokens) == 0.0, "not known"
    for _ in range(3):
        worth.computed(tokens, 0.5)
    assert worth.step_s(tokens) == pytest.approx(0.5)
    assert worth.step_s(0) == 0.0, "there is nothing to compute"


def test_loads_that_share_a_link_count_for_their_part() -> None:
    now_s = [0.0]
    link = LinkTime(lambda: now_s[0])
    first = link.begin()
    now_s[0] = 1.0
    second = link.begin()
    now_s[0] = 5.0
    assert link.now_s() - first == 3.0 and link.now_s() - second == 2.0
    link.end()
    now_s[0] = 6.0
    assert link.now_s() - first == 4.0
    link.end()
    now_s[0] = 9.0
    assert link.begin() == 7.0, "it runs while nothing is loaded"


def test_a_load_is_late_when_the_rest_takes_longer_than_computing_all() -> None:
    assert not late(10.0, 0.1, 1, 4, 0.0), "what computing takes is not known"
    assert not late(0.01, 0.0, 0, 4, 0.001), "too soon to say"
    assert late(1.1, 0.0, 0, 4, 1.0) and not late(0.9, 0.0, 0, 4, 1.0)
    assert not late(0.5, 0.4, 1, 4, 0.2), "how fast layers follow is not known yet"
    assert late(0.7, 0.4, 1, 4, 0.2)
    assert late(0.9, 0.4, 2, 4, 0.9) and not late(0.9, 0.4, 2, 4, 1.1)
    assert not late(9.0, 0.1, 4, 4, 1.0), "it is there"


def test_the_scheduler_learns_from_its_steps_and_from_loads() -> None:
    """A step that waited for layers says nothing of computing."""
    world = World(Client(4))
    for at in range(3):
        world.matching.step([(f"x{at}", 0, 1000)], lambda _: [[]])
        world.now_s += 0.1
        world.matching.ended()
    world.matching.loaded([LoadTime(4, 50.0)] * 3)
    request = Request()
    world.matching.arrived(request)
    world.client.answer()
    assert world.matching.matched(request, 0) == (0, False)
    (tried,) = world.matching.step([], lambda _: [[]]).tries
    assert (tried.first, tried.count) == (0, 1), "one block, to see: no request waits for it"
    second = Request("again")
    world.matching.arrived(second)
    world.client.answer()
    assert world.matching.matched(second, 0) == (0, False) and world.counted["recomputed_blocks"] == 8
    assert not world.matching.step([], lambda _: [[]]).tries
    world.matching.loaded([LoadTime(1, 0.0001)] * 24)
    third = Request("third")
    world.matching.arrived(third)
    world.client.answer()
    assert world.matching.matched(third, 0) == (128, False), "the link is free again"
    world.matching.allocated(third, [[1, 2, 3, 4]], 128)
    (load,) = world.matching.step([], lambda _: [[]]).loads
    assert load.worth_s == pytest.approx(0.0128)
