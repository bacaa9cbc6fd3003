"""What a node keeps in memory, what it asks to let go of, and when it asks again."""

from __future__ import annotations

from typing import Any

import pytest

from quire.model.durability import Durability, OnExisting
from quire.model.errors import ContentConflict, PoolFull
from quire_storage.core.chunks import Copy
from quire_storage.core.pool.slots import SlotAllocator
from quire_storage.core.residency import Residency, ResidencySettings, contents, evictions, promotions, writes
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.invariants import under_way
from tests.unit.storage.residency_world import SLAB, World, chunk_of, content_of, stored, stored_in_memory

FULL = ResidencySettings(pool_high_share=1.0, pool_low_share=1.0)


def _pinned(world: World, number: int) -> Copy:
    """A copy that a reader holds, which has just let go again."""
    ticket = world.pin([number])
    (copy,) = world.held.pop(ticket)
    world.post(ev.Unpinned(ticket))
    return copy


def _wanted(world: World, number: int) -> bool:
    """Whether a reader that finds a chunk on a drive is told to keep it in memory; it is not kept."""
    reader, ticket = world.pin([number]), world.ticket()
    (copy,) = world.held[reader]
    assert copy.memory is None, "it lies on a drive alone"
    world.post(ev.PromotionWanted(ticket, [copy.number]))
    answer: Any = world.answers[ticket]
    for promotion, _ in answer.values():
        world.post(ev.PromotionEnded(ticket, promotion, False))
    world.held.pop(reader)
    world.post(ev.Unpinned(reader))
    return bool(answer)


def _on_drives_alone(world: World, slabs_full: bool = True) -> None:
    """Chunks 0 to 3 were pushed out of memory, which is full of others (or is left empty)."""
    for first in (0, 8, 16):
        stored(world, [chunk_of(first + at) for at in range(4)])
    world.forget_evicted()
    assert _pinned(world, 0).memory is None
    if not slabs_full:
        for first in (8, 16):
            world.drop(*(chunk_of(first + at).key for at in range(4)))
        world.settle()


def test_what_is_read_once_stays_out_of_memory_that_is_full_and_what_is_read_twice_does_not() -> None:
    world = World(drives=1, objects=False, arena_slabs=2, drive_slabs=4)
    _on_drives_alone(world)
    assert [_wanted(world, 0), _wanted(world, 1), _wanted(world, 0)] == [False, False, True]


def test_what_is_read_stays_where_there_is_space() -> None:
    world = World(drives=1, objects=False, arena_slabs=2, drive_slabs=4)
    _on_drives_alone(world, slabs_full=False)
    assert _wanted(world, 0)


def test_memory_is_full_when_a_fifth_of_it_is_left() -> None:
    """Six of its eight slots are used, and the seventh would be too much; with five it would not."""
    world = World(drives=1, objects=False, arena_slabs=2, drive_slabs=4)
    _on_drives_alone(world)
    world.drop(chunk_of(8).key, chunk_of(9).key)
    world.settle()
    assert world.residency.ledger.slots.used_bytes == 6 * chunk_of(0).shape.slot_bytes
    assert not _wanted(world, 0)
    world.drop(chunk_of(10).key)
    world.settle()
    assert _wanted(world, 1)


def test_only_so_many_reads_are_remembered_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotions, "_RECENT_MAX", 2)
    world = World(drives=1, objects=False, arena_slabs=2, drive_slabs=4)
    _on_drives_alone(world)
    assert not any(_wanted(world, number) for number in (0, 1, 2))
    assert [_wanted(world, number) for number in (0, 2)] == [False, True], "0 had been forgotten, and 1 is now"


def test_what_was_read_into_memory_is_served_from_there() -> None:
    world = World(drives=1, objects=False, arena_slabs=2, drive_slabs=4)
    _on_drives_alone(world, slabs_full=False)
    readers = [world.pin([0]), world.pin([0])]
    tickets, places = [], []
    for reader in readers:
        (copy,) = world.held[reader]
        tickets.append(world.ticket())
        world.post(ev.PromotionWanted(tickets[-1], [copy.number], True))
        answer: Any = world.answers[tickets[-1]]
        places.append(answer[copy.number])
    assert places[0] == places[1], "shared"
    (promotion, place), before = places[0], world.residency.ledger.slots.used_bytes
    world.post(ev.PromotionEnded(tickets[0], promotion, False))
    assert world.residency.ledger.slots.used_bytes == before, "the other one still reads into it"
    world.memory[place.offset] = content_of(chunk_of(0))
    world.post(ev.PromotionEnded(tickets[1], promotion, True))
    assert _pinned(world, 0).memory == place
    assert world.residency.ledger.slots.used_bytes == before


