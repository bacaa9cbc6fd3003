"""Levels of durability, and what is said when one cannot be had."""

from __future__ import annotations

from typing import Any

import pytest

from quire.model.durability import Durability, OnExisting
from quire.model.errors import ContentConflict, KeysInvalid, MetadataUnavailable, PoolFull, Unavailable
from quire_storage.core.chunks import Placed
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.invariants import under_way
from quire_storage.errors import DriveFailed
from tests.unit.storage.residency_world import World, chunk_of, stored, stored_in_memory

KEY = chunk_of(0).key


def test_a_level_that_is_raised_while_the_chunk_is_written_is_written_too() -> None:
    """The header had the level before: after a restart the chunk's other copy was not missed when it was lost."""
    world = World(drives=1, objects=False)
    stored_in_memory(world, [chunk_of(0)])
    transfer, store = world.store([chunk_of(0)], Durability.REPLICATED)
    world.end(world.operation("write"))
    assert store not in world.answers and not [each for each in world.running if each.name == "register"]
    world.settle()
    assert world.acknowledge(transfer, store) == {chunk_of(0).key}
    found = world.pool.get(chunk_of(0).key) if world.pool is not None else None
    assert found is not None and found.header.level is Durability.REPLICATED


def test_what_is_uploaded_while_it_is_written_is_said_in_its_header() -> None:
    """Else its object was not known of after a restart, and never deleted."""
    world = World(drives=1, objects=True)
    stored_in_memory(world, [chunk_of(0)])
    world.end(world.operation("upload"))
    world.end(world.operation("write"))
    world.settle()
    found = world.pool.get(KEY) if world.pool is not None else None
    assert found is not None and found.header.in_object


def test_an_object_counts_for_the_index_entry_that_it_was_written_for_alone() -> None:
    """An object that was written for an entry which has ended will be deleted."""
    world = World(drives=1, objects=True)
    stored_in_memory(world, [chunk_of(0)])
    listed = world.residency.look(KEY)
    assert listed is not None and not listed[0].in_object
    world.post(ev.Uploaded(chunk_of(0), listed[1] - 1))
    assert not world.residency.in_object(KEY)
    world.post(ev.Uploaded(chunk_of(0), listed[1]))
    assert world.residency.in_object(KEY)


def test_a_level_that_is_there_is_not_written_again() -> None:
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(0)])
    for level in (Durability.MEMORY, Durability.LOCAL):
        ticket = world.ticket()
        world.post(ev.LevelRaised(ticket, [KEY], level))
        assert world.answers[ticket] == [KEY] and not world.running


def test_what_lay_on_a_drive_that_fails_as_its_level_is_raised_is_written_to_another() -> None:
    world = World(drives=2, objects=False)
    stored(world, [chunk_of(0)])
    ticket = world.ticket()
    world.post(ev.LevelRaised(ticket, [KEY], Durability.REPLICATED))
    assert ticket not in world.answers
    world.end(world.operation("headers"), fail=True)
    assert ticket not in world.answers
    world.end(world.operation("write"))
    found = world.pool.get(KEY) if world.pool is not None else None
    assert world.answers[ticket] == [KEY]
    assert found is not None and found.header.level is Durability.REPLICATED


def test_a_header_that_cannot_be_written_anywhere_fails_who_waits_for_it() -> None:
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(0)])
    ticket = world.ticket()
    world.post(ev.LevelRaised(ticket, [KEY], Durability.REPLICATED))
    world.end(world.operation("headers"), fail=True)
    assert isinstance(world.answers[ticket], DriveFailed)


@pytest.mark.parametrize("begun", ["raised", "written"])
def test_a_level_is_not_promised_before_the_header_says_it(begun: str) -> None:
    """Another request has raised it already, and that header is under way."""
    world = World(drives=1, objects=False)
    if begun == "raised":
        stored(world, [chunk_of(0)])
        world.post(ev.LevelRaised(world.ticket(), [KEY], Durability.REPLICATED))
    else:
        stored_in_memory(world, [chunk_of(0)])
        world.post(ev.LevelRaised(world.ticket(), [KEY], Durability.REPLICATED))
        world.end(world.operation("write"))
    ticket = world.ticket()
    world.post(ev.LevelRaised(ticket, [KEY], Durability.REPLICATED))
    assert ticket not in world.answers and world.operation("headers")
    world.settle()
    found = world.pool.get(KEY) if world.pool is not None else None
    assert world.answers[ticket] == [KEY] and found is not None and found.header.level is Durability.REPLICATED


