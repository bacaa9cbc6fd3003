"""What the index lists is here, whatever goes while it is asked."""

from __future__ import annotations

import pytest

from quire.model.durability import Durability
from quire.model.errors import MetadataUnavailable
from quire_storage.core.residency import Residency, ResidencySettings
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.invariants import under_way
from quire_storage.errors import DriveFailed
from tests.unit.storage.residency_world import World, chunk_of, stored

KEY = chunk_of(0).key


def _lose(world: World) -> None:
    world.post(ev.Lost([world.residency.copies.entries[KEY].number]))
    world.end(world.operation("withdraw"))


def _drop(world: World, number: int) -> None:
    key = chunk_of(number).key
    generation = world.ended(key)
    assert generation is not None
    world.post(ev.Dropped(world.ticket(), {key: generation}))
    world.end(world.operation("forget"))


def _settled(world: World) -> Residency:
    world.settle()
    machine = world.residency
    assert world.listed_here == set(filter(machine.generation, machine.keys()))
    assert not under_way(machine)
    return machine


def test_what_went_while_its_store_waited_is_not_registered() -> None:
    """Its client had gone, so that it slept on a drive; it was listed for good, and the digest was off."""
    world = World(drives=1, objects=False, arena_slabs=1, drive_slabs=4)
    stored(world, [chunk_of(0)])
    stored(world, [chunk_of(number) for number in range(8, 12)])
    transfer, store = world.store([chunk_of(0), chunk_of(1)], Durability.LOCAL)
    world.post(ev.Unpinned(store))
    _drop(world, 0)
    world.post(ev.ReservationEnded(transfer))
    assert KEY not in _settled(world)


def test_a_store_that_fails_takes_back_what_the_copy_before_it_was_registered_for() -> None:
    world = World(drives=1, objects=False)
    first = world.store([chunk_of(0)], Durability.MEMORY)
    _lose(world)
    second = world.store([chunk_of(0)], Durability.LOCAL)
    world.end(world.operation("register"))
    assert KEY in world.listed_here
    for write in [each for each in world.running if each.name == "write"]:
        world.end(write, fail=True)
    assert isinstance(world.answers[second[1]], DriveFailed)
    for transfer, store in (first, second):
        world.post(ev.Unpinned(store))
        world.post(ev.ReservationEnded(transfer))
    assert KEY not in _settled(world)


def test_a_registration_whose_answer_is_lost_is_taken_back() -> None:
    """Redis did it, and the connection broke: the store fails, and its chunks go."""
    world = World(drives=0, objects=False)
    transfer, store = world.store([chunk_of(0)], Durability.MEMORY)
    world.running.clear()
    world.index[KEY] = 1 << 16
    world.listed_here.add(KEY)
    world.post(ev.IndexingEnded(store, MetadataUnavailable("Redis does not answer")))
    assert world.acknowledge(transfer, store) == set()
    assert KEY not in _settled(world)


def test_a_store_waits_for_what_the_index_says_of_the_copy_before() -> None:
    """That answer would have ended the entry under which the new copy is listed."""
    world = World(drives=0, objects=False)
    stored(world, [chunk_of(0)], Durability.MEMORY)
    world.post(ev.EvictionWanted(world.ticket(), [KEY]))
    _lose(world)
    transfer, store = world.store([chunk_of(0)], Durability.MEMORY)
    assert "register" not in {each.name for each in world.running}
    world.settle()
    assert world.acknowledge(transfer, store) == {KEY}
    assert KEY in _settled(world)


def test_what_waits_for_space_on_a_drive_does_not_wait_for_itself() -> None:
    """Simulated seed 581: a chunk was dropped, and stayed on the drive for a goal that waited for its place."""
    full = ResidencySettings(pool_high_share=1.0, pool_low_share=1.0)
    world = World(drives=1, objects=False, arena_slabs=8, drive_slabs=1, settings=full)
    stored(world, [chunk_of(number) for number in range(4)])
    reader = world.pin([1])
    _drop(world, 1)
    transfer, store = world.store([chunk_of(8), chunk_of(9)], Durability.MEMORY)
    world.end(world.operation("register"))
    raised = world.ticket()
    world.post(ev.LevelRaised(raised, [KEY, chunk_of(8).key], Durability.LOCAL))
    _drop(world, 0)
    world.held.pop(reader)
    world.post(ev.Unpinned(reader))
    world.settle()
    assert world.answers[raised] == [chunk_of(8).key]
    world.acknowledge(transfer, store)
    _settled(world)