def test_what_does_not_fit_into_memory_does_not_keep_another_shape_from_it() -> None:
    """Of two shapes the first finds no slot, as readers hold all others of it."""
    world = World(drives=1, objects=False, arena_slabs=2, drive_slabs=8)
    for first in (0, 4):
        stored(world, [chunk_of(first)])
    for first in (8, 16):
        stored(world, [chunk_of(first + at) for at in range(4)])
    stored(world, [chunk_of(12)])
    world.settle()
    copies = [world.held[world.pin([number])][0] for number in (0, 4)]
    assert all(copy.memory is None for copy in copies)
    hold = world.pin([number for number in range(8, 20) if chunk_of(number).key in world.residency])
    assert any(copy.memory is not None for copy in world.held[hold])
    slots = world.residency.ledger.slots
    shapes = {copy.number: copy.chunk.shape for copy in copies}
    free = {number: slots.available(shape) for number, shape in shapes.items()}
    ticket = world.ticket()
    world.post(ev.PromotionWanted(ticket, list(shapes), True))
    answer: Any = world.answers[ticket]
    assert list(map(bool, free.values())) == [False, True], "the first one finds no slot"
    assert answer.keys() == {number for number, count in free.items() if count}


@pytest.mark.parametrize("version", [0, 1])
def test_a_chunk_of_the_object_tier_does_not_replace_what_was_stored_meanwhile(version: int) -> None:
    world = World(drives=0, objects=True)
    world.objects[chunk_of(0).key] = chunk_of(0, version)
    world.load([0])
    transfer, store = world.store([chunk_of(0)], Durability.MEMORY)
    world.settle()
    world.acknowledge(transfer, store)
    assert _pinned(world, 0).chunk.same_content(chunk_of(0))
    assert world.residency.ledger.slots.used_bytes == chunk_of(0).shape.slot_bytes


@pytest.mark.parametrize("here", [False, True])
def test_a_store_is_compared_with_the_object_tier_unless_a_copy_is_here(here: bool) -> None:
    world = World(drives=0, objects=True)
    if here:
        stored(world, [chunk_of(0)])
    transfer, store = world.store(
        [chunk_of(0)], Durability.MEMORY, OnExisting.VERIFY, elsewhere=[chunk_of(0, version=1)]
    )
    world.settle()
    assert isinstance(world.answers[store], ContentConflict) is not here
    world.acknowledge(transfer, store)
    world.settle()
    assert (chunk_of(0).key in world.residency) is here and not under_way(world.residency)


def test_what_came_from_the_object_tier_gives_up_its_memory_and_is_noted_as_come() -> None:
    world = World(drives=0, objects=True, arena_slabs=1)
    world.objects |= {chunk_of(number).key: chunk_of(number) for number in range(4)}
    with world.residency.arriving() as arriving:
        world.load([0, 1, 2, 3])
        world.settle()
        assert arriving == {chunk_of(number).key for number in range(4)}
    before = world.residency.evictions["memory"]
    transfer = world.ticket()
    world.post(ev.Reserved(transfer, chunk_of(8).shape, 3))
    assert isinstance(world.answers[transfer], list), "though the node has no drive"
    assert world.residency.evictions["memory"] - before == 3


def test_a_transfer_that_is_not_known_is_nothing() -> None:
    world = World(drives=0, objects=True)
    world.post(ev.TransferUnsettled(world.ticket()))
    world.post(ev.ReservationEnded(world.ticket()))
    assert not under_way(world.residency) and not world.running


