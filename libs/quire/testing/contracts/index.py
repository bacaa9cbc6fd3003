"""The prefix-closed index against a reference model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from quire.model.fingerprints import fingerprint
from quire.model.index import DIGEST_MODULUS, OBJECT_TIER, Drop, Listing, ObjectMark, Pin, listing_number
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys
from quire.model.records import ChunkRecord, records

Index = Any
"""What `quire.testing.index.MemoryIndex` does."""


def chain(length: int, branch: int = 0, common: int = 0) -> ChunkKeys:
    """Keys of a chain that shares its first `common` chunks with branch 0."""
    names = [(index, branch if index >= common else 0) for index in range(length)]
    return ChunkKeys(b"".join(hashlib.sha256(f"{index}/{which}".encode()).digest() for index, which in names))


async def evict(index: Index, keys: ChunkKeys, keep: int, now_ms: int) -> list[tuple[bytes, tuple[str, ...]]]:
    """Evict from the end of a chain down to `keep`."""
    deepest_first: list[ChunkRecord] = list(reversed(records(keys, keep, len(keys) - keep)))
    evicted = await index.evict(deepest_first, now_ms, now_ms + 100)
    return [(entry.record.key, entry.nodes) for entry in evicted.removed]


async def register(index: Index, node: str, chunks: Sequence[ChunkRecord]) -> list[bool]:
    """List a node for chunks; whether each is indexed."""
    return [bool(generation) for generation in await index.register(node, chunks, 0)]


async def listing_of(index: Index, node: str) -> Listing:
    """Return a node's listing, which is that among all nodes' too."""
    listing: Listing = await index.listing(node)
    assert listing == (await index.listings()).get(node, Listing())
    return listing


async def sum_of(index: Index, node: str, keys: Iterable[bytes]) -> Listing:
    """Return the expected listing of a node that is listed for `keys`, by the entries' generations."""
    generations = await holdings(index, node)
    prints = [fingerprint(key) for key in keys]
    assert generations.keys() == set(prints)
    return Listing(len(prints), sum(listing_number(print_, generations[print_]) for print_ in prints) % DIGEST_MODULUS)


async def drops_of(index: Index, node: str) -> list[Drop]:
    """Return the drops on all pages."""
    page, cursor = await index.drops(node, 0)
    drops = list(page)
    while cursor:
        page, cursor = await index.drops(node, cursor)
        drops += page
    return drops


async def holdings(index: Index, node: str) -> dict[bytes, int]:
    """Generations by fingerprint."""
    generations, cursor, unfinished = dict[bytes, int](), 0, True
    while unfinished:
        page, cursor = await index.holdings(node, cursor)
        generations |= {holding.fingerprint: holding.generation for holding in page}
        unfinished = bool(cursor)
    return generations


async def _pin(index: Index, keys: ChunkKeys, lease: bytes, expires_ms: int, *, now_ms: int = 0) -> int:
    """Look `keys` up and pin what matched; how many did."""
    pin = Pin(lease_id=lease * 16, expires_ms=expires_ms, ttl_ms=60_000, now_ms=now_ms)
    return int((await index.match(keys, pin)).count)


async def _count(index: Index, keys: ChunkKeys) -> int:
    return int((await index.match(keys)).count)


