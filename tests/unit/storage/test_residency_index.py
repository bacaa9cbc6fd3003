"""Answers of the index about copies that a node believes not to be listed, and copies that are hidden from it."""

from __future__ import annotations

import pytest

from quire.model.durability import Durability
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.invariants import under_way
from tests.unit.storage.residency_world import World, chunk_of, stored

KEYS = [chunk_of(number).key for number in range(4)]


def _names(world: World) -> list[str]:
    return [operation.name for operation in world.running]


def _number(world: World, key: bytes) -> int:
    return world.residency.copies.entries[key].number


def _unlisted(world: World, level: Durability, count: int = 1) -> list[bytes]:
    """Store chunks of which the node then believes that the index does not list them, although it does."""
    chunks = [chunk_of(number) for number in range(count)]
    stored(world, chunks, level)
    for chunk in chunks:
        entry = world.residency.copies.find(chunk.key)
        assert entry is not None
        world.residency.copies.set_generation(entry, 0)
    return [chunk.key for chunk in chunks]


def test_what_is_found_to_be_listed_is_known_to_be() -> None:
    """Unknown keys in front change nothing, and a copy in memory has no header to change."""
    world = World(drives=0, objects=False)
    first, second = _unlisted(world, Durability.MEMORY, 2)
    at = world.index
    world.post(ev.Listed({chunk_of(9).key: 1 << 16, first: at[first], chunk_of(10).key: 2 << 16, second: at[second]}))
    assert [world.residency.generation(key) for key in (first, second)] == [at[first], at[second]]
    assert not _names(world) and world.residency.listed_count == 2


def test_the_header_names_the_entry_that_was_found() -> None:
    """After a restart the header alone identifies the deletions that concern the copy."""
    world = World(drives=1, objects=False)
    (key,) = _unlisted(world, Durability.LOCAL)
    world.index[key] += 5 << 16
    world.post(ev.Listed({key: world.index[key]}))
    assert _names(world) == ["headers"]
    world.settle()
    placed = world.pool.get(key) if world.pool is not None else None
    assert placed is not None and placed.header.generation == world.index[key] == world.residency.generation(key)
    assert not under_way(world.residency)


def test_a_header_that_names_the_entry_is_not_written_again() -> None:
    world = World(drives=1, objects=False)
    (key,) = _unlisted(world, Durability.LOCAL)
    world.post(ev.Listed({key: world.index[key]}))
    assert not _names(world) and world.residency.generation(key) == world.index[key]


def test_a_copy_in_memory_of_a_node_with_drives_has_no_header_to_change() -> None:
    world = World(drives=1, objects=False)
    transfer, store = world.store([chunk_of(0)], Durability.MEMORY)
    world.end(world.operation("register"))
    entry = world.residency.copies.find(KEYS[0])
    assert entry is not None and entry.disk is None and not entry.registering
    world.residency.copies.set_generation(entry, 0)
    world.post(ev.Listed({KEYS[0]: 7 << 16}))
    assert "headers" not in _names(world) and world.residency.generation(KEYS[0]) == 7 << 16
    world.post(ev.Unpinned(store))
    world.post(ev.ReservationEnded(transfer))


def test_an_entry_that_is_known_is_not_replaced() -> None:
    """The answer may be older than a later registration of this node."""
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(0)], Durability.LOCAL)
    generation = world.residency.generation(KEYS[0])
    assert generation
    world.post(ev.Listed({KEYS[0]: generation + (9 << 16)}))
    assert world.residency.generation(KEYS[0]) == generation and not _names(world)


def test_a_copy_that_is_being_registered_waits_for_that_answer() -> None:
    world = World(drives=0, objects=False)
    transfer, store = world.store([chunk_of(0)], Durability.MEMORY)
    assert _names(world) == ["register"]
    world.post(ev.Listed({KEYS[0]: 9 << 16}))
    assert world.residency.generation(KEYS[0]) == 0
    world.settle()
    assert world.residency.generation(KEYS[0]) == world.index[KEYS[0]] != 9 << 16
    world.acknowledge(transfer, store)


def test_a_copy_that_is_being_withdrawn_is_not_taken_for_listed() -> None:
    world = World(drives=0, objects=False)
    stored(world, [chunk_of(0)], Durability.MEMORY)
    world.post(ev.Hidden(_number(world, KEYS[0])))
    assert _names(world) == ["withdraw"] and world.residency.generation(KEYS[0]) == 0
    world.post(ev.Listed({KEYS[0]: 9 << 16}))
    assert world.residency.generation(KEYS[0]) == 0
    world.settle()
    assert KEYS[0] not in world.listed_here and KEYS[0] in world.residency


def test_a_hidden_copy_is_withdrawn_once_and_stays() -> None:
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(number) for number in range(2)], Durability.LOCAL)
    reader = world.pin([0])
    world.post(ev.Hidden(1))  # nothing has that number
    assert not _names(world)
    number = _number(world, KEYS[0])
    for _ in range(2):
        world.post(ev.Hidden(number))
        assert _names(world) == ["withdraw"]
    world.settle()
    assert KEYS[0] in world.residency and world.listed_here == {KEYS[1]}
    world.post(ev.Hidden(number))
    assert not _names(world), "it is not listed"
    world.held.pop(reader)
    world.post(ev.Unpinned(reader))
    assert not under_way(world.residency)


