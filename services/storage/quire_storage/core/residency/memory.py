"""Slots of the arena: reserved for transfers, given to copies, and cleared of copies that are stored elsewhere too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.model.errors import PoolFull
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.departures import Departures
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.ledger import QUARANTINED

_SLABS_TRIED: Final = 64


class SlotReservations:
    """Slots for transfers.

    Attributes:
        waiting: Transfers that wait for slots, by ticket, in order.
        transfers: Offsets of the slots that a transfer has, by ticket.
    """

    def __init__(self, copies: Copies, departures: Departures) -> None:
        self._copies = copies
        self._departures = departures
        self.waiting: dict[int, ev.Reserved] = {}
        self.transfers: dict[int, set[int]] = {}

    def reserved(self, event: ev.Reserved) -> None:
        """Queue a transfer for slots; refuse more than there are."""
        slots = self._copies.ledger.slots
        exceeds = event.count > slots.capacity(event.shape)
        is_possible = event.patient or (not self.waiting and self.clear(event.shape, event.count))
        if exceeds or not is_possible:
            message = f"no memory for {event.count} chunks of {event.shape.bytes} bytes ({slots.used_bytes} in use)"
            self._copies.out.append(ev.Fail(event.ticket, PoolFull(message)))
        elif event.patient:
            self.waiting[event.ticket] = event
        else:
            self._take(event)

    def _take(self, event: ev.Reserved) -> None:
        offsets = self._copies.ledger.take(event.shape, event.count, event.ticket)
        self.transfers[event.ticket] = set(offsets)
        self._copies.out.append(ev.Complete(event.ticket, offsets))

    def serve(self) -> None:
        """Rule: give slots to the transfers that wait, as far as there are any."""
        for ticket, reserved in list(self.waiting.items()):
            if self.clear(reserved.shape, reserved.count):
                del self.waiting[ticket]
                self._take(reserved)

    def ended(self, event: ev.ReservationEnded) -> None:
        """Free the slots of a transfer that no copy has taken over."""
        self.waiting.pop(event.ticket, None)
        self._copies.ledger.free(self.transfers.pop(event.ticket, ()), event.ticket)

    def unsettled(self, event: ev.TransferUnsettled) -> None:
        """Quarantine the slots of a transfer that no copy has taken over."""
        for offset in self.transfers.pop(event.ticket, ()):
            self._copies.ledger.move(offset, event.ticket, QUARANTINED)

    def followed(self, event: ev.Followed) -> None:
        """Keep slots of a running store for a reader: those that its transfer, or a copy of the chunk, still has."""
        ledger, copies, positions = self._copies.ledger, self._copies.by_number, list[int]()
        for at, (key, offset) in enumerate(zip(event.keys, event.offsets, strict=True)):
            owner = ledger.owner(offset)
            copy = copies.get(owner) if owner is not None else None
            if owner == event.transfer or (copy is not None and copy.key == key and copy.phase is not Phase.LEAVING):
                positions.append(at)
        if positions:
            ledger.follow([event.offsets[at] for at in positions], event.holder)
        self._copies.out.append(ev.Complete(event.ticket, positions))

    def give(self, transfer: int, entries: Sequence[Entry]) -> None:
        """Move the slots of copies from a transfer to the copies."""
        slots, ledger = self.transfers[transfer], self._copies.ledger
        for entry in entries:
            assert entry.memory is not None, "it has a slot"
            slots.remove(entry.memory.offset)
            ledger.move(entry.memory.offset, transfer, entry.number)

    def clear(self, shape: Shape, count: int) -> bool:
        """Return whether `count` slots of a shape are free, once copies that are stored elsewhere too gave up theirs.

        A slab of another shape is emptied whole or not at all: one slot less of it would not help.
        """
        copies, slots, skipped = self._copies, self._copies.ledger.slots, list[bytes]()
        if copies.pool is None and not copies.objects:  # nothing lies elsewhere too
            return slots.available(shape) >= count
        while slots.available(shape) < count and len(skipped) < _SLABS_TRIED:
            key = copies.in_memory.victim(copies.is_kept_in_memory)
            if key is None:
                break
            entry = copies.entries[key]
            assert entry.memory is not None, "what is in the order of memory has a place there"
            if entry.chunk.shape == shape:
                self._leave_memory(entry)
            elif not self._clear_slab(slots.slab_of(entry.memory.offset)):
                copies.in_memory.set_aside(key)
                skipped.append(key)
        for key in reversed(skipped):
            copies.in_memory.release(key)
        return slots.available(shape) >= count

    def _clear_slab(self, slab: int) -> bool:
        owners = self._copies.ledger.owners_in(slab)
        candidates = (self._copies.by_number.get(owner) for owner in owners)
        entries = [entry for entry in candidates if entry is not None]
        if len(entries) < len(owners):
            return False
        if any(entry.phase is not Phase.RESIDENT or self._copies.is_kept_in_memory(entry.key) for entry in entries):
            return False
        for entry in entries:
            self._leave_memory(entry)
        return True

    def _leave_memory(self, entry: Entry) -> None:
        """Give up the slot of a copy that is stored elsewhere too."""
        assert entry.memory is not None, "the caller saw a place"
        copies = self._copies
        copies.in_memory.evicted(entry.key)
        copies.ledger.free([entry.memory.offset], entry.number)
        entry.memory = None
        copies.dirty.pop(entry.key, None)
        copies.evictions["memory"] += 1
        if entry.disk is None:  # the object tier has it; this node does not any more
            self._departures.withdraw([entry])
        copies.rest(entry)
