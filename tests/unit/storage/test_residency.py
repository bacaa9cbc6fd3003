"""The residency machine: invariants after every event, readers' bytes while they read, acknowledgements that hold."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.model.durability import Durability, OnExisting
from quire.model.errors import ContentConflict, KeysInvalid, PoolFull
from quire_storage.core.chunks import Copy
from quire_storage.core.residency import ResidencySettings
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.invariants import under_way
from quire_storage.errors import DriveFailed
from tests.unit.storage.residency_world import World, chunk_of, content_of, stored

_NUMBERS = st.integers(0, 23)


class ResidencyMachine(RuleBasedStateMachine):
    """Stores, reads, drops and losses, and the ends of what they started, in any order. `World.post` checks."""

    @initialize(drives=st.integers(0, 2), objects=st.booleans(), arena=st.integers(1, 3), pool=st.integers(1, 3))
    def begin(self, drives: int, objects: bool, arena: int, pool: int) -> None:
        self.world = World(drives=drives, objects=objects, arena_slabs=arena, drive_slabs=pool)
        self.stores: dict[int, int] = {}
        self.readers: list[int] = []

    @rule(
        first=_NUMBERS,
        count=st.integers(1, 4),
        repeated=st.booleans(),
        version=st.sampled_from([0, 0, 0, 1]),
        level=st.sampled_from(list(Durability)),
        on_existing=st.sampled_from(list(OnExisting)),
    )
    def store(
        self, first: int, count: int, repeated: bool, version: int, level: Durability, on_existing: OnExisting
    ) -> None:
        stop = min(first + count, first - first % 4 + 4)
        chunks = [chunk_of(number, version) for number in range(first, stop)]
        chunks += chunks[:1] if repeated and count == 4 else []
        transfer, store = self.world.store(chunks, level, on_existing)
        if store:
            self.stores[transfer] = store
            if len({chunk.key for chunk in chunks}) < len(chunks):
                answer = self.world.answers.get(store)
                assert answer is None or isinstance(answer, KeysInvalid), "it may wait for what is being registered"

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        """Its client is told, or has gone before."""
        transfer = data.draw(st.sampled_from(sorted(self.stores)))
        self.world.acknowledge(transfer, self.stores.pop(transfer))

    @rule(numbers=st.lists(_NUMBERS, min_size=1, max_size=4, unique=True), load=st.booleans())
    def pin(self, numbers: list[int], load: bool) -> None:
        readable = {number for number in numbers if chunk_of(number).key in self.world.acknowledged}
        ticket = self.world.pin(numbers)
        if load:
            self.world.load(numbers)
        self.readers.append(ticket)
        answer: Any = self.world.answers.get(ticket)
        if answer is not None:
            found = {int.from_bytes(copy.chunk.key, "big") for copy in answer[0]}
            assert readable <= found, "what was acknowledged can be read"

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        ticket = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.world.held.pop(ticket, None)
        self.world.post(ev.Unpinned(ticket))

    @precondition(lambda self: self.world.held)
    @rule(data=st.data(), complete=st.booleans())
    def promote(self, data: st.DataObject, complete: bool) -> None:
        """A reader's copies move into memory while it reads them, or nearly."""
        copies = data.draw(st.sampled_from(sorted(self.world.held.items())))[1]
        on_disk = [copy for copy in copies if copy.memory is None and copy.disk is not None]
        if self.world.pool is not None:
            failed = self.world.pool.failed_drives()
            on_disk = [copy for copy in on_disk if copy.disk is not None and copy.disk.drive not in failed]
        if not on_disk:
            return
        ticket = self.world.ticket()
        self.world.post(ev.PromotionWanted(ticket, [copy.number for copy in on_disk]))
        answer: Any = self.world.answers[ticket]
        names = {copy.number: copy for copy in on_disk}
        for number, (_, place) in answer.items():
            self.world.memory[place.offset] = content_of(names[number].chunk)
        for promotion in {promotion for promotion, _ in answer.values()}:
            self.world.post(ev.PromotionEnded(ticket, promotion, complete))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), fail=st.booleans())
    def end_operation(self, data: st.DataObject, fail: bool) -> None:
        at = data.draw(st.integers(0, len(self.world.running) - 1))
        operation = self.world.running[at]
        self.world.end(operation, fail=fail and operation.name != "write")

    @precondition(lambda self: any(operation.name == "write" for operation in self.world.running))
    @rule()
    def fail_drive(self) -> None:
        operation = next(each for each in self.world.running if each.name == "write")
        self.world.acknowledged.clear()  # what lay on the drive alone is lost, and said so
        self.world.end(operation, fail=True)

    @rule(number=_NUMBERS, right=st.booleans())
    def drop(self, number: int, right: bool) -> None:
        """An index entry has ended: this one, or one of long ago."""
        key = chunk_of(number).key
        generation = self.world.index.get(key, 0) if right else 1 << 60
        if not generation:
            return
        if right:
            self.world.ended(key)
        self.world.post(ev.Dropped(self.world.ticket(), {key: generation}))

    @rule(number=_NUMBERS)
    def lease(self, number: int) -> None:
        self.world.leased ^= {chunk_of(number).key}

    @precondition(lambda self: self.world.held)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A reader found a copy corrupt beyond repair."""
        copies: list[Copy] = data.draw(st.sampled_from(sorted(self.world.held.items())))[1]
        for copy in copies[:1]:
            self.world.acknowledged.pop(copy.chunk.key, None)
            self.world.post(ev.Lost([copy.number]))

    @rule(number=_NUMBERS)
    def deny(self, number: int) -> None:
        self.world.post(ev.Denied([chunk_of(number).record]))

    @rule(number=_NUMBERS)
    def evict_by_policy(self, number: int) -> None:
        self.world.post(ev.EvictionWanted(self.world.ticket(), [chunk_of(number).key]))

    @rule()
    def time_passes(self) -> None:
        self.world.now_s += 1.0
        self.world.post(ev.TimePassed())

    def teardown(self) -> None:
        """When everything has ended, nothing is held, owed or counted twice."""
        if not hasattr(self, "world"):
            return
        self.world.leased.clear()  # what is leased for ever is asked for, and written, again and again
        for transfer, store in self.stores.items():
            self.world.acknowledge(transfer, store)
        for ticket in self.readers:
            self.world.held.pop(ticket, None)
            self.world.post(ev.Unpinned(ticket))
        self.world.settle()
        residency = self.world.residency
        assert not under_way(residency), f"left behind: {under_way(residency)}"
        for key, chunk in self.world.acknowledged.items():
            found = residency.look(key)
            assert found is not None and found[0].chunk.same_content(chunk), "acknowledged, and gone"


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(
    max_examples=int(os.environ.get("QUIRE_SOAK_EXAMPLES", "150")),
    stateful_step_count=40,
    derandomize="QUIRE_SOAK_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)


def _stored(world: World, first: int, count: int, level: Durability = Durability.LOCAL) -> None:
    stored(world, [chunk_of(number) for number in range(first, first + count)], level)


def test_a_repeated_key_keeps_nothing_and_frees_what_it_had() -> None:
    """Finding 1, in the machine itself: entering chunks is all or nothing."""
    world = World(drives=1, objects=False)
    transfer, store = world.store([chunk_of(0), chunk_of(0)], Durability.LOCAL)
    assert isinstance(world.answers[store], KeysInvalid)
    world.acknowledge(transfer, store)
    assert len(world.residency) == 0 and world.residency.ledger.slots.used_bytes == 0


def test_a_late_drop_leaves_what_was_stored_again() -> None:
    """Finding 2: the drop names the index entry that ended, and the chunk is listed under another one since."""
    world = World(drives=1, objects=False)
    _stored(world, 0, 1)
    old = world.index.pop(chunk_of(0).key)
    world.post(ev.Dropped(world.ticket(), {chunk_of(0).key: old}))
    world.settle()
    _stored(world, 0, 1)
    world.post(ev.Dropped(world.ticket(), {chunk_of(0).key: old}))
    world.settle()
    assert chunk_of(0).key in world.residency


def test_a_drop_that_overtakes_the_index_answer_is_not_forgotten() -> None:
    """The entry ended before this node heard that it had begun: the store is not acknowledged."""
    world = World(drives=0, objects=False)
    transfer, store = world.store([chunk_of(0)], Durability.MEMORY)
    world.post(ev.Dropped(world.ticket(), {chunk_of(0).key: 7}))
    world.running.clear()
    world.post(ev.Indexed(store, {chunk_of(0).key: 7}))
    world.post(ev.IndexingEnded(store))
    assert world.acknowledge(transfer, store) == set()
    assert chunk_of(0).key not in world.residency


def test_two_stores_of_one_chunk_are_both_acknowledged_or_neither() -> None:
    """Finding 6: the first one's refusal fell between the second one's registration and its reply."""
    world = World(drives=0, objects=False)
    first = world.store([chunk_of(0)], Durability.MEMORY)
    second = world.store([chunk_of(0)], Durability.MEMORY)
    (early,) = [each for each in world.running if each.name == "register"]
    world.end(early, fail=True)
    assert world.acknowledge(*first) == set()
    world.settle()
    assert world.acknowledge(*second) == {chunk_of(0).key}
    assert chunk_of(0).key in world.residency


def test_answers_of_two_registrations_cannot_overtake_each_other() -> None:
    """A node that is told of the older entry last would take the new one for ended, and drop what it acknowledged."""
    world = World(drives=0, objects=False)
    _stored(world, 0, 1)
    again = world.ticket()
    world.post(ev.RegistrationWanted(again, [chunk_of(0).key]))
    transfer, store = world.store([chunk_of(0)], Durability.MEMORY)
    assert len([each for each in world.running if each.name == "register"]) == 1
    world.settle()
    assert world.acknowledge(transfer, store) == {chunk_of(0).key}


def test_skip_keeps_what_is_there_and_verify_refuses_it() -> None:
    """Finding 17: engines whose bits differ race on one prompt; the store's other chunks are not the worse for it."""
    world = World(drives=1, objects=False)
    _stored(world, 0, 1)
    other = [chunk_of(0, version=1), chunk_of(1)]
    transfer, store = world.store(other, Durability.LOCAL, OnExisting.SKIP)
    world.settle()
    assert world.acknowledge(transfer, store) == {chunk_of(0).key, chunk_of(1).key}
    found = world.residency.look(chunk_of(0).key)
    assert found is not None and found[0].chunk.same_content(chunk_of(0))
    transfer, store = world.store(other, Durability.LOCAL, OnExisting.VERIFY)
    assert isinstance(world.answers[store], ContentConflict)
    world.acknowledge(transfer, store)


