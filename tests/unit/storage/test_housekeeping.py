"""What a policy lets go: prefixes from their ends, the coldest first, whatever order chunks came in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.policy import NamespacePolicy, PolicyList, TenantPolicy, TenantState
from quire.model.records import ChunkRecord
from quire.testing import FakeClock
from quire_storage.cluster.housekeeping import Housekeeping
from quire_storage.core.chunks import Chunk
from quire_storage.core.namespaces import ChunkFacts, Group, NamespaceBook, _Followed, _Order
from tests.unit.storage.residency_world import SHAPES, World, chunk_of, stored

ONE, TWO = b"1" * 16, b"2" * 16
SIZE = 4096


def _key(chain: int, at: int) -> bytes:
    return bytes([chain]) * 30 + at.to_bytes(2, "big")


def _chunk(chain: int, at: int, namespace: bytes = ONE, stored_ms: int = 0) -> Chunk:
    record = ChunkRecord(_key(chain, at), _key(chain, at - 1) if at else b"", b"", b"", namespace)
    return Chunk(record, 1, SIZE, np.zeros(1, np.uint32), stored_ms)


@dataclass
class _Scene:
    """A book, and an index that lets only leaves go, and what is not `pinned`."""

    book: NamespaceBook = field(default_factory=NamespaceBook)
    here: dict[bytes, Chunk] = field(default_factory=dict)
    pinned: set[bytes] = field(default_factory=set)
    asked: int = 0

    def enter(self, chunks: Sequence[Chunk]) -> None:
        self.here.update((chunk.key, chunk) for chunk in chunks)
        self.book.entered(chunks)

    def use(self, chunks: Sequence[Chunk]) -> None:
        self.book.used(reversed(chunks))

    async def evict(self, keys: Sequence[bytes]) -> int:
        gone = 0
        for key in keys:
            self.asked += 1
            extended = any(chunk.record.parent == key for chunk in self.here.values())
            if key not in self.pinned and not extended:
                self.book.left(self.here.pop(key))
                gone += 1
        return gone

    def housekeeping(self) -> Housekeeping:
        residency = SimpleNamespace(namespaces=self.book, pool=None, off_drives=list)
        tiers: Any = SimpleNamespace(residency=residency, evict=self.evict)
        nothing: Any = None
        return Housekeeping(tiers=tiers, index=nothing, clock=FakeClock(), threads=nothing, check_s=1.0)

    def carry_out(self, *, quota: int = 0, ttl_s: int = 0, namespace: bytes = ONE) -> None:
        found = PolicyList(namespaces=(NamespacePolicy(namespace, ttl_s, quota * SIZE),), storage_nodes=1)
        asyncio.run(self.housekeeping()._carry_out(found))

    def left(self, chain: int) -> list[int]:
        return sorted(int.from_bytes(key[30:], "big") for key in self.here if key[0] == chain)


def _followed(*namespaces: bytes) -> _Scene:
    scene = _Scene()
    scene.book.follow([Group([each]) for each in namespaces])
    scene.book.walked(namespaces)
    return scene


def _asked_of_a_conversation_that_grows() -> int:
    """A prefix is used before it is extended, so that no part of the order has leaves only."""
    scene = _followed(ONE)
    for at in range(0, 40, 10):
        scene.use([_chunk(1, each) for each in range(at)])
        scene.enter([_chunk(1, each) for each in range(at, at + 10)])
    scene.enter([_chunk(2, each) for each in range(10)])
    scene.carry_out(quota=25)
    assert (scene.left(1), scene.left(2)) == (list(range(15)), list(range(10)))
    return scene.asked


def test_a_conversation_that_has_grown_goes_from_its_end() -> None:
    assert _asked_of_a_conversation_that_grows() == 25, "nothing was asked for in vain"


def test_an_order_that_does_not_know_what_is_extended_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: parents were asked for, refused, and asked for again, for ever."""

    def first(self: _Followed, order: _Order, is_wanted: Callable[[int, int], bool]) -> list[bytes] | None:
        chosen: list[bytes] = []
        for row in order._lists.rows(order._ranks[0]):
            if not is_wanted(row, SIZE * len(chosen)):
                break
            chosen.append(self.rows.key(row))
        return chosen or None

    monkeypatch.setattr(_Followed, "first", first)
    with pytest.raises(AssertionError):
        assert _asked_of_a_conversation_that_grows() == 25


def test_what_is_in_use_is_passed_over_and_asked_for_again() -> None:
    scene = _followed(ONE)
    for chain in range(1, 5):
        scene.enter([_chunk(chain, at) for at in range(10)])
    scene.pinned = {_key(1, 9), _key(2, 4)}
    scene.carry_out(quota=30)
    assert [len(scene.left(chain)) for chain in range(1, 5)] == [10, 5, 5, 10]
    scene.pinned = set()
    scene.carry_out(quota=5)
    assert sum(len(scene.left(chain)) for chain in range(1, 5)) == 5


