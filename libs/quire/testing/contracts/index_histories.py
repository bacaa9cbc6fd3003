"""Random histories of an index, compared with a model."""

from __future__ import annotations

import random

import pytest

from quire.model.records import records
from quire.testing.contracts.index import Index, chain, drops_of, evict, listing_of, register, sum_of


class IndexHistoriesContract:
    """Needs the fixture of `IndexContract`."""

    @pytest.mark.parametrize("seed", range(6))
    async def test_random_histories_equal_the_model(self, index: Index, seed: int) -> None:
        """Register, unregister, evict and match on branching chains, against a dict of parents and holders."""
        rng = random.Random(seed)
        chains = [chain(rng.randint(200, 560), branch=b, common=rng.randint(100, 400)) for b in range(4)]
        holders: dict[bytes, set[str]] = {}
        parents: dict[bytes, bytes] = {}
        hidden: set[tuple[str, bytes]] = set()
        to_drop: set[tuple[str, bytes]] = set()

        def remove(key: bytes) -> None:
            while key in holders:
                parent = parents.pop(key)
                del holders[key]
                if holders.get(parent) != set() or parent in parents.values():
                    return
                key = parent

        for step in range(60):
            keys = rng.choice(chains)
            first = rng.randrange(len(keys))
            count = rng.randint(1, len(keys) - first)
            node = rng.choice("abc")
            part = records(keys, first, count)
            action = rng.random()
            if action < 0.6:
                expected = []
                for record in part:
                    fits = not record.parent or record.parent in holders or record.key in holders
                    expected.append(fits)
                    if fits:
                        holders.setdefault(record.key, set()).add(node)
                        parents.setdefault(record.key, record.parent)
                        to_drop -= {(node, record.key)}
                        hidden -= {(node, record.key)}
                assert await register(index, node, part) == expected
            elif action < 0.8:
                hides = rng.random() < 0.5
                await index.unregister(node, part, 0, hidden=hides)
                for record in part:
                    if hides and node in holders.get(record.key, set()):
                        hidden.add((node, record.key))
                    holders.get(record.key, set()).discard(node)
                    if holders.get(record.key) == set() and record.key not in parents.values():
                        remove(record.key)
            else:
                removed = [key for key, _ in await evict(index, keys, first, now_ms=0)]
                expected_gone = []
                for key in reversed(list(keys.run(first, len(keys) - first))):
                    if key in parents.values():
                        continue
                    going = {copy for copy in hidden if copy[1] == key}
                    hidden -= going
                    to_drop |= going | {(name, key) for name in holders.get(key, ())}
                    if key in holders:
                        expected_gone.append(key)
                        remove(key)
                assert removed == expected_gone
                assert {(name, drop.key) for name in "abc" for drop in await drops_of(index, name)} == to_drop
            for one_chain in chains:
                present = 0
                while present < len(one_chain) and one_chain.at(present) in holders:
                    present += 1
                match = await index.match(one_chain)
                assert match.count == present
                flat = [set(run.nodes) for run in match.runs for _ in range(run.count)]
                assert flat == [holders[one_chain.at(at)] for at in range(present)]
            for name in "abc" if step % 3 == 2 else "":  # on a Redis Cluster it takes hundreds of calls
                listed = [key for key, names in holders.items() if name in names]
                assert await listing_of(index, name) == await sum_of(index, name, listed)

    @pytest.mark.parametrize("seed", range(4))
    async def test_random_histories_of_single_chunks_equal_the_model(self, index: Index, seed: int) -> None:
        """The same with chunks that stand for themselves: each opens a bucket of its own, and closes it."""
        rng = random.Random(seed)
        keys = chain(12)
        holders: dict[bytes, set[str]] = {}
        hidden: set[tuple[str, bytes]] = set()
        to_drop: set[tuple[str, bytes]] = set()
        for step in range(80):
            chosen = keys.pick(sorted(rng.sample(range(len(keys)), rng.randint(1, 6))))
            chunks = records(chosen, 0, len(chosen), unchained=True)
            names, node, action = [chunk.key for chunk in chunks], rng.choice("abc"), rng.random()
            if action < 0.5:
                assert await register(index, node, chunks) == [True] * len(chunks)
                for key in names:
                    holders.setdefault(key, set()).add(node)
                to_drop -= {(node, key) for key in names}
                hidden -= {(node, key) for key in names}
            elif action < 0.75:
                hides = rng.random() < 0.5
                await index.unregister(node, chunks, 0, hidden=hides)
                copies = {key for key in names if node in holders.get(key, ())}
                hidden |= {(node, key) for key in copies} if hides else set()
                for key in copies:
                    holders[key].discard(node)
            else:
                evicted = await index.evict(chunks, 0, 100)
                assert {entry.record.key for entry in evicted.removed} == holders.keys() & set(names)
                going = {copy for copy in hidden if copy[1] in names}
                hidden -= going
                to_drop |= going | {(name, key) for key in names for name in holders.pop(key, ())}
            if step % 8 == 7:  # it takes hundreds of calls
                assert {(name, drop.key) for name in "abc" for drop in await drops_of(index, name)} == to_drop
            holders = {key: names for key, names in holders.items() if names}
            every = records(keys, 0, len(keys), unchained=True)
            listed = await index.root_holders(keys)
            assert [set(names) for names in listed] == [holders.get(key, set()) for key in keys]
            assert listed == await index.holders(every)
            for name in "abc" if step % 4 == 3 else "":
                assert await listing_of(index, name) == await sum_of(
                    index, name, [key for key, names in holders.items() if name in names]
                )
