"""Look-ups by samples of keys: from the client's choice of a sample to the answer, with chunks that come and go."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest

from quire.client.samples import SampleChooser, SampledLookups
from quire.model.errors import InvalidRequest, KeysInvalid
from quire.model.hashing import block_keys
from quire.model.index import OBJECT_TIER
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys, KeySample
from quire.model.lease import LeaseSigner
from quire.model.nodes import Location, StorageInfo
from quire.model.records import records
from quire.wire import convert
from quire.wire.v1 import gateway_pb2 as pb
from quire_server.lookups import Lookups, Question
from tests.unit.orchestrator.world import SECRET, SPACE, World

SIGNER = LeaseSigner(SECRET.encode())
CHUNKS = 3 * BUCKET_CHUNKS + 90


class _Gateway:
    """The part of the gateway that a look-up needs; `between` is called before every answer but the first."""

    def __init__(self, lookups: Lookups, between: Callable[[], Awaitable[object]] | None = None) -> None:
        self._lookups = lookups
        self._between = between
        self.asked: list[str] = []

    async def ask(self, request: pb.LookupRequest) -> pb.LookupResponse:
        if self.asked and self._between is not None:
            await self._between()
        shards: list[pb.LookupRequest | pb.ShardKeys] = [request, *request.other_shards]
        response, *other_responses = [await self._answer(shard, request) for shard in shards]
        self.asked.append("+".join("sample" if shard.HasField("sample") else "all" for shard in shards))
        response.other_shards.extend(other_responses)
        return response

    async def _answer(self, shard: pb.LookupRequest | pb.ShardKeys, request: pb.LookupRequest) -> pb.LookupResponse:
        sample = shard.sample
        question = Question(
            convert.namespace_from(shard.namespace),
            ChunkKeys(sample.keys or shard.chunk_keys),
            request.lease_ttl_ms,
            sample=KeySample(sample.count, sample.whole_bucket, sample.keys) if shard.HasField("sample") else None,
        )
        answer = await self._lookups.lookup(question)
        return pb.LookupResponse(
            matched_chunks=answer.matched_chunks,
            lease=answer.token,
            ranges=convert.ranges_to(answer.ranges),
            nodes=convert.addresses_to(answer.nodes, grpc=False),
            wanted_bucket=answer.wanted_bucket,
        )

    def client(self) -> SampledLookups:
        return SampledLookups(self.ask, Location(), lambda: True)


@pytest.mark.parametrize("stored", [0, 1, 255, 256, 300, 512, 700, CHUNKS])
async def test_a_client_finds_and_leases_the_same_as_by_all_keys(stored: int) -> None:
    world = World()
    keys = block_keys(SPACE, list(range(16 * CHUNKS)))
    await world.index.register("a", records(keys, 0, stored), 0)
    lookups = (await world.start()).lookups
    gateway = _Gateway(lookups)
    client = gateway.client()
    expected = await lookups.lookup(Question(SPACE, keys, 1000))
    (lookup,) = await client.find([(SPACE, keys)], 1000)
    assert lookup.matched_chunks == expected.matched_chunks == stored and lookup.ranges == tuple(expected.ranges)
    if stored:
        lease, full_lease = SIGNER.open(lookup.lease), SIGNER.open(expected.token)
        assert (lease.tip, lease.tip_bucket, lease.ranges) == (full_lease.tip, full_lease.tip_bucket, full_lease.ranges)
        lease.check_keys(lookup.keys)
    assert len(gateway.asked) <= 2 and set(gateway.asked) == {"sample"}


async def test_the_next_turn_of_a_conversation_is_one_request() -> None:
    """A turn stores the whole prompt that it looked up: the next match ends in that bucket, or behind it."""
    world = World()
    lookups = (await world.start()).lookups
    gateway = _Gateway(lookups)
    client, keys = gateway.client(), block_keys(SPACE, list(range(16 * 1800)))
    for stop in range(500, 1800, 50):
        await client.find([(SPACE, keys.run(0, stop))], 1000)
        await world.index.register("a", records(keys, 0, stop), 0)
    repeated = len(gateway.asked) - 26
    assert set(gateway.asked) == {"sample"} and repeated <= 4, f"{repeated} look-ups took two requests"


async def test_a_short_prefix_unchained_keys_and_an_old_gateway_are_asked_for_by_all_keys() -> None:
    world = World()
    keys = await world.stored(CHUNKS)
    gateway = _Gateway((await world.start()).lookups)
    old = SampledLookups(gateway.ask, Location(), lambda: False)
    await gateway.client().find([(SPACE, keys.run(0, 300))], 0)
    await gateway.client().find([(SPACE, keys)], 0, unchained=True)
    await old.find([(SPACE, keys)], 0)
    assert gateway.asked == ["all"] * 3


async def test_ranks_are_asked_again_only_where_their_end_is_not_known() -> None:
    world = World()
    first, second = await world.stored(CHUNKS), block_keys(SPACE, list(range(7, 7 + 16 * CHUNKS)))
    await world.index.register("b", records(second, 0, 300), 0)
    gateway = _Gateway((await world.start()).lookups)
    answers = await gateway.client().find([(SPACE, first), (SPACE, second)], 1000)
    assert [answer.matched_chunks for answer in answers] == [CHUNKS, 300]
    assert gateway.asked == ["sample+sample", "sample"]


async def test_what_only_the_object_tier_has_is_looked_up_by_all_keys() -> None:
    """The keys decide which node reads it, and two look-ups have to name the same node."""
    world = World()
    world.infos |= {name: StorageInfo(worker_address=b"w", has_object_tier=True) for name in "abcd"}
    keys = await world.stored(CHUNKS, OBJECT_TIER)
    lookups = (await world.start()).lookups
    gateway = _Gateway(lookups)
    (lookup,) = await gateway.client().find([(SPACE, keys)], 1000)
    assert gateway.asked == ["sample", "all"]
    assert lookup.ranges == tuple((await lookups.lookup(Question(SPACE, keys))).ranges)
    await lookups.release(lookup.lease)
    assert sum([await world.index.pins(keys.bucket_of(at)) for at in range(0, CHUNKS, BUCKET_CHUNKS)]) == 0


@pytest.mark.parametrize("dead", [10, 300, 511, 512, 600])
async def test_an_end_on_a_dead_node_is_found_and_pinned(dead: int) -> None:
    """Chunks from there on have no live holder: where the sample has not the last one before, its bucket is wanted."""
    world = World()
    keys = await world.stored(CHUNKS)
    await world.index.register("gone", records(keys, dead, CHUNKS - dead), 0)
    await world.index.unregister("a", records(keys, dead, CHUNKS - dead), 0)
    lookups = (await world.start()).lookups
    (lookup,) = await _Gateway(lookups).client().find([(SPACE, keys)], 1000)
    assert lookup.matched_chunks == dead and SIGNER.open(lookup.lease).tip == keys.at(dead - 1)
    assert await world.index.pins(keys.bucket_of(dead - 1)) == 1, "the one on the last stored chunk was given back"


async def test_a_holder_that_leaves_while_the_members_are_read_again() -> None:
    """Then only the object tier has a part, whose keys are not in the sample; nothing stays pinned."""
    world = World()
    keys = await world.stored(CHUNKS)
    await world.index.add_objects(records(keys, 0, 300), await world.index.register("a", records(keys, 0, 300), 0))
    await world.index.register("gone", records(keys, 300, CHUNKS - 300), 0)
    await world.index.unregister("a", records(keys, 300, CHUNKS - 300), 0)
    orchestrator = await world.start()
    world.infos = {"b": StorageInfo(worker_address=b"w", has_object_tier=True)}
    answer = await orchestrator.lookups.lookup(Question(SPACE, keys, 1000, sample=keys.sample(9)))
    assert answer.wanted_bucket is not None and not answer.token and await world.index.pins(b"") == 0
    (lookup,) = await _Gateway(orchestrator.lookups).client().find([(SPACE, keys)], 1000)
    assert lookup.matched_chunks == 300 and {run.node_id for run in lookup.ranges} == {"b"}


async def test_a_gateway_of_the_release_before_that_takes_over_is_asked_with_all_keys() -> None:
    """The old gateway sees no key in a request that was under way, and answers that nothing is stored."""
    world = World()
    keys = await world.stored(CHUNKS)
    gateway = _Gateway((await world.start()).lookups)
    is_new = True

    async def ask(request: pb.LookupRequest) -> pb.LookupResponse:
        nonlocal is_new
        if request.HasField("sample"):
            is_new = False
            request = pb.LookupRequest(namespace=request.namespace)
        return await gateway.ask(request)

    (lookup,) = await SampledLookups(ask, Location(), lambda: is_new).find([(SPACE, keys)], 0)
    assert lookup.matched_chunks == CHUNKS


@pytest.mark.parametrize("seed", range(20))
async def test_chunks_that_come_and_go_between_requests(seed: int) -> None:
    """After two samples all keys are sent. The lease is on the chunks that can be read at that moment."""
    rng, world = random.Random(seed), World()
    keys = await world.stored(rng.randrange(1, CHUNKS))
    keys = block_keys(SPACE, list(range(16 * CHUNKS)))
    lookups = (await world.start()).lookups

    async def come_or_go() -> None:
        matched = (await world.index.match(keys)).count
        first = rng.randrange(CHUNKS)
        if first < matched:
            await world.index.evict(list(reversed(records(keys, first, matched - first))), 0, 0)
        else:
            await world.index.register("a", records(keys, matched, first - matched), 0)

    gateway = _Gateway(lookups, come_or_go)
    (lookup,) = await gateway.client().find([(SPACE, keys)], 60_000)
    assert len(gateway.asked) <= 3 and gateway.asked[:2] == ["sample"] * len(gateway.asked[:2])
    assert lookup.matched_chunks == (await world.index.match(keys)).count
    if lookup.matched_chunks:
        await world.index.evict(list(reversed(records(keys, 0, CHUNKS))), 0, 0)
        assert (await world.index.match(keys)).count == lookup.matched_chunks


async def test_a_sample_that_is_none_is_refused() -> None:
    world = World()
    keys = await world.stored(CHUNKS)
    lookups = (await world.start()).lookups
    with pytest.raises(InvalidRequest, match="unchained"):
        await lookups.lookup(Question(SPACE, keys, unchained=True, sample=keys.sample(0)))
    twice = KeySample(CHUNKS, 9, keys.sample(9).packed[:-32] + keys.at(0))
    with pytest.raises(KeysInvalid, match="twice"):
        await lookups.lookup(Question(SPACE, keys, sample=twice))


def test_a_client_remembers_a_bounded_number_of_ends() -> None:
    chooser = SampleChooser()
    for number in range(3000):
        keys = ChunkKeys(b"".join((number << 16 | at).to_bytes(32, "big") for at in (*range(256), *range(1000, 1256))))
        chooser.note(keys, 300)
        chooser.note(keys, 20)
    assert len(chooser._ends) == 4096
    sample = chooser.first(keys)
    assert sample is not None and sample.whole_bucket == 0, "where it ended last"