@pytest.mark.parametrize("group", [1, 64])
@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_as_many_are_asked_for_as_are_needed(wanted: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks fill a drive, each of a conversation of its own; what is over the low watermark goes, by groups."""
    monkeypatch.setattr(evictions, "GROUP", group)
    low = ResidencySettings(pool_high_share=0.95, pool_low_share=1 - wanted / 4)
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=1, settings=low)
    for first in (0, 8, 16):
        stored(world, [chunk_of(first)])
    assert not world.residency.evictions, "not before the high watermark"
    world.pass_time()
    stored(world, [chunk_of(24)])
    assert world.residency.evictions == {"disk": wanted}
    assert [chunk_of(first).key in world.residency for first in (0, 8, 16, 24)] == [at >= wanted for at in range(4)]


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_a_reservation_asks_for_as_many_as_it_needs(wanted: int) -> None:
    """Where there is no drive."""
    world = World(drives=0, objects=False, arena_slabs=1)
    for first in (0, 8, 16, 24):
        stored(world, [chunk_of(first)], Durability.MEMORY)
    world.pass_time()
    ticket = world.ticket()
    world.post(ev.Reserved(ticket, chunk_of(0).shape, wanted))
    world.post(ev.TimePassed())
    (question,) = world.residency.eviction.questions.values()
    assert len(question.entries) == wanted, "and asks once"
    world.end(world.operation("ask"))
    assert isinstance(world.answers[ticket], list) and world.residency.evictions == {"memory": wanted}


def test_a_reservation_asks_for_what_is_missing_and_for_ends_of_conversations() -> None:
    """Two of the three slots that it wants are free."""
    world = World(drives=0, objects=False, arena_slabs=1)
    stored(world, [chunk_of(0), chunk_of(1)], Durability.MEMORY)
    _pinned(world, 1)  # so that its parent is the one that was not used for longer
    ticket = world.ticket()
    world.post(ev.Reserved(ticket, chunk_of(0).shape, 3))
    (question,) = world.residency.eviction.questions.values()
    assert [entry.key for entry in question.entries] == [chunk_of(1).key]
    world.settle()
    assert isinstance(world.answers[ticket], list)


def test_no_more_than_a_group_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictions, "GROUP", 2)
    low = ResidencySettings(pool_high_share=0.95, pool_low_share=0.0)
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=1, settings=low)
    for first in (0, 8, 16):
        stored(world, [chunk_of(first)])
    world.pass_time()
    world.store([chunk_of(24)], Durability.LOCAL)
    world.end(world.operation("write"))
    (question,) = world.residency.eviction.questions.values()
    assert len(question.entries) == 2


def test_what_was_used_goes_after_what_was_not() -> None:
    """A use counts when its holder lets go, and only if it was one."""
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=1, settings=FULL)
    for first in (0, 8, 16, 24):
        stored(world, [chunk_of(first)])
    _pinned(world, 0)
    looked = world.ticket()
    world.post(ev.Pinned(looked, [chunk_of(8).key], False))
    world.held.pop(looked)
    world.post(ev.Unpinned(looked))
    world.pass_time()
    for number in (32, 33, 34):
        transfer, store = world.store([chunk_of(number)], Durability.LOCAL)
        world.settle()
        world.acknowledge(transfer, store)
    assert chunk_of(0).key in world.residency
    assert not any(chunk_of(number).key in world.residency for number in (8, 16, 24))


def test_in_memory_too_what_was_used_stays() -> None:
    world = World(drives=1, objects=False, arena_slabs=1, drive_slabs=40)
    for first in (0, 8, 16, 24):
        stored(world, [chunk_of(first)])
    _pinned(world, 0)
    stored(world, [chunk_of(32)])
    stored(world, [chunk_of(40)])
    assert [_pinned(world, number).memory is not None for number in (0, 8, 16)] == [True, False, False]
    assert world.residency.evictions == {"memory": 2}


def test_what_is_refused_is_asked_for_again_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second, then twice as long each time; and at once when something went."""
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=1, settings=FULL)
    for first in (0, 8, 16, 24):
        stored(world, [chunk_of(first)])
    world.leased = {chunk_of(first).key for first in range(64)}
    pauses, told, handle = list[float](), list[Any](), world.residency.handle

    def listening(event: ev.Event, now_s: float) -> list[ev.Instruction]:
        told.append(handle(event, now_s))
        return told[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(world.residency, "handle", listening)
    transfer, store = world.store([chunk_of(32)], Durability.LOCAL)
    for _ in range(9):
        while world.running:
            world.end(world.running[0])
        (at_s,) = [each.at_s for out in told for each in out if isinstance(each, ev.WakeAt)]
        pauses.append(at_s - world.now_s)
        told.clear()
        assert isinstance(world.answers[store], PoolFull)
        world.acknowledge(transfer, store)
        world.now_s = at_s - 0.01
        transfer, store = world.store([chunk_of(32)], Durability.LOCAL)
        assert not world.running, "not before"
        world.now_s = at_s
        world.post(ev.TimePassed())
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 30])


