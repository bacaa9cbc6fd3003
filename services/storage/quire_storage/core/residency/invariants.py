"""Invariants of the residency machine. Each part checks itself; here is what several have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized

from quire.model.durability import Durability
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.machine import Residency


def under_way(machine: Residency) -> list[str]:
    """Return tables with entries that have not ended, with their sizes. For tests."""
    memory, pins, writes, departures = machine.memory, machine.pins, machine.writes, machine.departures
    tables: dict[str, Sized] = {
        "reservations": memory.waiting,
        "transfers": memory.transfers,
        "offers": machine.stores.offers,
        "goals": machine.stores.goals,
        "holders": pins.holders,
        "followers": machine.ledger.followed,
        "used": pins.used,
        "promotions": machine.promotions.running,
        "writes": writes.running,
        "rewrites": writes.rewrites,
        "removals": departures.removals,
        "removal_waits": departures.waits,
        "questions": machine.eviction.questions,
        "withdrawing": machine.copies.withdrawing,
        "leaving": machine.copies.leaving,
    }
    return [f"{name}: {len(table)}" for name, table in tables.items() if table]


def check(machine: Residency) -> None:
    """Walk over everything. For tests.

    Raises:
        AssertionError: The machine contradicts itself.
    """
    for part in (
        machine.copies,
        machine.pins,
        machine.writes,
        machine.stores,
        machine.promotions,
        machine.eviction,
    ):
        part.check()
    _check_memory(machine)
    _check_levels(machine)
    _check_drives(machine)


def _resident(machine: Residency) -> dict[bytes, Entry]:
    return {key: entry for key, entry in machine.copies.entries.items() if entry.phase is Phase.RESIDENT}


def _asked(machine: Residency) -> set[bytes]:
    return {entry.key for question in machine.eviction.questions.values() for entry in question.entries}


def _check_memory(machine: Residency) -> None:
    """Check that a slot has one owner, and that the order of memory is complete."""
    copies = machine.copies
    owners = {offset: ticket for ticket, offsets in machine.memory.transfers.items() for offset in offsets}
    owners |= {entry.memory.offset: entry.number for entry in copies.by_number.values() if entry.memory is not None}
    machine.ledger.check(owners | machine.promotions.owners())
    in_memory = {key for key, entry in _resident(machine).items() if entry.memory is not None}
    ordered = set(machine.in_memory)
    assert ordered | _asked(machine) >= in_memory >= ordered, "the order of memory has what is there"
    if machine.pool is not None or copies.objects:
        aside = [key for key in machine.in_memory.aside if machine.pool is not None or machine.in_memory.is_leaf(key)]
        unspared = (key for key in aside if key not in copies.spared)
        assert all(map(copies.is_kept_in_memory, unspared)), "what is set aside in memory is kept there by something"


def _check_levels(machine: Residency) -> None:
    listings = (machine.look(key) for key in list(machine.keys()))
    levels = {about[0].chunk.key: about[0].level for about in listings if about is not None}
    replicated = {key for key, level in levels.items() if level is Durability.REPLICATED}
    raised = {key for key, level in levels.items() if level is Durability.OBJECT}
    assert replicated <= machine.replicated.keys() <= replicated | raised, "what is to have another copy is known"


def _check_drives(machine: Residency) -> None:
    """Check that a place on a drive has one owner, and that the orders of the drives are complete."""
    copies, pool, running = machine.copies, machine.pool, machine.writes.running
    if pool is None:
        assert all(entry.disk is None for entry in copies.by_number.values()), "there are no drives"
        return
    failed = pool.failed_drives()
    places = [entry.disk for entry in copies.by_number.values() if entry.disk and entry.disk.drive not in failed]
    places += [place for write in running.values() for place in write.places if place.drive not in failed]
    asleep = [key for key in list(pool.keys()) if key not in copies.entries and key not in copies.leaving]
    arriving = {entry.key for write in running.values() for entry in write.entries}
    placed = [pool.get(key) for key in asleep if key not in arriving]
    places += [about.place for about in placed if about is not None]
    claimed = Counter((place.drive, place.offset) for place in places)
    assert not claimed or max(claimed.values()) == 1, "a slot on a drive has one owner"
    assert set(claimed) == pool.taken(), "a slot on a drive is taken if, and only if, it has an owner"
    resident, ordered = _resident(machine), set(machine.on_disk)
    on_disk = {key for key, entry in resident.items() if entry.disk is not None} | set(asleep)
    assert ordered | _asked(machine) >= on_disk >= ordered, "the order of the drives has what is there"
    dirty = {key for key, entry in resident.items() if entry.disk is None and entry.memory is not None}
    assert set(copies.dirty) == dirty, "what lies in memory only is to be written"
    aside = [key for key in machine.on_disk.aside if machine.on_disk.is_leaf(key)]
    assert all(map(copies.is_kept_on_disk, aside)), "what is set aside on the drives is kept there by something"