def test_what_is_too_old_goes_and_what_extends_it_keeps_it() -> None:
    scene, now_ms = _followed(ONE), FakeClock().now_ms()
    scene.enter([_chunk(1, at, stored_ms=now_ms - 10_000) for at in range(1000)])
    scene.enter([_chunk(2, at, stored_ms=now_ms - 10_000) for at in range(5)])
    scene.enter([_chunk(2, at, stored_ms=now_ms - 3000) for at in range(5, 7)])
    scene.carry_out(ttl_s=5)
    assert (scene.left(1), scene.left(2)) == ([], list(range(7)))
    scene.carry_out(ttl_s=2)
    assert scene.left(2) == []


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), max_size=40))
def test_what_is_too_old_goes_whatever_came_before_it(ages_s: list[tuple[int, int]]) -> None:
    """A chunk that comes from the object tier, or from another node, may be older than what came before it."""
    scene, now_ms, lengths = _followed(ONE), FakeClock().now_ms(), Counter[int]()
    for chain, age_s in ages_s:
        scene.enter([_chunk(chain, lengths[chain], stored_ms=now_ms - 1000 * age_s)])
        lengths[chain] += 1
    scene.carry_out(ttl_s=10)
    ends = [max(scene.left(chain), default=None) for chain in lengths]
    last = [scene.here[_key(chain, end)] for chain, end in zip(lengths, ends, strict=True) if end is not None]
    assert all(chunk.stored_ms >= now_ms - 10_000 for chunk in last), "each prefix ends with one that is not too old"
    assert all(scene.left(chain) == list(range(len(scene.left(chain)))) for chain in lengths)


def test_namespaces_of_a_tenant_are_bounded_together() -> None:
    """The coldest go, whichever they are in; the group may grow, and what was known of it stays."""
    scene = _followed(ONE)
    scene.enter([_chunk(1, at) for at in range(4)])
    both = Group([ONE, TWO])
    scene.book.follow([both])
    assert scene.book.wanted == {TWO}
    assert scene.book.excess(both, 0) is None, "not before all is known"
    scene.here[_key(2, 0)] = _chunk(2, 0, TWO)
    scene.book.add(
        [ChunkFacts(_key(2, 0), b"", TWO, SIZE, 0), ChunkFacts(_key(9, 0), b"", TWO, SIZE, 0)], scene.here.__contains__
    )
    scene.book.walked([TWO])
    scene.enter([_chunk(3, 0, TWO)])
    state = TenantState(policy=TenantPolicy("t", stored_bytes_max=4 * SIZE), kept_bytes=SIZE, namespaces=both)
    asyncio.run(scene.housekeeping()._carry_out(PolicyList(tenants=(state,), storage_nodes=1)))
    assert (scene.left(1), scene.left(2), scene.left(3)) == ([0, 1], [], [0])


_STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "use", "leave"]), st.integers(1, 4), st.integers(1, 6)), max_size=40
)


@given(_STEPS, st.integers(0, 12))
def test_whatever_came_the_quota_is_kept(steps: list[tuple[str, int, int]], quota: int) -> None:
    """As many chunks are left as may be, each with all that is before it, and none was asked for in vain."""
    scene, length = _followed(ONE), dict.fromkeys(range(1, 5), 0)
    for what, chain, count in steps:
        if what == "enter":
            scene.enter([_chunk(chain, at) for at in range(length[chain], length[chain] + count)])
            length[chain] += count
        elif what == "use":
            scene.use([_chunk(chain, at) for at in range(min(count, length[chain]))])
        else:
            for _ in range(min(count, length[chain])):
                length[chain] -= 1
                scene.book.left(scene.here.pop(_key(chain, length[chain])))
    total = len(scene.here)
    scene.carry_out(quota=max(1, quota))
    assert len(scene.here) == min(total, max(1, quota))
    assert scene.asked == total - len(scene.here)
    for chain in length:
        assert scene.left(chain) == list(range(len(scene.left(chain))))


async def test_what_was_here_before_is_found_while_chunks_come_and_go() -> None:
    """A pool's chunks are added in the order of storing, with what has come and without what has gone meanwhile."""
    world = World(drives=2, objects=False)
    for first in (0, 8, 16):
        stored(world, [chunk_of(first + at) for at in range(4)])
    book, tag = world.residency.namespaces, bytes(16)
    with ThreadPoolExecutor(1) as threads:
        tiers: Any = SimpleNamespace(residency=world.residency)
        nothing: Any = None
        housekeeping = Housekeeping(tiers=tiers, index=nothing, clock=FakeClock(), threads=threads, check_s=1.0)
        book.follow([Group([tag])])
        walking = asyncio.create_task(housekeeping._walk(book.wanted))
        await asyncio.sleep(0)
        stored(world, [chunk_of(24)])
        await walking
    assert not book.wanted
    (mine,) = book._followed.values()
    here = set(world.residency.keys())
    by_age, by_use = (
        [mine.rows.key(row) for rank in sorted(order._ranks) for row in order._lists.rows(order._ranks[rank])]
        for order in (mine.by_age, mine.by_use)
    )
    assert sorted(by_age) == sorted(by_use) == sorted(here) and len(here) == 13
    assert by_use[-1] == chunk_of(24).key
    assert mine.size == sum(SHAPES[number // 4 % 2].slot_bytes for number in world.numbers_here())