def test_a_store_that_finds_no_space_says_how_much_it_wanted() -> None:
    world = World(drives=1, objects=False, arena_slabs=8, drive_slabs=1, settings=FULL)
    for first in (0, 8, 16, 24):
        stored(world, [chunk_of(first)])
    world.leased = {chunk_of(first).key for first in range(64)}
    transfer, store = world.store([chunk_of(32), chunk_of(33)], Durability.LOCAL)
    world.settle()
    error: Any = world.answers[store]
    assert isinstance(error, PoolFull) and "no space on the drives for 8192 bytes" in error.message
    world.acknowledge(transfer, store)


def test_a_store_does_not_wait_for_space_that_it_holds_itself() -> None:
    """It pins a chunk that was there before, and that is evicted while it waits."""
    world = World(drives=1, objects=False, arena_slabs=8, drive_slabs=1, settings=FULL)
    for first in (0, 8, 16, 24):
        stored(world, [chunk_of(first)])
    reader = world.pin([8])
    asked = world.ticket()
    world.post(ev.EvictionWanted(asked, [chunk_of(8).key]))
    world.settle()
    assert world.answers[asked] == 1
    world.leased = {chunk_of(first).key for first in range(16, 64)}
    transfer, store = world.store([chunk_of(0), chunk_of(32), chunk_of(40)], Durability.LOCAL)
    again = world.ticket()
    world.post(ev.EvictionWanted(again, [chunk_of(0).key]))
    world.settle()
    assert store not in world.answers and world.answers[again] == 1, "the copy that is read leaves soon"
    world.held.pop(reader)
    world.post(ev.Unpinned(reader))
    world.settle()
    assert isinstance(world.answers[store], PoolFull), "it needs two places: one is free, and one it holds itself"
    world.acknowledge(transfer, store)
    world.settle()
    assert chunk_of(0).key not in world.residency and not under_way(world.residency)


def test_a_write_that_waits_for_space_ends_when_its_copies_leave() -> None:
    """It kept their memory, and the background flush waited for it."""
    world = World(drives=1, objects=False, arena_slabs=8, drive_slabs=1, settings=FULL)
    for first in (0, 8, 16, 24):
        stored(world, [chunk_of(first)])
    reader = world.pin([0])
    asked = world.ticket()
    world.post(ev.EvictionWanted(asked, [chunk_of(0).key]))
    world.settle()
    world.leased = {chunk_of(first).key for first in range(8, 32)}
    stored(world, [chunk_of(32)], Durability.MEMORY)
    (write,) = world.residency.writes.unplaced
    assert write.background, "the space that the reader holds is waited for"
    world.post(ev.EvictionWanted(world.ticket(), [chunk_of(32).key]))
    world.settle()
    assert not world.residency.writes.running and not world.residency.writes.unplaced
    world.held.pop(reader)
    world.post(ev.Unpinned(reader))
    world.settle()
    assert not under_way(world.residency)


def test_a_copy_that_is_raised_is_not_given_up_for_keepers_that_have_less() -> None:
    """A hot copy was raised to `local` and acknowledged, and given up when it was cold."""
    world = World(drives=1, objects=True)
    stored(world, [chunk_of(0)])
    ticket = world.ticket()
    world.post(ev.EvictionWanted(ticket, [chunk_of(0).key], ("b",), Durability.MEMORY))
    assert world.answers[ticket] == 0 and chunk_of(0).key in world.residency and not world.running
    asked = world.ticket()
    world.post(ev.EvictionWanted(asked, [chunk_of(0).key], ("b",), Durability.LOCAL))
    raised = world.ticket()
    world.post(ev.LevelRaised(raised, [chunk_of(0).key], Durability.REPLICATED))
    assert world.answers[raised] == [], "nothing is promised of a copy that may be about to leave"
    world.settle()
    assert world.answers[asked] == 1


@pytest.mark.parametrize("keepers", [(), ("b",), ("b", "c")])
def test_a_policy_says_whether_a_chunk_goes_from_here_or_from_everywhere(keepers: tuple[str, ...]) -> None:
    world = World(drives=1, objects=True)
    stored(world, [chunk_of(0)])
    ticket = world.ticket()
    world.post(ev.EvictionWanted(ticket, [chunk_of(0).key], keepers, Durability.LOCAL))
    machine = world.residency
    assert chunk_of(0).key not in machine.in_memory and chunk_of(0).key not in machine.on_disk, "not asked for twice"
    assert world.running[0].name == ("withdraw" if keepers else "ask")
    assert not machine.eviction.asking, "the node itself asks for others meanwhile"
    world.settle()
    assert world.answers[ticket] == 1