def test_a_copy_that_leaves_is_not_hidden() -> None:
    world = World(drives=0, objects=False)
    stored(world, [chunk_of(0)], Durability.MEMORY)
    reader, number = world.pin([0]), _number(world, KEYS[0])
    world.ended(KEYS[0])
    world.drop(KEYS[0])
    assert KEYS[0] not in world.residency
    world.post(ev.Hidden(number))
    assert not _names(world)
    world.held.pop(reader)
    world.post(ev.Unpinned(reader))
    assert not under_way(world.residency)


@pytest.mark.parametrize("level", [Durability.MEMORY, Durability.LOCAL])
def test_a_durable_store_waits_for_the_header_that_names_its_entry(level: Durability) -> None:
    """The copy is on a drive already; its index entry is a new one."""
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(0)], Durability.LOCAL)
    world.post(ev.Hidden(_number(world, KEYS[0])))
    world.settle()
    transfer, store = world.store([chunk_of(0)], level)
    world.end(world.operation("register"))
    assert _names(world) == ["headers"]
    assert (store in world.answers) == (level is Durability.MEMORY)
    world.end(world.operation("headers"))
    assert world.acknowledge(transfer, store) == {KEYS[0]}
    placed = world.pool.get(KEYS[0]) if world.pool is not None else None
    assert placed is not None and placed.header.generation == world.index[KEYS[0]]


def test_followers_keep_slots_of_the_store_and_of_its_chunks_alone() -> None:
    """Slots that went to a copy of the chunk count, those of another chunk or of a copy that leaves do not."""
    world = World(drives=0, objects=False)
    chunks = [chunk_of(number) for number in range(3)]
    transfer, store = world.store(chunks, Durability.MEMORY)
    offsets = world.transfers[transfer][1]
    world.settle()

    def joined(keys: list[bytes]) -> object:
        holder, ticket = world.pin([]), world.ticket()
        world.post(ev.Followed(ticket, holder, transfer, keys, offsets))
        world.post(ev.Unpinned(holder))
        return world.answers[ticket]

    assert joined(KEYS[:3]) == [0, 1, 2], "they belong to copies now"
    assert joined([KEYS[0], KEYS[3], KEYS[2]]) == [0, 2], "of another chunk nothing is read"
    reader = world.pin([1])
    world.ended(KEYS[1])
    world.drop(KEYS[1])
    assert joined(KEYS[:3]) == [0, 2], "its copy leaves, and keeps the slot for a reader alone"
    world.held.pop(reader)
    for ticket in (reader, store):
        world.post(ev.Unpinned(ticket))
    world.post(ev.ReservationEnded(transfer))
    assert joined(KEYS[:3]) == [0, 2], "nobody has the slot"
    assert not under_way(world.residency)


def test_followers_keep_slots_of_a_store_that_has_no_copies_yet() -> None:
    world = World(drives=0, objects=False)
    transfer = world.ticket()
    world.post(ev.Reserved(transfer, chunk_of(0).shape, 2))
    offsets = world.answers[transfer]
    assert isinstance(offsets, list)
    holder, ticket = world.pin([]), world.ticket()
    world.post(ev.Followed(ticket, holder, transfer, KEYS[:2], offsets))
    assert world.answers[ticket] == [0, 1]
    world.post(ev.ReservationEnded(transfer))
    other = world.ticket()
    world.post(ev.Reserved(other, chunk_of(0).shape, 64, patient=False))
    free = world.answers[other]
    assert not isinstance(free, list) or not set(offsets) & set(free)
    world.post(ev.ReservationEnded(other))
    world.post(ev.Unpinned(holder))
    assert not under_way(world.residency)


def test_what_was_brought_is_listed_without_another_upload() -> None:
    """The chunk's entry lists the object tier: when the index answers, nothing is uploaded."""
    world = World(drives=0, objects=True)
    key = KEYS[0]
    world.objects[key], world.index[key] = chunk_of(0), 1 << 16
    world.listed_objects.add(key)
    world.load([0])
    world.settle()
    ticket = world.ticket()
    world.post(ev.RegistrationWanted(ticket, [key], within={key: 1 << 16}, in_object=True))
    world.end(world.operation("register"))
    assert world.residency.in_object(key) and not world.uploads
    world.post(ev.Unpinned(ticket))


def test_what_is_registered_anew_is_uploaded() -> None:
    world = World(drives=0, objects=True)
    (key,) = _unlisted(world, Durability.MEMORY)
    world.uploaded.clear()
    ticket = world.ticket()
    entry = world.residency.copies.find(key)
    assert entry is not None
    entry.in_object = False
    world.post(ev.RegistrationWanted(ticket, [key]))
    world.end(world.operation("register"))
    assert not world.residency.in_object(key) and key in world.uploads
    world.settle()
    world.post(ev.Unpinned(ticket))