def test_what_the_object_tier_is_not_listed_for_stays_on_the_drive() -> None:
    """Finding 2: a note that the object exists is not enough to let the last copy go; and it is written again."""
    world = World(drives=1, objects=True, arena_slabs=8, drive_slabs=1)
    _stored(world, 0, 3)
    world.listed_objects.clear()
    world.leased |= {chunk_of(number).key for number in range(3)}
    transfer, store = world.store([chunk_of(8), chunk_of(9)], Durability.LOCAL)
    for name in ("write", "withdraw", "headers", "upload"):
        world.running.sort(key=lambda each: each.name != name)
        while world.running and world.running[0].name == name:
            world.end(world.running[0])
    assert all(chunk_of(number).key in world.residency for number in range(3))
    assert chunk_of(2).key in world.listed_objects, "the one that was asked for"
    world.settle()
    world.acknowledge(transfer, store)


def test_a_new_shape_empties_one_slab_and_no_more() -> None:
    """Finding 11: one small chunk evicted much of what was in memory, a slot here and a slot there."""
    world = World(drives=1, objects=False, arena_slabs=4, drive_slabs=20)
    for first in (0, 8, 16):
        _stored(world, first, 4)
    _stored(world, 24, 4)
    before = world.residency.evictions["memory"]
    transfer, store = world.store([chunk_of(4)], Durability.MEMORY)
    world.settle()
    assert len(world.acknowledge(transfer, store)) == 1
    assert world.residency.evictions["memory"] - before <= 4