@pytest.mark.parametrize("ended", [False, True])
def test_what_came_from_the_object_tier_is_listed_in_the_entry_that_lists_the_object(ended: bool) -> None:
    """It is not uploaded again, and gives up its memory when the index agrees; not if its entry has ended."""
    world, key = World(drives=0, objects=True, arena_slabs=1), chunk_of(0).key
    world.objects[key], world.index[key] = chunk_of(0), 1 << 16
    world.listed_objects.add(key)
    world.load([0])
    world.settle()
    assert world.residency.generation(key) == 0
    ticket = world.ticket()
    world.post(
        ev.RegistrationWanted(
            ticket, [key, chunk_of(1).key], within={key: 1 << 16, chunk_of(1).key: 1 << 16}, in_object=True
        )
    )
    if ended:
        world.ended(key)
    world.settle()
    world.post(ev.Unpinned(ticket))
    assert world.answers[ticket] == (set() if ended else {key})
    assert world.residency.generation(key) == (0 if ended else 1 << 16)
    assert world.residency.in_object(key) is not ended and not world.uploads
    transfer = world.ticket()
    world.post(ev.Reserved(transfer, chunk_of(8).shape, 4))
    world.settle()
    assert isinstance(world.answers[transfer], list) and key not in world.residency
    world.post(ev.ReservationEnded(transfer))
    assert not under_way(world.residency)


@pytest.mark.parametrize("version", [0, 1])
def test_what_was_stored_since_is_not_listed_as_brought(version: int) -> None:
    world, key = World(drives=0, objects=True), chunk_of(0).key
    stored(world, [chunk_of(0, version)], Durability.MEMORY)
    generation, ticket = world.residency.generation(key), world.ticket()
    world.post(ev.RegistrationWanted(ticket, [key], within={key: 1}, in_object=True))
    world.settle()
    world.post(ev.Unpinned(ticket))
    assert world.residency.generation(key) == generation and world.answers[ticket] == set()


def _copied(world: World, within: dict[bytes, int]) -> set[bytes]:
    """Have two chunks of another node arrive, whose entries are these; the keys that are listed."""
    transfer, store = world.store([chunk_of(0), chunk_of(1)], Durability.REPLICATED, within=within)
    world.settle()
    world.post(ev.Unpinned(store))
    world.post(ev.ReservationEnded(transfer))
    world.settle()
    listed = world.answers[store]
    assert isinstance(listed, set)
    return listed


def test_a_copy_of_another_nodes_chunk_does_not_bring_it_back() -> None:
    """The chunk was evicted while its copy was on its way: registered like a store, it came back (seed 1144)."""
    world, ended = World(drives=2, objects=False), chunk_of(1).key
    world.index |= {KEY: 1 << 16, ended: 2 << 16}
    within = dict(world.index)
    world.ended(ended)
    assert _copied(world, within) == {KEY}
    assert _settled(world).generation(KEY) == 1 << 16 and ended not in world.residency
    assert ended not in world.index and not world.uploads


def test_a_copy_without_the_entry_of_its_source_would_bring_it_back() -> None:
    """The fault put back."""
    world, ended = World(drives=2, objects=False), chunk_of(1).key
    world.index |= {KEY: 1 << 16}
    assert _copied(world, {}) == {KEY, ended}
    assert ended in world.index


@pytest.mark.parametrize("entry", [1 << 16, 2 << 16])
def test_a_copy_that_is_here_joins_the_entry_of_its_source_or_stays_in_its_own(entry: int) -> None:
    world = World(drives=2, objects=False)
    stored(world, [chunk_of(0)], Durability.LOCAL)
    generation, ticket = world.residency.generation(KEY), world.ticket()
    assert generation
    within = {KEY: generation if entry == 1 << 16 else generation + 1}
    world.post(ev.RegistrationWanted(ticket, [KEY], within=within))
    world.settle()
    world.post(ev.Unpinned(ticket))
    assert world.answers[ticket] == ({KEY} if entry == 1 << 16 else set())
    assert _settled(world).generation(KEY) == generation and not world.residency.in_object(KEY)


def test_a_copy_whose_entry_has_ended_joins_the_next_one() -> None:
    """The drop of the first entry has not arrived yet: a replicated store of the chunk found no second node."""
    world = World(drives=2, objects=False)
    stored(world, [chunk_of(0)], Durability.LOCAL)
    ended = world.ended(KEY)
    assert ended
    world.index[KEY], ticket = ended + 1, world.ticket()
    world.post(ev.RegistrationWanted(ticket, [KEY], within={KEY: ended + 1}))
    world.settle()
    world.post(ev.Unpinned(ticket))
    world.post(ev.Dropped(world.ticket(), {KEY: ended}))
    assert world.answers[ticket] == {KEY} and _settled(world).generation(KEY) == ended + 1


def test_the_header_of_a_copy_names_the_entry_of_its_source_from_the_first() -> None:
    """After a power cut before the next header, a drop of that entry would not concern the copy."""
    world = World(drives=2, objects=False)
    world.index[KEY] = 5 << 16
    world.store([chunk_of(0)], Durability.REPLICATED, within={KEY: 5 << 16})
    assert world.residency.copies.entries[KEY].recorded == 5 << 16
