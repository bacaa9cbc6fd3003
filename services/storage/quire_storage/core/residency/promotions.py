"""Slots into which chunks on a drive, or of the object tier, are read to stay in memory afterwards."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from quire.model.durability import Durability
from quire_storage.core.chunks import MemoryPlace
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.memory import SlotReservations

_RECENT_MAX: Final = 65_536
_CROWDED: Final = 0.8


@dataclass(slots=True)
class PromotedSlots:
    """Slots of a promotion, shared by its holders.

    Attributes:
        places: Copies and their slots, by the number of the copy.
        holders: Tickets of the deliveries that read into them.
    """

    places: dict[int, tuple[Entry, MemoryPlace]]
    holders: set[int]


class SlotPromotions:
    """Promotions that are under way, by number."""

    def __init__(self, copies: Copies, memory: SlotReservations) -> None:
        self._copies = copies
        self._memory = memory
        self.running: dict[int, PromotedSlots] = {}
        self.recent: OrderedDict[bytes, None] = OrderedDict()

    def wanted(self, event: ev.PromotionWanted) -> None:
        """Answer with a slot for each copy that should stay in memory, as far as there are slots."""
        answer: dict[int, tuple[int, MemoryPlace]] = {}
        groups: dict[Shape, list[Entry]] = {}
        for number in event.numbers:
            entry = self._copies.by_number[number]
            if entry.promotion:
                shared = self.running[entry.promotion]
                shared.holders.add(event.ticket)
                answer[number] = (entry.promotion, shared.places[number][1])
            elif entry.phase is not Phase.RESIDENT or entry.memory is not None:
                continue
            elif event.prefetch or self._should_stay(entry):
                groups.setdefault(entry.chunk.shape, []).append(entry)
        for shape, entries in groups.items():
            self._memory.clear(shape, len(entries))
            promotion = self._copies.number()
            offsets = self._copies.ledger.take(shape, len(entries), promotion)
            if not offsets:
                continue
            stride = self._copies.ledger.slots.layer_stride(shape)
            places = {
                entry.number: (entry, MemoryPlace(offset, stride))
                for entry, offset in zip(entries, offsets, strict=False)
            }
            for number, (entry, place) in places.items():
                entry.promotion = promotion
                answer[number] = (promotion, place)
            self.running[promotion] = PromotedSlots(places, {event.ticket})
        self._copies.out.append(ev.Complete(event.ticket, answer))

    def ended(self, event: ev.PromotionEnded) -> None:
        """Hand the slots to copies that were read whole; free the others once no holder is left."""
        promotion = self.running[event.promotion]
        promotion.holders.discard(event.ticket)
        if event.complete:
            for number, (entry, place) in list(promotion.places.items()):
                if entry.phase is Phase.RESIDENT and entry.memory is None:
                    del promotion.places[number]
                    self._copies.ledger.move(place.offset, event.promotion, number)
                    entry.memory = place
                    entry.promotion = 0
                    self._copies.enter_orders([entry])
                    self._copies.rest(entry)
        if not promotion.holders:
            del self.running[event.promotion]
            for entry, place in promotion.places.values():
                self._copies.ledger.free([place.offset], event.promotion)
                entry.promotion = 0
                self._copies.rest(entry)

    def loaded(self, event: ev.Loaded) -> None:
        """Keep a chunk that was read whole. If a store has brought it since, the slot stays the load's."""
        copies = self._copies
        entry = copies.find(event.chunk.key)
        if entry is None:
            entry = copies.add(event.chunk, Durability.OBJECT, Phase.RESIDENT)
            copies.note_arrival(entry)
            entry.memory = MemoryPlace(event.offset, copies.ledger.slots.layer_stride(event.chunk.shape))
            self._memory.give(event.transfer, [entry])
            entry.in_object = entry.written = True
            copies.enter_orders([entry])
        copies.rest(entry)

    def owners(self) -> dict[int, int]:
        """Return the promotion that has each slot, by offset."""
        return {
            place.offset: number for number, promotion in self.running.items() for _, place in promotion.places.values()
        }

    def check(self) -> None:
        """Assert that copies know their promotions. For tests."""
        for entry in self._copies.by_number.values():
            is_consistent = not entry.promotion or entry.number in self.running[entry.promotion].places
            assert is_consistent, "it has a slot there"

    def _should_stay(self, entry: Entry) -> bool:
        """Return whether a copy that is read from a drive should stay in memory: read again, or there is space."""
        is_repeated = entry.key in self.recent or self._copies.in_memory.went_lately(entry.key)
        self.recent[entry.key] = None
        while len(self.recent) > _RECENT_MAX:
            self.recent.popitem(last=False)
        slots = self._copies.ledger.slots
        return is_repeated or slots.used_bytes + entry.chunk.shape.slot_bytes < _CROWDED * slots.capacity_bytes