def test_a_store_does_not_fail_for_a_header_that_it_does_not_wait_for() -> None:
    """Another request has raised the level of a chunk that both have, and the drive fails as the header is written."""
    world = World(drives=2, objects=False)
    stored_in_memory(world, [chunk_of(0)])
    transfer, store = world.store([chunk_of(0), chunk_of(1)], Durability.LOCAL)
    raised = world.ticket()
    world.post(ev.LevelRaised(raised, [KEY], Durability.REPLICATED))
    while any(each.name == "write" for each in world.running):
        world.end(world.operation("write"))
    world.end(world.operation("headers"), fail=True)
    world.settle()
    assert world.acknowledge(transfer, store) == {KEY, chunk_of(1).key}
    assert world.answers[raised] == [KEY]


def test_a_store_does_not_wait_for_the_header_of_a_level_above_its_own() -> None:
    """It is on the drive; that it is to have another copy, too, was asked by another request."""
    world = World(drives=1, objects=False)
    stored_in_memory(world, [chunk_of(0)])
    transfer, store = world.store([chunk_of(0)], Durability.LOCAL)
    raised = world.ticket()
    world.post(ev.LevelRaised(raised, [KEY], Durability.REPLICATED))
    world.end(world.operation("write"))
    assert world.operation("headers") and raised not in world.answers
    world.end(world.operation("register"))
    assert world.acknowledge(transfer, store) == {KEY}


def test_a_header_that_is_not_written_for_another_reason_fails_who_waits_for_it() -> None:
    """The drive has not failed: nothing writes the chunk to another one."""
    world = World(drives=2, objects=False)
    stored(world, [chunk_of(0)])
    ticket, error = world.ticket(), Unavailable("the ring is closing")
    world.post(ev.LevelRaised(ticket, [KEY], Durability.REPLICATED))
    (number,) = world.residency.writes.rewrites
    world.running.clear()
    world.post(ev.WriteFailed(number, error))
    assert world.answers[ticket] is error and not world.running


@pytest.mark.parametrize("uploaded", [False, True])
def test_what_slept_on_a_drive_that_fails_is_not_uploaded_any_more(uploaded: bool) -> None:
    """Its bytes are gone. What the object tier has got stays there."""
    world = World(drives=1, objects=True, arena_slabs=1, drive_slabs=4)
    transfer, store = world.store([chunk_of(0)], Durability.LOCAL)
    while store not in world.answers:
        world.end(next(each for each in world.running if each.name != "upload"))
    world.acknowledge(transfer, store)
    if uploaded:
        world.end(world.operation("upload"))
    others = world.store([chunk_of(number) for number in range(8, 12)], Durability.LOCAL)
    while others[1] not in world.answers:
        world.end(next(each for each in world.running if each.name != "upload"))
    world.acknowledge(*others)
    assert KEY not in world.residency.copies.entries and (KEY in world.uploads) is not uploaded, "it sleeps"
    told = world.residency.handle(ev.DriveLost(0), world.now_s)
    assert (ev.CancelUpload(KEY) in told) is not uploaded


def test_a_drive_that_fails_between_its_map_and_its_pages_takes_nothing_from_what_memory_has() -> None:
    """What is to have another copy still is, and belongs to its namespace."""
    world = World(drives=2, objects=False)
    stored_in_memory(world, [chunk_of(0)])
    raised = world.ticket()
    world.post(ev.LevelRaised(raised, [KEY], Durability.REPLICATED))
    ((number, write),) = world.residency.writes.running.items()
    assert world.pool is not None
    world.pool.commit([Placed(header, place) for header, place in zip(write.headers, write.places, strict=True)])
    drive = write.places[0].drive
    world.post(ev.DriveLost(drive))
    assert KEY in world.residency.replicated
    world.running.clear()
    world.post(ev.WriteFailed(number, DriveFailed("it has failed", frozenset({drive}))))
    world.settle()
    assert world.answers[raised] == [KEY] and KEY in world.residency.replicated


