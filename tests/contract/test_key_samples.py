"""Look-ups by a sample of the keys give what look-ups by all keys do, on every index."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import redis.asyncio as redis

from quire.model.errors import KeysInvalid
from quire.model.fingerprints import fingerprint, fingerprints
from quire.model.index import Match, Pin
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys, KeySample
from quire.model.records import records
from quire.testing.contracts.index import chain
from quire.testing.index import MemoryIndex
from quire_server.redis import PrefixIndex
from quire_server.redis.prefix_index import format as format_module
from quire_server.redis.prefix_index import index as index_module
from quire_server.redis.prefix_index.slots import bucket_key
from quire_server.redis.scripts import script

AnyIndex = PrefixIndex | MemoryIndex
_LENGTH = 3 * BUCKET_CHUNKS + 90
_BRANCHES = 4


@pytest.fixture(params=["redis_client", "redis_cluster_client", "memory"])
def index(request: pytest.FixtureRequest) -> AnyIndex:
    return MemoryIndex() if request.param == "memory" else PrefixIndex(request.getfixturevalue(request.param))


async def _sampled(index: AnyIndex, keys: ChunkKeys, whole_bucket: int, pin: Pin | None = None) -> Match:
    """Look up as a client does, which asks again with the bucket that is wanted."""
    match = await index.match(keys.sample(whole_bucket), pin)
    if match.wanted_bucket is not None:
        assert match.count == match.wanted_bucket * BUCKET_CHUNKS and match.wanted_bucket != whole_bucket
        match = await index.match(keys.sample(match.wanted_bucket), pin)
    return match


def _branches(rng: random.Random) -> list[ChunkKeys]:
    """Chains that part from the first one at different places, some of them within a bucket."""
    places = [0, *(rng.choice([1, 200, 256, 300, 511, 512, 700]) for _ in range(_BRANCHES - 1))]
    return [chain(_LENGTH, branch, common) for branch, common in enumerate(places)]


async def _change(index: AnyIndex, rng: random.Random, branches: list[ChunkKeys]) -> None:
    """Store a part of a chain on a node, take it away from one, or evict its end."""
    keys = rng.choice(branches)
    matched = (await index.match(keys)).count
    match rng.choice(["store", "store", "store", "replicate", "unregister", "evict"]):
        case "store":
            count = min(rng.choice([1, 16, 90, 256, 400]), len(keys) - matched)
            await index.register(rng.choice("ab"), records(keys, matched, count), 0)
        case "replicate" if matched:
            first = rng.randrange(matched)
            await index.register("c", records(keys, first, min(rng.choice([1, 50, 300]), matched - first)), 0)
        case "unregister" if matched:
            first = rng.randrange(matched)
            await index.unregister(rng.choice("abc"), records(keys, first, min(40, matched - first)), 1)
        case "evict" if matched:
            first = max(0, matched - rng.choice([1, 30, 300]))
            await index.evict(list(reversed(records(keys, first, matched - first))), 1, 10)
        case _:
            pass


async def _differences(index: AnyIndex, rng: random.Random, rounds: int) -> int:
    """Return how many look-ups by samples differ from those by all keys, in a random history."""
    branches, differing = _branches(rng), 0
    for _ in range(rounds):
        await _change(index, rng, branches)
        keys = rng.choice(branches)
        keys = keys.run(0, rng.choice([1, 2, 3, 255, 256, 257, 258, 259, 512, 600, _LENGTH]))
        differing += await _sampled(index, keys, rng.randrange(5)) != await index.match(keys)
    return differing


async def _mistaken(index: AnyIndex) -> int:
    """Return how many invalid chains are taken for valid ones."""
    keys, second_chain = chain(300), chain(300, branch=1)
    await index.register("a", records(keys, 0, 300), 0)
    await index.register("a", records(second_chain, 0, 300), 0)
    unknown = chain(1, branch=2).packed
    wrong = [
        ChunkKeys(keys.run(0, 100).packed + second_chain.run(100, 200).packed),
        ChunkKeys(keys.at(0) + unknown + keys.run(3, 200).packed),
        ChunkKeys(keys.at(0) + unknown + keys.run(1, 200).packed),
    ]
    return sum([await _sampled(index, invalid, 9) != await index.match(invalid) for invalid in wrong])


@pytest.mark.parametrize("seed", range(4))
async def test_a_sample_finds_what_all_keys_do(index: AnyIndex, seed: int) -> None:
    assert await _differences(index, random.Random(seed), 60) == 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("sub(page, 8 * from - 5, 8 * from + 2) ~= first", "false"),
        ("math.max(links[link], row - left + 1)", "row - left + 1"),
        ("if row then wanted = -b; break end", ""),
        ("if links[link + 1] == '' or links[link + 2] ~= '' then return nil end", ""),
    ],
)
async def test_a_fault_that_is_put_back_is_found(redis_client: redis.Redis, right: str, wrong: str) -> None:
    """A chain of another length is taken for this one, rows of a page for a chain, a part of a bucket for none."""
    assert script("index_match").count(right) == 1
    index = PrefixIndex(redis_client)
    index._scripts["match"] = redis_client.register_script(script("index_match").replace(right, wrong))
    differences = await _mistaken(index)
    for seed in range(12):
        await redis_client.flushall()
        try:
            differences += await _differences(index, random.Random(seed), 60)
        except redis.ResponseError:
            differences += 1
        if differences:
            return
    raise AssertionError("it was not found")


async def test_a_sample_pins_the_last_chunk_that_matched_and_only_where_that_is_known(index: AnyIndex) -> None:
    keys = chain(_LENGTH)
    await index.register("a", records(keys, 0, 600), 0)
    pin = Pin(lease_id=b"l" * 16, expires_ms=1000, ttl_ms=60_000, now_ms=0)
    tip = records(keys, 599, 1)[0]
    unknown = await index.match(keys.sample(0), pin)
    assert (unknown.count, unknown.wanted_bucket) == (512, 2)
    assert not await index.unpin(tip.bucket, tip.key, pin.lease_id)
    assert (await _sampled(index, keys, 0, pin)).count == 600
    assert await index.unpin(tip.bucket, tip.key, pin.lease_id)
    await index.register("a", records(keys, 600, len(keys) - 600), 0)
    assert (await index.match(keys.sample(9), pin)).count == len(keys), "without any bucket of which all keys are there"
    last = records(keys, len(keys) - 1, 1)[0]
    assert await index.unpin(last.bucket, last.key, pin.lease_id)


async def test_keys_that_do_not_commit_to_those_before_are_not_taken_for_a_chain(index: AnyIndex) -> None:
    """A sample has the ends of a bucket, and its chunks are counted from the last one back to the first."""
    assert await _mistaken(index) == 0


async def test_a_key_whose_fingerprint_is_in_the_facts_of_a_page_is_unknown(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client can compute a key of any fingerprint: here of the bytes behind the last row of the page."""
    index, keys = PrefixIndex(any_redis), chain(103)
    await index.register("node-a", records(keys, 0, 100), 0)
    page = await any_redis.get(bucket_key(fingerprint(keys.at(0))))
    assert isinstance(page, bytes)
    for size in (101, 102):
        tip = page[2 + 8 * (size - 1) : 2 + 8 * size]

        def forged(packed: bytes, tip: bytes = tip) -> bytes:
            return fingerprints(packed)[:-8] + tip

        pin = Pin(lease_id=b"l" * 16, expires_ms=1000, ttl_ms=60_000, now_ms=0)
        for module in (index_module, format_module):
            monkeypatch.setattr(module, "fingerprints", forged)
        match = await index.match(keys.run(0, size).sample(9), pin)
        monkeypatch.undo()
        assert match.wanted_bucket == 0 and await index.pins(keys.at(0)) == 0