def test_a_new_shape_empties_one_slab_of_a_drive_and_no_more() -> None:
    """Finding 11, on drives: the chunks that went lay in slabs of another shape, a few in each."""
    full = ResidencySettings(pool_high_share=1.0, pool_low_share=1.0)
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=8, settings=full)
    for at in range(4):  # four to a slab, of four chains
        for first in range(0, 64, 8):
            transfer, store = world.store([chunk_of(first + at)], Durability.LOCAL)
            world.settle()
            assert world.acknowledge(transfer, store)
    assert world.pool is not None and world.pool.used_bytes == world.pool.capacity_bytes
    for tail in (3, 35, 11, 43, 19, 51, 27, 59):  # the coldest lie in two slabs by turns
        world.post(ev.Unpinned(world.pin([tail])))
    transfer, store = world.store([chunk_of(4)], Durability.LOCAL)
    world.settle()
    assert world.acknowledge(transfer, store) == {chunk_of(4).key}
    assert world.residency.evictions["disk"] == 4


def test_a_node_whose_drives_are_full_stops_all_the_same() -> None:
    """What is dirty finds no slot, all that is there is leased, and while the node stops no more is asked for."""
    full = ResidencySettings(pool_high_share=1.0, pool_low_share=1.0)
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=4, settings=full)
    for first in (0, 8, 16, 24):
        transfer, store = world.store([chunk_of(first + at) for at in range(4)], Durability.LOCAL)
        world.settle()
        assert len(world.acknowledge(transfer, store)) == 4
    assert world.pool is not None and world.pool.used_bytes == world.pool.capacity_bytes
    world.leased = {chunk_of(first + at).key for first in (0, 8, 16, 24) for at in range(4)}
    world.store([chunk_of(4)], Durability.MEMORY)
    stopping = world.ticket()
    world.post(ev.Stopping(stopping))
    world.settle()
    assert stopping in world.answers