@pytest.mark.parametrize("reads", [False, True], ids=["asleep", "being read"])
def test_what_may_come_back_with_its_drive_is_hidden(reads: bool) -> None:
    """The node withdrew such a copy like a lost one: an evicted chunk came back with the drive."""
    world = World(drives=1, objects=False, arena_slabs=1, drive_slabs=4)
    transfer, store = world.store([chunk_of(0)], Durability.LOCAL)
    world.settle()
    world.acknowledge(transfer, store)
    later = world.store([chunk_of(number) for number in range(8, 12)], Durability.LOCAL)
    world.settle()
    world.acknowledge(*later)
    if reads:
        world.pin([0])
    assert (KEY in world.residency.copies.entries) is reads
    instructions = world.residency.handle(ev.DriveLost(0), world.now_s)
    withdrawn = {
        record.key: instruction.hidden
        for instruction in instructions
        if isinstance(instruction, ev.Withdraw)
        for record in instruction.records
    }
    assert withdrawn[KEY] is True


def test_without_a_drive_a_store_is_refused_with_those_that_failed() -> None:
    world = World(drives=1, objects=False)
    world.post(ev.DriveLost(0))
    transfer, store = world.store([chunk_of(0)], Durability.LOCAL)
    error: Any = world.answers[store]
    assert isinstance(error, DriveFailed) and error.drives == {0} and error.message == "no drive is left"
    world.acknowledge(transfer, store)
    assert not under_way(world.residency)


def test_a_drive_that_fails_every_write_is_given_up_after_so_many() -> None:
    """Though it has not been taken out of use: who waits hears why."""
    world = World(drives=1, objects=False)
    transfer, store = world.store([chunk_of(0)], Durability.LOCAL)
    error, tries = DriveFailed("it fails", frozenset({0})), 0
    while store not in world.answers:
        (write,) = world.residency.writes.running
        world.running.clear()
        world.post(ev.WriteFailed(write, error))
        tries += 1
    assert world.answers[store] is error and tries == 64
    world.acknowledge(transfer, store)


def test_what_is_wrong_with_a_store_names_its_field() -> None:
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(0)])
    refused: list[Any] = []
    for chunks in ([chunk_of(0), chunk_of(0)], [chunk_of(0, version=1)]):
        transfer, store = world.store(chunks, Durability.LOCAL, OnExisting.VERIFY)
        refused.append(world.answers[store])
        world.acknowledge(transfer, store)
    twice, other = refused
    assert isinstance(twice, KeysInvalid) and twice.message == "a key appears twice" and twice.field == "chunk_keys"
    assert isinstance(other, ContentConflict) and KEY.hex() in other.message and other.field == "chunk_keys"
    assert not under_way(world.residency), "neither holds anything"


def test_the_same_bytes_are_no_conflict() -> None:
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(0)])
    transfer, store = world.store([chunk_of(0), chunk_of(1)], Durability.LOCAL, OnExisting.VERIFY)
    world.settle()
    assert world.acknowledge(transfer, store) == {KEY, chunk_of(1).key}


def test_a_registration_that_fails_says_why() -> None:
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(0)])
    ticket, error = world.ticket(), MetadataUnavailable("it does not answer")
    world.post(ev.RegistrationWanted(ticket, [KEY], False))
    world.running.clear()
    world.post(ev.IndexingEnded(ticket, error))
    assert world.answers[ticket] is error and world.residency.generation(KEY) == 0
    world.post(ev.Unpinned(ticket))
    assert not under_way(world.residency)


@pytest.mark.parametrize("busy", [False, True])
def test_what_a_store_whose_client_has_gone_found_on_a_drive_is_registered(busy: bool) -> None:
    """It sleeps there, as nothing holds it; unless it is being registered by another."""
    world = World(drives=1, objects=False, arena_slabs=1, drive_slabs=4)
    stored(world, [chunk_of(0)])
    stored(world, [chunk_of(number) for number in range(8, 12)])
    transfer, store = world.store([chunk_of(0), chunk_of(1)], Durability.LOCAL)
    world.post(ev.Unpinned(store))
    assert KEY not in world.residency.copies.entries, "it sleeps"
    if busy:
        other = world.ticket()
        world.post(ev.RegistrationWanted(other, [KEY]))
    world.end(world.operation("write"))
    registered = {record.key for record in world.registrations[store]}
    assert registered == ({chunk_of(1).key} if busy else {KEY, chunk_of(1).key})
    world.post(ev.ReservationEnded(transfer))
    if busy:
        world.post(ev.Unpinned(other))
    world.settle()
    assert not under_way(world.residency)


