"""The residency machine on full drives: the questions of writes that wait for places."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from quire.model.durability import Durability
from quire.model.errors import PoolFull
from quire_storage.core.chunks import DiskPlace
from quire_storage.core.eviction import LeafArc
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency import ResidencySettings
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.slab_victims import SlabVictims
from quire_storage.core.residency.spared import Spared
from tests.unit.storage.residency_world import World, chunk_of, stored

FULL = ResidencySettings(pool_high_share=1.0, pool_low_share=1.0)


def _full(chains: Sequence[int]) -> World:
    """Return a node whose drive holds these chains, four chunks of 4 KiB each, and has no room for another chunk."""
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=len(chains), settings=FULL)
    for first in chains:
        stored(world, [chunk_of(first + at) for at in range(4)])
    assert world.pool is not None and world.pool.used_bytes == world.pool.capacity_bytes
    return world


def _questions(world: World, monkeypatch: pytest.MonkeyPatch) -> list[ev.AskToEvict]:
    """Return a list that gets the questions to the index from now on."""
    questions, begin = list[ev.AskToEvict](), world._begin

    def observe(instruction: ev.Instruction) -> None:
        if isinstance(instruction, ev.AskToEvict):
            questions.append(instruction)
        begin(instruction)

    monkeypatch.setattr(world, "_begin", observe)
    return questions


def test_where_headers_run_out_before_bytes_one_question_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes asked for chunks one by one, and each freed place began a search for all: 20 s for 700 chunks."""
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=20)
    for first in range(0, 64, 8):  # eight slabs of four; there are eight pages of headers
        stored(world, [chunk_of(first + at) for at in range(4)])
    assert world.pool is not None and world.pool.used_bytes < world.pool.capacity_bytes / 2
    questions, searches, take = _questions(world, monkeypatch), list[int](), world.pool.take

    def counted(shape: Shape, count: int) -> list[DiskPlace]:
        searches.append(count)
        return take(shape, count)

    monkeypatch.setattr(world.pool, "take", counted)
    stored(world, [chunk_of(64 + at) for at in range(4)])
    assert len(questions) == 1 and world.residency.evictions["disk"] == 4
    assert len(searches) == 2, "when the write began, and when the fourth place was free"


def test_while_places_are_coming_nothing_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index refuses all else, and the refusal ended the write whose place was coming."""
    world = _full([0, 8])
    world.leased = {chunk_of(first + at).key for first in (0, 8) for at in range(4)}
    questions = _questions(world, monkeypatch)
    world.drop(chunk_of(3).key)
    small = world.store([chunk_of(16)], Durability.LOCAL)
    large = world.store([chunk_of(24 + at) for at in range(4)], Durability.LOCAL)
    assert not questions and len(world.residency.writes.unplaced) == 2
    world.settle()
    assert world.acknowledge(*small) == {chunk_of(16).key}
    assert isinstance(world.answers[large[1]], PoolFull)
    world.acknowledge(*large)


def test_a_question_counts_the_places_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes wait: the bytes of both were taken for chunks of the first."""
    world = _full([0, 8])
    questions = _questions(world, monkeypatch)
    world.drop(chunk_of(3).key)
    first = world.store([chunk_of(16), chunk_of(17)], Durability.LOCAL)
    second = world.store([chunk_of(4)], Durability.LOCAL)
    assert not questions and len({write.shape for write in world.residency.writes.unplaced}) == 2
    world.settle()
    assert len(questions[0].records) == 1, "one place came free, and one is lacking"
    assert len(world.acknowledge(*first)) == 2 and len(world.acknowledge(*second)) == 1


@pytest.mark.parametrize("answers", [True, False])
def test_a_stop_does_not_wait_long_for_the_index(answers: bool) -> None:
    """The index may have stopped first: a node that wrote its memory to full drives waited until it was killed."""
    world = _full([0, 8])
    for first in (16, 24):
        transfer, store = world.store([chunk_of(first)], Durability.MEMORY)
        world.end(world.operation("register"))
        world.acknowledge(transfer, store)
    assert world.residency.eviction.asking and world.residency.writes.unplaced
    world.post(ev.Stopping(ticket := world.ticket()))
    world.now_s += 1.0
    world.post(ev.TimePassed())
    assert ticket not in world.answers
    if answers:
        while ticket not in world.answers:
            world.end(world.running[0])
    else:
        world.now_s += 1.0
        world.post(ev.TimePassed())
    assert ticket in world.answers and len(world.residency.copies.dirty) == (1 if answers else 2)
    world.settle()