def test_many_readers_of_one_prefix_on_a_drive_promote_it_once() -> None:
    world = World(drives=1, objects=False, arena_slabs=2, drive_slabs=4)
    _stored(world, 0, 4)
    for first in (8, 16):
        _stored(world, first, 4)
    held = [world.held[world.pin([0, 1])] for _ in range(3)]
    on_disk = [copy for copy in held[0] if copy.memory is None]
    assert on_disk, "it was pushed out of memory"
    answers: list[Any] = []
    for copies in held:
        ticket = world.ticket()
        world.post(ev.PromotionWanted(ticket, [copy.number for copy in copies if copy.memory is None]))
        answers.append(world.answers[ticket])
    assert answers[0] == answers[1] == answers[2]


def test_what_a_client_asks_for_comes_into_memory_that_is_full() -> None:
    """Also what was not read before, which a delivery would leave on its drive."""
    world = World(drives=1, objects=False, arena_slabs=2, drive_slabs=4)
    for first in (0, 8, 16):
        _stored(world, first, 4)
    world.forget_evicted()
    numbers = [copy.number for copy in world.held[world.pin([0, 1])] if copy.memory is None]
    assert numbers
    answers: list[Any] = []
    for asked in (False, True):
        ticket = world.ticket()
        world.post(ev.PromotionWanted(ticket, numbers, asked))
        world.residency.promotions.recent.clear()
        answer: Any = world.answers[ticket]
        answers.append(answer.keys())
    assert answers == [set(), set(numbers)]


def test_a_store_without_memory_waits_and_fails_when_it_is_told_to() -> None:
    world = World(drives=0, objects=False, arena_slabs=1)
    _stored(world, 0, 4, Durability.MEMORY)
    ticket = world.pin([0, 1, 2, 3])
    transfer = world.ticket()
    world.post(ev.Reserved(transfer, chunk_of(8).shape, 4))
    assert transfer not in world.answers
    world.leased |= {chunk_of(number).key for number in range(4)}
    world.post(ev.ReservationEnded(transfer))
    world.held.pop(ticket)
    world.post(ev.Unpinned(ticket))
    much = world.ticket()
    world.post(ev.Reserved(much, chunk_of(8).shape, 99))
    assert isinstance(world.answers[much], PoolFull)