def _cut(sample: KeySample) -> KeySample:
    return KeySample(sample.count, sample.whole_bucket, sample.packed[:-32])


def _extended(sample: KeySample) -> KeySample:
    return KeySample(sample.count, sample.whole_bucket, sample.packed + bytes(32))


def _of_another_count(sample: KeySample) -> KeySample:
    return KeySample(sample.count + BUCKET_CHUNKS, sample.whole_bucket, sample.packed)


@pytest.mark.parametrize("spoil", [_cut, _extended, _of_another_count, lambda _: KeySample(0, 0, b"")])
def test_a_sample_has_as_many_keys_as_it_says(spoil: Callable[[KeySample], KeySample]) -> None:
    with pytest.raises(KeysInvalid):
        spoil(chain(_LENGTH).sample(1))


@pytest.mark.parametrize("whole_bucket", [0, 1, 3, 9])
@pytest.mark.parametrize("length", [1, 2, 3, 256, 257, 258, 259, _LENGTH])
def test_what_a_sample_has(length: int, whole_bucket: int) -> None:
    keys = chain(length)
    sample = keys.sample(whole_bucket)
    known = [at for at in range(length) if sample.has(at)]
    assert len(sample) == length and [sample.at(at) for at in known] == [keys.at(at) for at in known]
    assert sample.packed == b"".join(keys.at(at) for at in known) and not sample.has(length) and not sample.has(-1)
    for at in known:
        shorter = sample.run(0, at + 1)
        assert shorter == KeySample(at + 1, whole_bucket, keys.run(0, at + 1).sample(whole_bucket).packed)
        assert shorter.bucket_of(at) == keys.bucket_of(at)
    assert sample.distinct() is sample
    for at in set(range(length)) - set(known):
        with pytest.raises(IndexError):
            sample.at(at)
        with pytest.raises(KeysInvalid):
            sample.run(0, at + 1)