def test_of_many_that_the_index_keeps_more_and_more_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes a second: one by one, the first would be asked for again before the last."""
    chains = list(range(0, 256, 8))
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=8, settings=FULL)
    for first in chains:
        stored(world, [chunk_of(first)])
    world.pass_time()
    world.leased = {chunk_of(first).key for first in chains[:-2]}
    questions = _questions(world, monkeypatch)
    transfer, store = world.store([chunk_of(256)], Durability.LOCAL)
    while world.running:
        world.now_s += 1.0
        world.end(world.running[0])
    assert world.acknowledge(transfer, store) == {chunk_of(256).key}
    assert [len(question.records) for question in questions] == [1, 2, 4, 8, 16]


def test_an_index_that_does_not_answer_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage is no reason to ask for more, or to spare copies."""
    world = _full([0, 8, 16, 24])
    world.pass_time()
    questions = _questions(world, monkeypatch)
    transfer, store = world.store([chunk_of(32)], Durability.LOCAL)
    for _ in range(3):
        operation = world.operation("ask")
        world.running.remove(operation)
        world.post(ev.Answered(questions[-1].question, frozenset(), refused=False))
    world.settle()
    assert len(world.acknowledge(transfer, store)) == 1
    numbers = [[int.from_bytes(record.key, "big") for record in question.records] for question in questions]
    assert numbers == [[3]] * 4 and not world.residency.copies.spared._refused


def test_copies_that_have_left_are_not_spared() -> None:
    world = _full([0, 8])
    world.drop(chunk_of(3).key)
    world.settle()
    assert list(world.residency.copies.spared._ends) == [chunk_of(11).key]


def test_no_more_of_a_slab_are_chosen_than_fit_a_question() -> None:
    """Sixteen chunks of a slab of another shape are leaves."""
    order = LeafArc(1 << 20)
    keys = [bytes([number]) * 32 for number in range(16)]
    order.enter([(key, b"", 1) for key in keys])
    assert SlabVictims(order, None)._leaves(keys, lambda _: False, 5) == keys[:5]


def test_where_there_are_no_drives_the_ends_of_ranges_are_spared_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No reservation waits for memory where the object tier has all chunks: nothing looked at the times."""
    world = World(drives=0, objects=True, arena_slabs=4)
    for number in range(0, 200, 4):
        stored(world, [chunk_of(number)], Durability.OBJECT)
        world.pass_time()
    assert len(world.residency.copies.spared._ends) <= 1


def test_ends_are_what_no_chunk_of_the_store_extends() -> None:
    def spared(numbers: Sequence[int]) -> list[int]:
        ends, entries = Spared(), [SimpleNamespace(chunk=chunk_of(at), key=chunk_of(at).key) for at in numbers]
        ends.registered(entries, 0.0)  # type: ignore[arg-type]
        return [at for at in numbers if chunk_of(at).key in ends]

    assert spared([0, 1, 2, 3]) == [3] and spared([0]) == [0]
    assert spared([0, 4, 1, 5, 2, 6]) == [2, 6], "also of chains side by side"
    assert spared([0, 4, 8]) == [], "chunks that stand for themselves"


def _used(world: World, numbers: Sequence[int]) -> None:
    for number in numbers:
        ticket = world.pin([number])
        world.held.pop(ticket)
        world.post(ev.Unpinned(ticket))


@pytest.mark.parametrize("spared", [True, False])
def test_the_end_of_a_range_stays_while_its_next_one_is_registered(
    spared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next range is on another node. All other chunks were used twice, so that ARC takes the newest first."""
    if not spared:
        monkeypatch.setattr(Spared, "registered", lambda *_: None)
    world = _full([0, 8, 16])
    world.pass_time()
    _used(world, [at + first for first in (0, 8, 16) for at in range(4)])
    stored(world, [chunk_of(24), chunk_of(25)])
    stored(world, [chunk_of(32), chunk_of(33)])
    assert (chunk_of(25).key in world.residency) is spared
    world.pass_time()
    stored(world, [chunk_of(40), chunk_of(41)])
    assert chunk_of(25).key not in world.residency, "nothing has extended it"


def test_the_ends_of_ranges_go_where_nothing_else_may() -> None:
    world = _full([0, 8])
    stored(world, [chunk_of(16)])
    assert world.residency.evictions == {"disk": 1} and chunk_of(3).key not in world.residency


def test_what_the_index_keeps_is_asked_for_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy keeps its place in the order. Before that, copies that were used later are asked for."""
    world = _full([0, 8, 16])
    world.pass_time()
    world.leased = {chunk_of(3).key}
    questions = _questions(world, monkeypatch)
    for number in (24, 32, 40):
        stored(world, [chunk_of(number)])
    world.leased.clear()
    stored(world, [chunk_of(48)])
    world.pass_time()
    stored(world, [chunk_of(56)])
    numbers = [int.from_bytes(record.key, "big") for question in questions for record in question.records]
    assert numbers == [3, 11, 10, 9, 8, 3]


def test_where_all_is_kept_it_is_asked_for_until_the_write_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _full([0, 8])
    world.leased = {chunk_of(first + at).key for first in (0, 8) for at in range(4)}
    questions = _questions(world, monkeypatch)
    transfer, store = world.store([chunk_of(16)], Durability.LOCAL)
    world.settle()
    assert isinstance(world.answers[store], PoolFull) and len(questions) > 2
    world.acknowledge(transfer, store)