def test_memory_that_is_full_makes_room_where_there_is_no_drive() -> None:
    """Also after a reservation had looked for copies that lie elsewhere too: that hid those that lie here alone."""
    world = World(drives=0, objects=False, arena_slabs=1)
    _stored(world, 0, 4, Durability.MEMORY)
    for first in (8, 16):
        transfer = world.ticket()
        world.post(ev.Reserved(transfer, chunk_of(first).shape, 4))
        while transfer not in world.answers:
            world.end(world.operation("ask"))
        assert isinstance(world.answers[transfer], list)
        world.post(ev.ReservationEnded(transfer))
        _stored(world, first, 4, Durability.MEMORY)


def test_a_full_pool_refuses_a_store_that_nothing_makes_space_for() -> None:
    world = World(drives=1, objects=False, arena_slabs=4, drive_slabs=1)
    world.leased |= {chunk_of(number).key for number in range(4)}
    _stored(world, 0, 4)
    transfer, store = world.store([chunk_of(8)], Durability.LOCAL)
    for _ in range(40):
        if store in world.answers:
            break
        world.now_s += 1
        world.post(ev.TimePassed())
        while world.running:
            world.end(world.running[0])
    assert isinstance(world.answers[store], PoolFull)
    world.acknowledge(transfer, store)


def test_a_store_whose_only_drive_fails_is_refused() -> None:
    world = World(drives=1, objects=False)
    transfer, store = world.store([chunk_of(0)], Durability.LOCAL)
    world.end(world.operation("write"), fail=True)
    world.settle()
    assert isinstance(world.answers[store], DriveFailed)
    world.acknowledge(transfer, store)
    assert chunk_of(0).key not in world.residency


@pytest.mark.parametrize("gone", ["drop", "lose"])
def test_slots_of_what_is_read_are_free_only_after_the_last_reader(gone: str) -> None:
    world = World(drives=1, objects=False)
    _stored(world, 0, 1)
    ticket = world.pin([0])
    copy = world.held[ticket][0]
    if gone == "drop":
        world.post(ev.Dropped(world.ticket(), {copy.chunk.key: world.index[copy.chunk.key]}))
    else:
        world.post(ev.Lost([copy.number]))
    world.settle()
    assert world.residency.ledger.slots.used_bytes > 0
    world.held.pop(ticket)
    world.post(ev.Unpinned(ticket))
    assert world.residency.ledger.slots.used_bytes == 0


def test_the_write_of_a_copy_that_leaves_does_not_clear_the_mark_of_another() -> None:
    """The second one lay in memory alone for ever, and was not written when the node stopped."""
    world = World(drives=1, objects=False)
    first = world.store([chunk_of(0)], Durability.MEMORY)
    world.end(world.operation("register"), fail=True)
    assert world.acknowledge(*first) == set()
    second = world.store([chunk_of(0)], Durability.MEMORY)
    world.end(world.operation("write"))
    world.settle()
    assert world.acknowledge(*second) == {chunk_of(0).key}
    world.settle()
    assert world.pool is not None and chunk_of(0).key in world.pool


def test_a_chunk_without_a_place_cannot_be_read() -> None:
    """It gave its memory up to the object tier while an older copy of it was still being read."""
    world = World(drives=0, objects=True, arena_slabs=1)
    _stored(world, 0, 1)
    world.pin([0])
    world.post(ev.Dropped(world.ticket(), {chunk_of(0).key: world.index.pop(chunk_of(0).key)}))
    world.load([0])
    world.end(world.operation("load"))
    assert chunk_of(0).key in world.residency
    world.post(ev.Reserved(world.ticket(), chunk_of(0).shape, 3))
    answer: Any = world.answers[world.pin([0])]
    copies, missing = answer
    assert all(copy.memory is not None for copy in copies) and len(copies) + len(missing) == 1
