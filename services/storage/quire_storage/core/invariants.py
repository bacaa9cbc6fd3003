"""What is true of the residency machine after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from typing import Final

from quire.model.durability import Durability
from quire_storage.core.entry import Entry, Phase
from quire_storage.core.residency import Residency

_UNDER_WAY: Final = (
    *("_reservations", "_transfers", "_offers", "_used", "_holders", "_awaiting", "_goals", "_writes", "_rewrites"),
    *("_removals", "_removal_waits", "_questions", "_withdrawing", "_fetching", "_promotions", "_leaving"),
)


def under_way(machine: Residency) -> list[str]:
    """What is still held or has not ended. For tests."""
    tables: dict[str, Sized] = {name: getattr(machine, name) for name in _UNDER_WAY}
    return [f"{name[1:]}: {len(table)}" for name, table in tables.items() if table]


def check(machine: Residency) -> None:
    """Raises `AssertionError` where the machine contradicts itself. For tests: walks over everything."""
    owners = {offset: ticket for ticket, offsets in machine._transfers.items() for offset in offsets}
    owners |= {e.memory.offset: e.number for e in machine._copies.values() if e.memory is not None}
    for number, promotion in machine._promotions.items():
        owners |= {place.offset: number for _, place in promotion.places.values()}
    machine.ledger.check(owners)
    assert machine._off_drives == sum(entry.disk is None for entry in machine._entries.values()), "they are counted"
    resident = {key: entry for key, entry in machine._entries.items() if entry.phase is Phase.RESIDENT}
    in_memory = {key for key, entry in resident.items() if entry.memory is not None}
    asked = {entry.key for question in machine._questions.values() for entry in question.entries}
    assert set(machine.in_memory) | asked >= in_memory >= set(machine.in_memory), (
        "the order of memory has what is there"
    )
    pins = Counter(entry.number for mine in machine._holders.values() for entry in mine)
    for entry in machine._copies.values():
        assert entry.pins == pins[entry.number], f"{entry.key.hex()}: {entry.pins} pins, {pins[entry.number]} held"
        assert entry.is_used or entry.memory is not None or entry.key in machine._leaving, "an unused copy sleeps"
        somewhere = entry.memory is not None or entry.disk is not None
        assert somewhere or entry.phase is not Phase.RESIDENT, "what can be read lies somewhere"
        current = machine._entries.get(entry.key) is entry
        assert current == (entry.phase is not Phase.LEAVING), f"{entry.key.hex()} is {entry.phase.name}"
    leaving = Counter(entry.key for entry in machine._copies.values() if entry.phase is Phase.LEAVING)
    assert leaving == machine._leaving, "what is leaving is counted"
    if machine.pool is not None or machine._objects:
        leaves = [key for key in machine.in_memory.aside if machine.pool is not None or machine.in_memory.is_leaf(key)]
        assert all(map(machine._kept_in_memory, leaves)), "what is set aside in memory is kept there by something"
    _check_counts(machine)
    here = machine.keys()
    levels = {key: found[0].level for key in here if (found := machine.look(key)) is not None}
    replicated = {key for key, level in levels.items() if level is Durability.REPLICATED}
    raised = {key for key, level in levels.items() if level is Durability.OBJECT}
    assert replicated <= machine.replicated.keys() <= replicated | raised, "what is to have another copy is known"
    _check_drives(machine, resident, asked)


def _check_counts(machine: Residency) -> None:
    """What entries and the machine count of what is under way."""
    goals = [goal for goal in machine._goals.values() if goal.registering]
    registering = Counter(entry.number for goal in goals for entry in goal.entries)
    awaited = Counter(entry.number for waiting in machine._awaiting.values() for entry in waiting.entries)
    rewrites = Counter(entry.number for entries, _ in machine._rewrites.values() for entry in entries)
    for entry in machine._copies.values():
        counted = (registering[entry.number], awaited[entry.number], rewrites[entry.number])
        assert (entry.registering, entry.awaited, entry.rewrites) == counted, f"{entry.key.hex()}: {counted} under way"
        assert not entry.write or entry in machine._writes[entry.write].entries, "its write has it"
        assert not entry.question or entry in machine._questions[entry.question].entries, "its question has it"
        assert not entry.promotion or entry.number in machine._promotions[entry.promotion].places, "it has a slot there"
        stride = machine.ledger.slots.layer_stride(entry.chunk.shape)
        assert entry.memory is None or entry.memory.layer_stride == stride, "layers lie as its shape has them"
    off = [each for each in machine._copies.values() if each.disk is not None and (each.removal or each.forgotten)]
    assert machine._leaving_bytes == sum(each.chunk.shape.slot_bytes for each in off), "what comes free is counted"
    by_itself = {number for number, question in machine._questions.items() if not question.ticket}
    assert machine._asking == by_itself, "what it asked without a policy"


def _check_drives(machine: Residency, resident: dict[bytes, Entry], asked: set[bytes]) -> None:
    if machine.pool is None:
        assert all(entry.disk is None for entry in machine._copies.values()), "there are no drives"
        return
    failed = machine.pool.failed_drives()
    places = [e.disk for e in machine._copies.values() if e.disk is not None and e.disk.drive not in failed]
    places += [place for write in machine._writes.values() for place in write.places if place.drive not in failed]
    asleep = [key for key in list(machine.pool.keys()) if key not in machine._entries and key not in machine._leaving]
    arriving = {entry.key for write in machine._writes.values() for entry in write.entries}
    found = [placed.place for key in asleep if key not in arriving and (placed := machine.pool.get(key)) is not None]
    claimed = Counter((place.drive, place.offset) for place in [*places, *found])
    assert not claimed or max(claimed.values()) == 1, "a slot on a drive has one owner"
    assert set(claimed) == machine.pool.taken(), "a slot on a drive is taken if, and only if, it has an owner"
    on_disk = {key for key, entry in resident.items() if entry.disk is not None} | set(asleep)
    assert set(machine.on_disk) | asked >= on_disk >= set(machine.on_disk), "the order of the drives has what is there"
    dirty = {key for key, e in resident.items() if e.disk is None and e.memory is not None}
    assert set(machine._dirty) == dirty, "what lies in memory only is to be written"
    aside = [key for key in machine.on_disk.aside if machine.on_disk.is_leaf(key)]
    assert all(map(machine._kept_on_disk, aside)), "what is set aside on the drives is kept there by something"
