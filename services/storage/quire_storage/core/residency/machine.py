"""The residency machine: events in, instructions out."""

from __future__ import annotations

from typing import assert_never

from quire_storage.core.pool.map import PoolMap
from quire_storage.core.pool.slots import SlotAllocator
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.contents import Contents
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.departures import Departures
from quire_storage.core.residency.evictions import CopyEvictions, ResidencySettings
from quire_storage.core.residency.memory import SlotReservations
from quire_storage.core.residency.pins import Pins
from quire_storage.core.residency.promotions import SlotPromotions
from quire_storage.core.residency.stores import StoreGoals
from quire_storage.core.residency.uploads import Uploads
from quire_storage.core.residency.writes import Writes


class Residency(Contents):
    """Decides the places of a node's copies, and their transitions. See `quire_storage.core.residency`."""

    def __init__(
        self, settings: ResidencySettings, arena: SlotAllocator, pool: PoolMap | None, *, objects: bool
    ) -> None:
        """Begin with the chunks on the drives.

        Args:
            settings: Watermarks.
            arena: Slots of memory.
            pool: Map of the drives; None for a node without drives.
            objects: Whether there is an object tier.
        """
        copies = Copies(arena, pool, objects=objects)
        self.departures = departures = Departures(copies)
        self.memory = memory = SlotReservations(copies, departures)
        pins = Pins(copies)
        super().__init__(copies, pins)
        self.promotions = SlotPromotions(copies, memory)
        self.writes = writes = Writes(copies, departures)
        self.uploads = uploads = Uploads(copies, writes)
        self.stores = stores = StoreGoals(
            copies, memory=memory, pins=pins, writes=writes, departures=departures, uploads=uploads
        )
        self.eviction = CopyEvictions(
            settings,
            copies,
            memory=memory,
            pins=pins,
            writes=writes,
            stores=stores,
            departures=departures,
            uploads=uploads,
        )

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Instruction]:
        """Return the instructions that follow from an event.

        Args:
            event: The event.
            now_s: The time, on the clock of `WakeAt`.
        """
        self.copies.now_s = now_s
        self._dispatch(event)
        self._apply_rules()
        return self.copies.out.take()

    def _apply_rules(self) -> None:
        """Apply the rules, in this order, until none has anything left to do."""
        copies, writes = self.copies, self.writes
        while True:
            self.stores.advance_ready()
            self.stores.admit_offers()
            writes.place_unplaced()
            writes.flush()
            self.eviction.trim()
            if self.memory.waiting:
                self.memory.serve()
                self.eviction.ask_for_memory()
            if not (writes.ready or copies.unblocked or copies.may_place):
                break
        writes.end_stop()

    def _dispatch(self, event: ev.Event) -> None:
        """Hand an event to the part that it concerns; the frequent ones come first."""
        match event:
            case ev.Pinned():
                self.pins.pinned(event)
            case ev.Unpinned():
                self.stores.offers.pop(event.ticket, None)
                self.pins.unpin(event.ticket)
                self.copies.ledger.unfollow(event.ticket)
            case ev.PromotionWanted():
                self.promotions.wanted(event)
            case ev.PromotionEnded():
                self.promotions.ended(event)
            case ev.PinnedAlso():
                self.pins.pinned_also(event)
            case ev.Reserved():
                self.memory.reserved(event)
            case ev.ReservationEnded():
                self.memory.ended(event)
            case ev.TransferUnsettled():
                self.memory.unsettled(event)
            case ev.Followed():
                self.memory.followed(event)
            case ev.StoreOffered():
                self.stores.offered(event)
            case ev.Indexed():
                self.stores.indexed(event)
            case ev.IndexingEnded():
                self.stores.indexing_ended(event)
            case ev.RegistrationWanted():
                self.stores.registration_wanted(event)
            case ev.LevelRaised():
                self.stores.level_raised(event)
            case ev.Listed():
                self.stores.listed(event)
            case ev.Loaded():
                self.promotions.loaded(event)
            case ev.Written():
                self.writes.written(event)
            case ev.WriteFailed():
                self.writes.write_failed(event)
            case ev.DriveLost():
                self.writes.drive_lost(event)
            case ev.Stopping():
                self.writes.stop(event)
            case ev.Forgotten():
                self.departures.forgotten(event)
            case ev.Dropped():
                self.departures.dropped(event)
            case ev.Hidden():
                self.departures.hidden(event)
            case ev.Lost():
                self.departures.lost(event)
            case ev.Denied():
                self.departures.denied(event)
            case ev.Withdrawn():
                self.departures.acknowledged(event.keys)
            case ev.Answered():
                self.eviction.answered(event)
            case ev.EvictionWanted():
                self.eviction.wanted(event)
            case ev.Uploaded():
                self.uploads.uploaded(event)
            case ev.TimePassed():
                pass  # the rules look at the time
            case _:
                assert_never(event)