def test_a_walk_over_what_is_here_is_in_parts_that_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_SCANNED", 2)
    world = World(drives=0, objects=False)
    stored(world, [chunk_of(number) for number in range(4)], Durability.MEMORY)
    stored(world, [chunk_of(8)], Durability.MEMORY)
    parts = list(world.residency.scan())
    assert [len(part) for part in parts] == [2, 2, 1]
    assert len({key for part in parts for key in part}) == 5


def test_a_chunk_that_others_extend_does_not_go_before_them() -> None:
    """From the lowest tier, which is memory where there is no drive."""
    for drives in (0, 1):
        world = World(drives=drives, objects=False, arena_slabs=1 if not drives else 8, drive_slabs=1, settings=FULL)
        stored(world, [chunk_of(number) for number in range(4)], Durability.LOCAL if drives else Durability.MEMORY)
        tier = world.residency.on_disk if drives else world.residency.in_memory
        assert [tier.is_leaf(chunk_of(number).key) for number in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("group", [1, 2])
def test_what_lies_in_memory_only_is_written_a_group_at_a_time(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "GROUP", group)
    world = World(drives=1, objects=False)
    stored_in_memory(world, [chunk_of(number) for number in range(4)])
    for left in range(4, 0, -group):
        (write,) = world.residency.writes.running.values()
        assert len(write.entries) == group and world.residency.dirty_chunks == left
        world.now_s += 1.0
        world.post(ev.TimePassed())
        assert len(world.residency.writes.running) == 1, "one at a time"
        world.end(world.operation("write"))
    assert not world.residency.dirty_chunks and not world.residency.writes.running


def test_a_node_that_stops_writes_what_lies_in_memory_only_first() -> None:
    world = World(drives=1, objects=False)
    stored_in_memory(world, [chunk_of(0)])
    ticket = world.ticket()
    world.post(ev.Stopping(ticket))
    assert ticket not in world.answers
    world.end(world.operation("write"))
    assert ticket in world.answers and world.residency.dirty_chunks == 0


def test_a_node_whose_last_drive_has_failed_keeps_what_memory_has_and_stops() -> None:
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(0)])
    world.post(ev.DriveLost(0))
    world.now_s += 60.0
    world.post(ev.TimePassed())
    assert world.residency.dirty_chunks == 1 and not world.residency.writes.running
    ticket = world.ticket()
    world.post(ev.Stopping(ticket))
    assert ticket in world.answers


def test_a_node_that_starts_knows_what_its_drives_have() -> None:
    """In order of eviction, with what is to have another copy."""
    world = World(drives=1, objects=False, drive_slabs=4)
    stored(world, [chunk_of(number) for number in range(4)], Durability.REPLICATED)
    stored(world, [chunk_of(8)])
    pool, arena = world.pool, SlotAllocator(SLAB, SLAB)
    assert pool is not None
    low = ResidencySettings(pool_high_share=0.95, pool_low_share=0.1)
    again = Residency(low, arena, pool, objects=False)
    assert sorted(again.keys()) == sorted(world.residency.keys()) == sorted(again.on_disk)
    assert set(again.replicated) == {chunk_of(number).key for number in range(4)}
    assert [again.on_disk.is_leaf(chunk_of(number).key) for number in (0, 1, 2, 3, 8)] == [False] * 3 + [True] * 2
    assert again.on_disk.used_bytes == world.residency.on_disk.used_bytes
    assert again.on_disk._capacity_bytes == pool.capacity_bytes
    assert again.handle(ev.TimePassed(), 0.0) == []


def test_two_copies_for_readers_only_leave_one_after_the_other() -> None:
    world = World(drives=0, objects=True)
    readers = []
    for version in range(2):
        transfer, store = world.store([chunk_of(0, version)], Durability.MEMORY)
        world.end(world.operation("register"))
        world.acknowledge(transfer, store)
        readers.append(world.pin([0]))
        world.drop(chunk_of(0).key)
    assert world.residency.copies.leaving[chunk_of(0).key] == 2
    for reader in readers:
        world.held.pop(reader)
        world.post(ev.Unpinned(reader))
    assert not world.residency.copies.leaving and world.residency.ledger.slots.used_bytes == 0