class IndexContract:
    """Fixture `index`: an empty one."""

    @pytest.mark.parametrize("length", [2, 256, 257, 300])
    async def test_a_match_says_whether_its_end_is_extended(self, index: Index, length: int) -> None:
        """A match says whether its end has a child, in any bucket, and not after the child's eviction."""

        async def extended(keys: ChunkKeys) -> bool:
            return bool((await index.match(keys)).extended)

        keys, branch = chain(length + 1), chain(length + 1, branch=1, common=length - 1)
        assert not await extended(keys)
        await register(index, "a", records(keys, 0, length))
        assert not await extended(keys) and not await extended(keys.run(0, length))
        assert await extended(keys.run(0, length - 1)) and await extended(keys.run(0, 1))
        await register(index, "b", records(branch, length - 1, 2))
        assert await extended(branch.run(0, length)) and not await extended(keys) and not await extended(branch)
        await evict(index, branch, length, 0)
        assert not await extended(branch)
        await evict(index, keys, length - 1, 0)
        assert await extended(keys), "by the other chain"

    @pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
    async def test_longest_match_at_every_kind_of_boundary(self, index: Index, length: int) -> None:
        """After registering the first `present` chunks, exactly these match, whatever the bucket they end in."""
        keys = chain(length + 300)
        assert await _count(index, keys) == 0
        assert await register(index, "a", records(keys, 0, length)) == [True] * length
        assert await _count(index, keys) == length
        assert await _count(index, keys.run(0, min(length, 3))) == min(length, 3)
        assert [run.nodes for run in (await index.match(keys)).runs] == [("a",)]

    async def test_a_chunk_without_its_parent_is_refused(self, index: Index) -> None:
        """The index stays closed, also if parent and child are in different buckets."""
        keys = chain(600)
        assert await register(index, "a", records(keys, 5, 3)) == [False] * 3
        assert await register(index, "a", records(keys, BUCKET_CHUNKS, 2)) == [False] * 2
        await register(index, "a", records(keys, 0, BUCKET_CHUNKS))
        assert await register(index, "a", records(keys, BUCKET_CHUNKS, 2)) == [True] * 2
        assert await _count(index, keys) == BUCKET_CHUNKS + 2

    async def test_placements_are_runs(self, index: Index) -> None:
        """Mixed placements come back chunk by chunk, merged into runs; a lost replica leaves a tombstone."""
        keys = chain(300)
        await register(index, "a", records(keys, 0, 300))
        await register(index, "b", records(keys, 10, 280))
        runs = [(run.count, run.nodes) for run in (await index.match(keys)).runs]
        assert runs == [(10, ("a",)), (280, ("a", "b")), (10, ("a",))]
        assert await index.unregister("a", records(keys, 290, 5), 0) == [True] * 5
        runs = [(run.count, run.nodes) for run in (await index.match(keys)).runs]
        assert runs == [(10, ("a",)), (280, ("a", "b")), (5, ()), (5, ("a",))]
        await register(index, "c", records(keys, 290, 5))
        assert (await index.match(keys)).runs[2].nodes == ("c",)

    async def test_eviction_is_leaf_first(self, index: Index) -> None:
        """A chunk that another extends stays, so does everything before it, also across buckets and branches."""
        trunk, branch = chain(300), chain(290, branch=1, common=280)
        await register(index, "a", records(trunk, 0, 300))
        await register(index, "a", records(branch, 280, 10))
        removed = await evict(index, trunk, 0, now_ms=0)
        assert [key for key, _ in removed] == [trunk.at(at) for at in range(299, 279, -1)]
        assert all(nodes == ("a",) for _, nodes in removed)
        assert await _count(index, trunk) == 280 and await _count(index, branch) == 290
        assert len(await evict(index, branch, 0, now_ms=0)) == 290
        assert await _count(index, branch) == 0
        await register(index, "a", records(trunk, 0, 300))
        assert await _count(index, trunk) == 300

    async def test_a_leaf_without_holders_leaves_with_its_withdrawal(self, index: Index) -> None:
        """Finding 10: lost chunks pinned their parents for ever. Also if a parent is in the previous bucket."""
        keys = chain(BUCKET_CHUNKS + 3)
        await register(index, "a", records(keys, 0, BUCKET_CHUNKS + 3))
        await index.unregister("a", records(keys, BUCKET_CHUNKS + 1, 1), 0)
        assert await _count(index, keys) == BUCKET_CHUNKS + 3, "others extend it"
        await index.unregister("a", records(keys, BUCKET_CHUNKS + 2, 1), 0)
        assert await _count(index, keys) == BUCKET_CHUNKS + 1, "both are gone now"
        await index.unregister("a", records(keys, BUCKET_CHUNKS - 2, 2), 0)
        await index.unregister("a", records(keys, BUCKET_CHUNKS, 1), 0)
        assert await _count(index, keys) == BUCKET_CHUNKS - 2
        assert len(await evict(index, keys.run(0, BUCKET_CHUNKS - 2), 0, now_ms=0)) == BUCKET_CHUNKS - 2
        assert await listing_of(index, "a") == Listing()

    async def test_the_lease_of_a_leaf_without_holders_passes_to_its_parent(self, index: Index) -> None:
        """The chunks before it are promised to a reader, and were protected by it alone."""
        keys = chain(3)
        await register(index, "a", records(keys, 0, 3))
        assert await _pin(index, keys, b"l", 1000)
        await index.unregister("a", records(keys, 2, 1), 500)
        assert await _count(index, keys) == 2
        assert await evict(index, keys.run(0, 2), 0, now_ms=500) == []
        assert len(await evict(index, keys.run(0, 2), 0, now_ms=1000)) == 2

    async def test_an_entry_that_comes_again_has_another_generation(self, index: Index) -> None:
        """A decision on the first entry does not concern the second: all nodes receive the same one."""
        keys = chain(2)
        first = await index.register("a", records(keys, 0, 2), 0)
        assert all(first) and await index.register("b", records(keys, 0, 2), 0) == first
        evicted = await index.evict(list(reversed(records(keys, 0, 2))), 0, 0)
        assert [entry.generation for entry in evicted.removed] == first[::-1]
        second = await index.register("a", records(keys, 0, 2), 0)
        assert all(second) and not set(first) & set(second)

    async def test_listings_and_holdings_say_what_is_listed(self, index: Index) -> None:
        """Two numbers that are equal only if both sides mean the same chunks; and all of them, page by page."""
        keys, branch = chain(300), chain(300, branch=1, common=20)
        await register(index, "a", records(keys, 0, 300))
        await register(index, "b", records(keys, 0, 30))
        await register(index, "a", records(branch, 20, 280))
        await index.unregister("b", records(keys, 5, 10), 0)
        await evict(index, branch, 25, now_ms=0)
        expected = {*keys, *branch.run(20, 5)}
        assert await listing_of(index, "a") == await sum_of(index, "a", expected)
        assert await listing_of(index, "b") == await sum_of(index, "b", [*keys.run(0, 5), *keys.run(15, 15)])
        await index.unregister("b", [records(keys, 19, 1)[0]], 0)
        await register(index, "b", records(keys, 19, 1))
        assert await listing_of(index, "b") == await sum_of(index, "b", [*keys.run(0, 5), *keys.run(15, 15)])
        generations = await holdings(index, "a")
        assert set(generations) == {fingerprint(key) for key in expected} and all(generations.values())

    async def test_what_one_node_alone_has_is_counted(self, index: Index) -> None:
        """Copies on nodes that do not count are none; the object tier counts if it is named."""
        keys, second_keys = chain(BUCKET_CHUNKS + 40), chain(5, branch=1, common=0)
        await register(index, "a", records(keys, 0, len(keys)))
        await register(index, "ab", records(second_keys, 0, 5))
        await register(index, "b", records(keys, 0, 30))
        await register(index, "c", records(keys, 20, 20))
        await register(index, OBJECT_TIER, records(keys, 0, 10))
        total = len(keys)
        assert await index.sole("a", []) == total and await index.sole("a", ["ab", "a"]) == total
        assert await index.sole("a", ["b"]) == total - 30
        assert await index.sole("a", ["b", "c"]) == total - 40
        assert await index.sole("a", [OBJECT_TIER]) == total - 10
        assert await index.sole("b", ["c"]) == 20 and await index.sole("b", ["a"]) == 0
        assert await index.sole("nobody", ["a"]) == 0

    async def test_what_holdings_tell_of_is_withdrawn(self, index: Index) -> None:
        """Holdings of a lost node are removed by fingerprints, also in consecutive buckets."""
        keys = chain(BUCKET_CHUNKS + 40)
        await register(index, "a", records(keys, 0, len(keys)))
        await register(index, "b", records(keys, 0, 30))
        cursor, unfinished = 0, True
        while unfinished:
            page, cursor = await index.holdings("a", cursor)
            await index.unregister_held("a", page, 0)
            unfinished = bool(cursor)
        assert await listing_of(index, "a") == Listing()
        assert [(run.count, run.nodes) for run in (await index.match(keys)).runs] == [(30, ("b",))]

    @pytest.mark.parametrize("branches", [3, 40])
    async def test_a_root_that_many_share(self, index: Index, branches: int) -> None:
        """More chunks than one page has: each is found, listed, and evicted from its end."""
        chains = [chain(60, branch=branch, common=2) for branch in range(branches)]
        for keys in chains:
            await register(index, "a", records(keys, 0, 40))
        for keys in chains:
            await register(index, "b", records(keys, 30, 30))
        for keys in chains:
            runs = [(run.count, run.nodes) for run in (await index.match(keys)).runs]
            assert runs == [(30, ("a",)), (10, ("a", "b")), (20, ("b",))]
            assert await index.holders(records(keys, 28, 4)) == [("a",), ("a",), ("a", "b"), ("a", "b")]
        assert (await listing_of(index, "a")).count == 2 + 38 * branches
        assert await listing_of(index, "b") == await sum_of(
            index, "b", [key for keys in chains for key in keys.run(30, 30)]
        )
        for number, keys in enumerate(chains):
            common = 2 if number < branches - 1 else 0
            assert len(await evict(index, keys, 0, now_ms=0)) == 60 - common
        assert await listing_of(index, "a") == await listing_of(index, "b") == Listing()

    async def test_a_listing_tells_one_entry_of_a_key_from_the_next(self, index: Index) -> None:
        """An index that went back to an earlier entry differs from what the node knows; the keys are the same."""
        chunks = records(chain(3), 0, 3)
        await register(index, "a", chunks)
        first_listing = await listing_of(index, "a")
        await index.unregister("a", chunks[::-1], 0)
        await register(index, "a", chunks)
        second_listing = await listing_of(index, "a")
        assert second_listing.count == first_listing.count == 3
        assert second_listing.digest != first_listing.digest

    async def test_an_object_is_deleted_only_after_a_time_and_only_if_nothing_lists_it(self, index: Index) -> None:
        """Finding 2: an object that was stored again and acknowledged since went with the eviction before."""
        keys = chain(2)
        pair = records(keys, 0, 2)
        generations = await index.register("a", pair, 0)
        assert await index.add_objects(pair, generations) == [ObjectMark.LISTED] * 2
        assert await index.add_objects(pair, [9, 9]) == [ObjectMark.GONE] * 2
        await index.evict(list(reversed(pair)), 0, 100)
        assert await index.claim_objects(99, 150, 10) == []
        renewed = await index.register("a", pair[:1], 100)
        assert await index.add_objects(pair[:1], generations[:1]) == [ObjectMark.GONE], "that entry has ended"
        assert await index.add_objects(pair[:1], renewed) == [ObjectMark.LISTED]
        claimed = await index.claim_objects(100, 150, 10)
        assert [record.key for record in claimed] == [keys.at(1)], "the first is listed again"
        assert await index.claim_objects(140, 300, 10) == [], "one at a time"
        new = await index.register("a", pair[1:], 110)
        assert await index.add_objects(pair[1:], new) == [ObjectMark.DELETING]
        assert await index.register("@object", pair[1:], 110) == [0]
        await index.objects_deleted(claimed, 149)
        assert await index.add_objects(pair[1:], new) == [ObjectMark.DELETING], "another one's claim"
        await index.objects_deleted(claimed, 150)
        assert await index.add_objects(pair[1:], new) == [ObjectMark.LISTED]

    async def test_a_claim_that_is_not_fulfilled_passes_to_the_next(self, index: Index) -> None:
        keys = chain(1)
        assert await index.expect_objects(records(keys, 0, 1), 10) == [True]
        assert len(await index.claim_objects(10, 20, 10)) == 1
        assert await index.claim_objects(19, 30, 10) == []
        assert len(await index.claim_objects(20, 30, 10)) == 1

    async def test_an_object_that_is_expected_stays_until_it_is_listed(self, index: Index) -> None:
        """An announced object is not deleted before its time; then it is, if unlisted, and is refused meanwhile."""
        keys = chain(2)
        pair = records(keys, 0, 2)
        generations = await index.register("a", pair, 0)
        await index.add_objects(pair, generations)
        await index.evict(list(reversed(pair)), 0, 100)
        assert await index.expect_objects(pair, 200) == [True, True]
        assert await index.expect_objects(pair, 150) == [True, True], "the latest time counts"
        assert await index.claim_objects(150, 180, 10) == []
        renewed = await index.register("a", pair[:1], 150)
        await index.add_objects(pair[:1], renewed)
        assert await index.expect_objects(pair[:1], 300) == [True], "it is listed"
        assert [record.key for record in await index.claim_objects(200, 250, 10)] == [keys.at(1)]
        assert await index.expect_objects(pair, 300) == [True, False]

    async def test_what_was_to_be_deleted_can_be_registered_again(self, index: Index) -> None:
        """An index that went back may have forgotten that it was stored again since. Not while it is being deleted."""
        keys = chain(1)
        first = records(keys, 0, 1)
        await index.add_objects(first, await index.register("a", first, 0))
        await index.evict(first, 0, 100)
        assert all(await index.register("@object", first, 1))
        assert await index.claim_objects(200, 300, 10) == []
        await index.evict(first, 200, 300)
        assert len(await index.claim_objects(300, 400, 10)) == 1
        assert await index.register("@object", first, 301) == [0]

    async def test_changes_are_counted_by_node(self, index: Index) -> None:
        """Counts are independent of listings: a node without any listing keeps its count."""
        keys = chain(1)
        first = records(keys, 0, 1)
        await index.register("a", first, 0)
        for name in ("a", "a", "b"):
            await index.count_change(name)
        assert (await listing_of(index, "a")).changes == 2
        await index.unregister("a", first, 0)
        assert await listing_of(index, "a") == Listing(0, 0, 2)
        assert await listing_of(index, "b") == Listing(0, 0, 1)

    async def test_a_new_index_wants_to_be_told_what_lies_in_the_object_tier(self, index: Index) -> None:
        """Once: an orchestrator that starts does not make it new."""
        name = await index.epoch()
        token = await index.rebuild()
        assert token
        await index.rebuilt(token)
        assert await index.epoch() == name and await index.rebuild() == ""

    async def test_a_node_may_let_go_of_what_the_object_tier_has(self, index: Index) -> None:
        """Finding 2: a note of one's own that the object exists is not enough."""
        keys = chain(2)
        pair = records(keys, 0, 2)
        generations = await index.register("a", pair, 0)
        await index.add_objects(pair[:1], generations[:1])
        assert await index.unregister("a", pair, 0, only_in_object=True) == [True, False]
        runs = [run.nodes for run in (await index.match(keys)).runs]
        assert runs == [("@object",), ("a",)]

    async def test_a_node_keeps_what_the_index_does_not_know(self, index: Index) -> None:
        """Simulated seed 10592: the index had gone back, and a node took the object tier to have its last copy."""
        unknown, listed = records(chain(1), 0, 1), records(chain(1, 7), 0, 1)
        assert await index.unregister("a", unknown, 0, only_in_object=True) == [False]
        assert await index.unregister("a", unknown, 0, keepers=["b"]) == [False]
        assert await index.unregister("a", unknown, 0) == [True]
        await index.register("b", listed, 0)
        assert await index.unregister("a", listed, 0, only_in_object=True) == [False]
        assert await index.unregister("a", listed, 0, keepers=["b"]) == [True]

    async def test_a_node_may_let_go_of_what_its_keepers_have(self, index: Index) -> None:
        """Finding 21: copies beyond the second were never given up. Not under a lease, nor for itself."""
        keys = chain(1)
        only = records(keys, 0, 1)
        for name in ("a", "b"):
            generations = await index.register(name, only, 0)
        await index.add_objects(only, generations)
        assert await index.unregister("a", only, 0, keepers=["b", "c"]) == [False]
        assert await index.unregister("a", only, 0, keepers=["a", "b"]) == [False]
        await index.register("c", only, 0)
        pin = Pin(lease_id=b"l" * 16, expires_ms=100, ttl_ms=100, now_ms=0)
        await index.match(keys, pin)
        assert await index.unregister("a", only, 99, keepers=["b", "c"]) == [False]
        assert await index.unregister("a", only, 100, keepers=["b", "c"]) == [True]
        assert await index.unregister("b", only, 100, keepers=["a", "c"]) == [False]
        assert set((await index.match(keys)).runs[0].nodes) == {"b", "c", "@object"}

    async def test_a_rebuilding_is_wanted_until_it_is_done(self, index: Index) -> None:
        assert await index.rebuild() == ""
        await index.damaged()
        token = await index.rebuild()
        await index.damaged()
        assert token and await index.rebuild() == token
        await index.rebuilt("another")
        assert await index.rebuild() == token
        await index.rebuilt(token)
        assert await index.rebuild() == ""

    async def test_expired_pins_go(self, index: Index) -> None:
        """Finding 15: in a bucket without evictions, pins stayed for ever."""
        keys = chain(2)
        await register(index, "a", records(keys, 0, 2))
        for number in range(50):
            assert await _pin(index, keys, bytes([number]), 1000)
        assert await index.pins(keys.bucket_of(1)) == 50
        assert await _pin(index, keys, b"z", 90_000, now_ms=20_000)
        assert await index.pins(keys.bucket_of(1)) == 1

    async def test_pins_hold_the_whole_prefix_until_they_expire(self, index: Index) -> None:
        keys = chain(270)
        await register(index, "a", records(keys, 0, 270))
        assert await _pin(index, keys.run(0, 264), b"l", 1000) == 264
        assert len(await evict(index, keys, 0, now_ms=999)) == 6
        assert await _count(index, keys) == 264
        assert await evict(index, keys.run(0, 264), 0, now_ms=999) == []
        assert len(await evict(index, keys.run(0, 264), 200, now_ms=1000)) == 64
        assert await _pin(index, keys.run(0, 101), b"m", 5000) == 101
        assert await index.unpin(keys.bucket_of(100), keys.at(100), b"m" * 16)
        assert not await index.unpin(keys.bucket_of(100), keys.at(100), b"m" * 16)
        assert len(await evict(index, keys.run(0, 200), 0, now_ms=0)) == 200
        assert not await _pin(index, keys, b"l", 1000), "what is gone cannot be pinned"
        assert await index.pins(keys.bucket_of(0)) == 0

    async def test_a_pin_holds_what_is_before_a_chunk_that_is_lost(self, index: Index) -> None:
        """Also if the parent is in the previous bucket."""
        keys, dropped = chain(300), [*range(300)][BUCKET_CHUNKS:]
        assert all(await register(index, "a", records(keys, 0, BUCKET_CHUNKS)))
        assert all(await register(index, "b", records(keys, BUCKET_CHUNKS, len(dropped))))
        assert await _pin(index, keys, b"r", 5000) == 300
        await index.unregister("b", records(keys, BUCKET_CHUNKS, len(dropped)), 1000)
        assert await _count(index, keys) == BUCKET_CHUNKS
        assert not await evict(index, keys.run(0, BUCKET_CHUNKS), 0, 1000)
        assert await index.unpin_all(keys, b"r" * 16) == 1
        assert len(await evict(index, keys.run(0, BUCKET_CHUNKS), 0, 1000)) == BUCKET_CHUNKS

    async def test_of_two_pins_that_meet_the_longer_one_counts(self, index: Index) -> None:
        keys = chain(12)
        assert all(await register(index, "a", records(keys, 0, 10)))
        assert all(await register(index, "b", records(keys, 10, 2)))
        assert await _pin(index, keys.run(0, 10), b"r", 9000) == 10
        assert await _pin(index, keys, b"r", 2000) == 12
        await index.unregister("b", list(reversed(records(keys, 10, 2))), 1000)
        assert not await evict(index, keys.run(0, 10), 0, 3000)
        assert len(await evict(index, keys.run(0, 10), 0, 9500)) == 10

    async def test_all_pins_of_an_id_are_given_back_at_once(self, index: Index) -> None:
        """Wherever they are on the keys; of other ids none."""
        keys = chain(300)
        await register(index, "a", records(keys, 0, 300))
        for count in (10, 280, 300):
            assert await _pin(index, keys.run(0, count), b"r", 5000) == count
        assert await _pin(index, keys.run(0, 5), b"l", 5000) == 5
        assert await index.unpin_all(keys, b"r" * 16) == 3
        assert await index.unpin_all(keys, b"r" * 16) == 0
        assert len(await evict(index, keys, 0, now_ms=0)) == 295, "what the lease is on stays"

    async def test_what_matched_is_pinned_in_the_same_step(self, index: Index) -> None:
        """Evicted between a match and a pin, a lease had to be opened again."""
        keys = chain(300)
        await register(index, "a", records(keys, 0, 270))
        leases = (_pin(index, keys, bytes([number]), 1000) for number in range(8))
        evictions = (evict(index, keys.run(0, 270), 0, now_ms=0) for _ in range(8))
        calls: list[Any] = [call for pair in zip(leases, evictions, strict=True) for call in pair]
        matched = (await asyncio.gather(*calls))[::2]
        assert await _count(index, keys) == max(matched), "what a lease was given on stays, and nothing else"

    async def test_many_questions_at_once_are_all_answered(self, index: Index) -> None:
        keys = chain(4)
        await register(index, "a", records(keys, 0, 4))
        assert {match.count for match in await asyncio.gather(*(index.match(keys) for _ in range(500)))} == {4}