@pytest.mark.parametrize("answered", [False, True])
def test_a_late_answer_for_a_copy_that_went_counts_for_the_next_one_until_that_has_its_own(answered: bool) -> None:
    """The first copy was dropped while the index was asked; the index is asked for the second one, too."""
    world = World(drives=0, objects=False)
    first = world.store([chunk_of(0)], Durability.MEMORY)
    world.drop(KEY)
    second = world.store([chunk_of(0)], Durability.MEMORY)
    world.running.clear()
    if answered:
        world.post(ev.Indexed(second[1], {KEY: 2 << 16}))
    world.post(ev.Indexed(first[1], {KEY: 1 << 16}))
    for transfer, store in (first, second):
        world.post(ev.IndexingEnded(store))
        world.post(ev.Unpinned(store))
        world.post(ev.ReservationEnded(transfer))
    assert world.residency.generation(KEY) == (2 if answered else 1) << 16
    assert not under_way(world.residency)


def test_an_answer_that_is_being_taken_back_counts_for_none() -> None:
    """The copy was lost, and the index is told; meanwhile the object tier brings another one."""
    world = World(drives=0, objects=True)
    world.objects[KEY] = chunk_of(0)
    transfer, store = world.store([chunk_of(0)], Durability.MEMORY)
    world.post(ev.Lost([world.residency.copies.entries[KEY].number]))
    world.load([0])
    world.end(world.operation("load"))
    assert KEY in world.residency
    world.running = [each for each in world.running if each.name != "register"]
    world.post(ev.Indexed(store, {KEY: 1 << 16}))
    assert world.residency.generation(KEY) == 0
    world.post(ev.IndexingEnded(store))
    world.post(ev.Unpinned(store))
    world.post(ev.ReservationEnded(transfer))
    world.settle()
    assert world.residency.generation(KEY) == 0


def test_what_a_lost_drive_had_is_to_have_no_other_copy() -> None:
    world = World(drives=1, objects=False, arena_slabs=1, drive_slabs=4)
    stored(world, [chunk_of(0)], Durability.REPLICATED)
    stored(world, [chunk_of(number) for number in range(8, 12)])
    assert KEY not in world.residency.copies.entries and KEY in world.residency.replicated, "it sleeps"
    world.post(ev.DriveLost(0))
    world.settle()
    assert not world.residency.replicated


def test_a_drop_that_waits_for_a_write_is_answered_though_the_drive_has_failed() -> None:
    world = World(drives=2, objects=False)
    stored_in_memory(world, [chunk_of(0)])
    ((number, write),) = world.residency.writes.running.items()
    dropped = world.drop(KEY)
    assert dropped not in world.answers
    world.post(ev.DriveLost(write.places[0].drive))
    world.running.clear()
    world.post(ev.Written(number))
    assert world.answers[dropped] == 1 and not under_way(world.residency)


def test_more_than_memory_has_is_refused_with_what_it_has() -> None:
    world = World(drives=0, objects=False)
    stored(world, [chunk_of(0)], Durability.MEMORY)
    ticket = world.ticket()
    world.post(ev.Reserved(ticket, chunk_of(0).shape, 99))
    error: Any = world.answers[ticket]
    assert isinstance(error, PoolFull) and error.message == "no memory for 99 chunks of 4096 bytes (4096 in use)"


def test_a_transfer_that_the_arena_never_has_slots_for_is_refused_at_once() -> None:
    """Slots do not cross slabs: bytes were compared, and it waited for its whole time (seed 1819)."""
    world, shape = World(drives=0, objects=False, arena_slabs=4), chunk_of(0).shape
    slots, large = world.residency.copies.ledger.slots, Shape(3, 4096)
    assert slots.capacity(large) == 4 and 5 * large.slot_bytes < slots.capacity_bytes
    for refused_shape, count in ((large, 5), (shape, slots.capacity(shape) + 1)):
        ticket = world.ticket()
        world.post(ev.Reserved(ticket, refused_shape, count))
        assert isinstance(world.answers[ticket], PoolFull) and not world.residency.memory.waiting
    ticket = world.ticket()
    world.post(ev.Reserved(ticket, large, 4))
    offsets: Any = world.answers[ticket]
    assert len(offsets) == 4
