"""Calls of an index with chunks of several buckets, or none."""

from __future__ import annotations

import pytest

from quire.model.fingerprints import fingerprint
from quire.model.index import OBJECT_TIER, Drop, Evicted, Listing, Match, ObjectMark, Pin
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys
from quire.model.records import ChunkRecord, records
from quire.testing.contracts.index import Index, chain, drops_of, holdings


class IndexCallsContract:
    """Needs the fixture of `IndexContract`."""

    async def test_every_call_takes_chunks_of_many_buckets(self, index: Index) -> None:
        keys = chain(2 * BUCKET_CHUNKS + 3)
        chunks = records(keys, 0, len(keys))
        deepest_first = list(reversed(chunks))
        named = {(chunk.bucket, chunk.key) for chunk in chunks}
        generations = await index.register("a", chunks, 0)
        assert len(generations) == len(chunks) and all(generations)
        assert await index.add_objects(chunks, generations) == [ObjectMark.LISTED] * len(chunks)
        assert [set(names) for names in await index.holders(chunks)] == [{"a", "@object"}] * len(chunks)
        assert await index.join("b", chunks, generations, only_in_object=True) == [True] * len(chunks)
        assert await index.unregister("b", chunks, 1) == [True] * len(chunks)
        assert await index.unregister("a", chunks, 1) == [True] * len(chunks)
        assert await index.holders(chunks) == [("@object",)] * len(chunks)
        evicted = await index.evict(deepest_first, 1, 50)
        assert [entry.record for entry in evicted.removed] == deepest_first and evicted.absent == ()
        assert [entry.generation for entry in evicted.removed] == list(reversed(generations))
        assert await index.holders(chunks) == [()] * len(chunks)
        repeated = await index.evict(deepest_first, 1, 50)
        assert repeated.removed == () and repeated.absent == tuple(chunk.key for chunk in deepest_first)
        assert await index.claim_objects(49, 100, 1000) == []
        first_claims = await index.claim_objects(50, 100, 5)
        next_claims = await index.claim_objects(50, 100, 1000)
        assert (len(first_claims), len(next_claims)) == (5, len(chunks) - 5)
        assert {(chunk.bucket, chunk.key) for chunk in (*first_claims, *next_claims)} == named
        assert {(chunk.parent, chunk.parent_bucket) for chunk in (*first_claims, *next_claims)} == {(b"", b"")}, (
            "it is not known"
        )
        await index.objects_deleted([*first_claims, *next_claims], 100)
        assert await index.claim_objects(10**6, 10**6 + 1, 1000) == []
        assert await index.expect_objects(chunks, 500) == [True] * len(chunks)
        assert {(chunk.bucket, chunk.key) for chunk in await index.claim_objects(500, 600, 1000)} == named
        assert await index.expect_objects(chunks, 900) == [False] * len(chunks), "they are being deleted"

    async def test_the_last_chunk_that_is_held_takes_its_chain_along(self, index: Index) -> None:
        """Through every bucket that it goes through: only that chunk still kept those before it."""
        keys = chain(2 * BUCKET_CHUNKS + 1)
        chunks = records(keys, 0, len(keys))
        await index.register("a", chunks, 0)
        assert await index.unregister("a", chunks[:-1], 1) == [True] * (len(chunks) - 1)
        assert (await index.match(keys)).count == len(keys)
        assert await index.unregister("a", chunks[-1:], 1) == [True]
        for chunk in (chunks[1], chunks[BUCKET_CHUNKS], chunks[BUCKET_CHUNKS + 1], chunks[-1]):
            assert await index.register("a", [chunk], 2) == [0], "its parent is not there"

    @pytest.mark.parametrize("length", [BUCKET_CHUNKS, BUCKET_CHUNKS + 1])
    async def test_a_pin_is_on_the_last_chunk_that_matched(self, index: Index, length: int) -> None:
        keys = chain(length)
        await index.register("a", records(keys, 0, length), 0)
        assert (
            await index.match(keys, Pin(lease_id=b"l" * 16, expires_ms=1000, ttl_ms=60_000, now_ms=0))
        ).count == length
        last = records(keys, length - 1, 1)[0]
        assert await index.unpin(last.bucket, last.key, b"l" * 16)

    async def test_many_roots_in_one_call(self, index: Index) -> None:
        roots = [records(chain(2, branch=branch), 0, 2) for branch in range(150)]
        chunks = [chunk for root in roots for chunk in root]
        generations = await index.register("a", chunks, 0)
        assert len(generations) == len(chunks) and all(generations)
        listing = await index.listing("a")
        assert listing.count == len(chunks)
        assert (await holdings(index, "a")).keys() == {fingerprint(chunk.key) for chunk in chunks}
        assert await index.register("a", chunks, 0) == generations, "they are there"

    async def test_of_nothing_nothing_is_said(self, index: Index) -> None:
        assert await index.match(ChunkKeys(b"")) == Match(())
        assert await index.listing("never heard of") == Listing()
        assert await holdings(index, "never heard of") == {}
        assert await index.register("a", [], 0) == [] == await index.unregister("a", [], 0)

    async def test_what_a_node_has_to_drop_is_kept_until_it_has(self, index: Index) -> None:
        keys = chain(600)
        chunks = records(keys, 0, 600)
        generations = await index.register("a", chunks, 0)
        await index.register("b", chunks[:300], 0)
        await index.evict(chunks[::-1], 0, 0, asking="b")
        expected = {
            Drop(chunk.key, fingerprint(chunk.bucket), generation)
            for chunk, generation in zip(chunks, generations, strict=True)
        }
        for _ in range(2):  # a node that did not get the answer asks again
            assert set(await drops_of(index, "a")) == expected
        assert await drops_of(index, "b") == [], "it asked for the eviction"
        older = [Drop(drop.key, drop.bucket, drop.generation ^ 2) for drop in expected]
        await index.settle_drops("a", older)
        assert set(await drops_of(index, "a")) == expected, "another entry's"
        renewed = await index.register("a", chunks[:500], 0)
        assert {drop.key for drop in await drops_of(index, "a")} == set(keys.run(500, 100)), "it holds the others again"
        assert not set(renewed) & set(generations)
        await index.settle_drops("a", list(expected))
        assert await drops_of(index, "a") == []

    async def test_new_entries_have_the_generation_that_was_proposed(self, index: Index) -> None:
        keys = chain(300)
        chunks = records(keys, 0, 300)
        first_entries = await index.register("a", chunks[:100], 0)
        next_entries = await index.register("b", chunks, 0, fresh=12345)
        assert next_entries == [*first_entries, *[12345] * 200]
        assert await index.entries(chunks[99:101]) == [(first_entries[99], ("a", "b")), (12345, ("b",))]

    async def test_a_new_entry_has_its_own_generation_behind_one_without_holders(self, index: Index) -> None:
        """An entry without holders stays while a chunk in another bucket extends it."""
        root, middle, last, leaf = (letter.encode() * 32 for letter in "rmlo")
        trunk = [ChunkRecord(root, b"", root, b""), ChunkRecord(middle, root, root, root)]
        beyond = ChunkRecord(last, middle, last, root)
        await index.register("a", [*trunk, beyond], 0, fresh=5)
        assert await index.unregister("a", trunk[1:], 0) == [True]
        branch = ChunkRecord(leaf, root, root, root)
        assert await index.register("a", [branch], 0, fresh=7) == [7]
        assert await index.entries([*trunk, branch]) == [(5, ("a",)), (5, ()), (7, ("a",))]

    @pytest.mark.parametrize("holders", [[], ["b"]], ids=["the last copy", "one of two"])
    async def test_a_node_that_hides_a_copy_is_to_drop_it_with_the_chunk(
        self, index: Index, holders: list[str]
    ) -> None:
        first = records(chain(1), 0, 1)
        (generation,) = await index.register("a", first, 0)
        for name in holders:
            await index.register(name, first, 0)
        assert await index.unregister("a", first, 0, hidden=True) == [True]
        assert await index.holders(first) == [tuple(holders)], "it is promised no more"
        assert await drops_of(index, "a") == []
        for _ in range(2):  # an eviction that is asked for again finds it no more
            evicted = await index.evict(first, 0, 0)
            drop = Drop(first[0].key, fingerprint(first[0].bucket), generation)
            assert await drops_of(index, "a") == [drop]
        assert (evicted.absent, evicted.hidden) == ((first[0].key,), ())

    async def test_hidden_copies_of_an_earlier_entry_are_dropped_with_the_chunk(self, index: Index) -> None:
        first = records(chain(1), 0, 1)
        await index.register("a", first, 0, fresh=3)
        await index.unregister("a", first, 0, hidden=True)
        await index.register("b", first, 0, fresh=5)
        await index.unregister("b", first, 0, hidden=True)
        await index.register("c", first, 0, fresh=7)
        evicted = await index.evict(first, 0, 0, asking="c")
        assert {(copy.nodes, copy.generation) for copy in evicted.hidden} == {(("a",), 3), (("b",), 5)}
        assert [[drop.generation for drop in await drops_of(index, name)] for name in "abc"] == [[3], [5], []]

    @pytest.mark.parametrize("joins", [False, True])
    async def test_a_copy_that_is_listed_again_is_not_hidden(self, index: Index, joins: bool) -> None:
        first = records(chain(1), 0, 1)
        (generation,) = await index.register("a", first, 0)
        await index.register("b", first, 0)
        await index.unregister("a", first, 0, hidden=True)
        if joins:
            assert await index.join("a", first, [generation], only_in_object=False) == [True]
        else:
            await index.register("a", first, 0)
        await index.unregister("a", first, 0)
        assert (await index.evict(first, 0, 0)).hidden == ()
        assert await drops_of(index, "a") == []

    async def test_a_hidden_copy_stays_with_a_chunk_that_is_kept(self, index: Index) -> None:
        chunks = records(chain(2), 0, 2)
        await index.register("a", chunks, 0)
        await index.register("b", chunks, 0)
        await index.unregister("a", chunks, 0, hidden=True)
        assert await index.evict(chunks[:1], 0, 0) == Evicted((), ()), "the next one extends it"
        assert len((await index.evict(chunks[::-1], 0, 0)).hidden) == 2

    async def test_a_claim_can_be_given_back(self, index: Index) -> None:
        """The object is not deleted, can be listed again, and has its time anew. A claim that has passed on stays."""
        keys = chain(1)
        chunks = records(keys, 0, 1)
        await index.expect_objects(chunks, 10)
        claimed = await index.claim_objects(10, 20, 10)
        assert await index.register("@object", chunks, 11) == [0]
        await index.unclaim_objects(claimed, 19, 50)
        assert await index.register("@object", chunks, 11) == [0], "another one's claim"
        await index.unclaim_objects(claimed, 20, 50)
        assert await index.claim_objects(49, 60, 10) == []
        assert len(await index.claim_objects(50, 60, 10)) == 1
        await index.unclaim_objects(claimed, 60, 100)
        assert all(await index.register("@object", chunks, 61))
        assert await index.claim_objects(200, 300, 10) == []

    async def test_no_object_of_a_key_that_has_an_entry_is_claimed(self, index: Index) -> None:
        """The entry may list it yet, however late. Once the entry has ended, the object is deleted."""
        keys = chain(1)
        first = records(keys, 0, 1)
        generations = await index.register("a", first, 0)
        await index.expect_objects(first, 10)
        for now_ms in (10, 100, 200):
            assert await index.claim_objects(now_ms, now_ms + 50, 10) == []
        assert await index.expect_objects(first, 210) == [True], "it is not being deleted"
        await index.evict(first, 210, 220)
        assert await index.add_objects(first, generations) == [ObjectMark.GONE]
        assert len(await index.claim_objects(300, 350, 10)) == 1

    async def test_a_claim_that_has_passed_ends_where_the_key_has_an_entry_again(self, index: Index) -> None:
        """The objects that were to be deleted have names of earlier generations: they do not concern the new entry."""
        keys = chain(1)
        first = records(keys, 0, 1)
        await index.expect_objects(first, 10)
        assert len(await index.claim_objects(10, 20, 10)) == 1
        generations = await index.register("a", first, 15)
        assert await index.add_objects(first, generations) == [ObjectMark.DELETING]
        assert await index.claim_objects(20, 30, 10) == []
        assert await index.add_objects(first, generations) == [ObjectMark.LISTED]

    async def test_ticks_grow(self, index: Index) -> None:
        assert [await index.tick() for _ in range(3)] == [1, 2, 3]

    async def test_a_rebuilding_may_be_wanted_once_more(self, index: Index) -> None:
        """Then the one that is under way does not end it."""
        await index.damaged()
        first = await index.rebuild()
        await index.damaged()
        assert await index.rebuild() == first and await index.last_rebuild() == ""
        await index.damaged(anew=True)
        second = await index.rebuild()
        assert second not in ("", first)
        await index.rebuilt(first)
        assert await index.rebuild() == second and await index.last_rebuild() == ""
        await index.rebuilt(second)
        assert await index.rebuild() == "" and await index.last_rebuild() == second

    async def test_a_node_joins_an_entry_and_not_the_next_one_of_the_same_key(self, index: Index) -> None:
        """A copy of the object tier's chunk, or of another node's, must not bring an evicted chunk back."""
        keys = chain(2)
        pair = records(keys, 0, 2)
        generations = await index.register("a", pair, 0)
        assert await index.join("b", pair, generations, only_in_object=True) == [False, False], "no object is listed"
        assert await index.join("c", pair, generations, only_in_object=False) == [True, True]
        await index.unregister("c", pair, 1)
        await index.add_objects(pair, generations)
        assert await index.join("b", pair, [generations[0], 9], only_in_object=True) == [True, False]
        assert [set(names) for names in await index.holders(pair)] == [{"a", "b", OBJECT_TIER}, {"a", OBJECT_TIER}]
        assert await index.join("b", pair[:1], generations[:1], only_in_object=True) == [True], "twice is once"
        assert len((await index.holders(pair[:1]))[0]) == 3
        await index.evict(list(reversed(pair)), 0, 100)
        assert await index.join("b", pair, generations, only_in_object=True) == [False, False], "they have ended"
        renewed = await index.register("a", pair, 100)
        for only_in_object in (True, False):
            marks = await index.join("b", pair, generations, only_in_object=only_in_object)
            assert marks == [False, False], "these are other entries"
        assert await index.holders(pair) == [("a",), ("a",)]
        assert [drop.key for drop in await drops_of(index, "b")] == [keys.at(0)]
        await index.add_objects(pair[:1], renewed[:1])
        assert await index.join("b", pair[:1], renewed[:1], only_in_object=True) == [True]
        assert await drops_of(index, "b") == [], "what was to be dropped is listed again"
