"""Stores and registrations: from the offer of bytes to the acknowledgement."""

from __future__ import annotations

from collections import Counter

from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.admission import enter
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.departures import Departures
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.goals import RANK, Goal, Step
from quire_storage.core.residency.memory import SlotReservations
from quire_storage.core.residency.pins import Pins
from quire_storage.core.residency.uploads import Uploads
from quire_storage.core.residency.writes import Writes
from quire_storage.errors import DriveFailed


class StoreGoals:
    """Goals by ticket.

    Attributes:
        offers: Stores that wait for other stores of their keys, or for the index.
        goals: Stores, registrations and raises of level that are under way.
    """

    def __init__(
        self,
        copies: Copies,
        *,
        memory: SlotReservations,
        pins: Pins,
        writes: Writes,
        departures: Departures,
        uploads: Uploads,
    ) -> None:
        self._copies = copies
        self._memory = memory
        self._pins = pins
        self._writes = writes
        self._departures = departures
        self._uploads = uploads
        self._out = copies.out
        self.offers: dict[int, ev.StoreOffered] = {}
        self.goals: dict[int, Goal] = {}

    # ---- rules

    def advance_ready(self) -> None:
        """Rule: advance the goals one of whose writes has ended, in the order in which they have."""
        ready = self._writes.ready
        while ready:
            self._advance(ready.popleft())

    def admit_offers(self) -> None:
        """Rule: admit the stores that need not wait."""
        while self._copies.unblocked:
            self._copies.unblocked = False
            for ticket, event in list(self.offers.items()):
                if not any(self._copies.is_busy(chunk.key) for chunk in event.chunks):
                    del self.offers[ticket]
                    self._admit(event)

    # ---- stores

    def offered(self, event: ev.StoreOffered) -> None:
        """Queue a store."""
        self.offers[event.ticket] = event
        self._copies.unblocked = True

    def _admit(self, event: ev.StoreOffered) -> None:
        try:
            entries = enter(self._copies, self._memory, event)
        except QuireError as error:
            self._out.append(ev.Fail(event.ticket, error))
            return
        fresh = [entry for entry in entries if entry.phase is Phase.ARRIVING]
        self._pins.pin(event.ticket, entries)
        self.goals[event.ticket] = goal = Goal(event.ticket, entries, Step.PUBLISH, event.level, fresh)
        goal.generation, goal.within = event.generation, event.within
        self._raise_level(goal)

    def _raise_level(self, goal: Goal) -> None:
        """Bring the goal's chunks to its level: write those that are on no drive, and the headers that change."""
        changed = []
        for entry in goal.entries:
            raised = RANK[entry.level] < RANK[goal.level]
            if raised:
                entry.level = goal.level
                if entry.level is Durability.REPLICATED and entry.phase is Phase.RESIDENT:
                    self._copies.replicated[entry.key] = None
            if entry.disk is not None and (raised or entry.rewrites):  # the header that says so may be under way
                changed.append(entry)
        if changed:
            self._writes.write_headers(changed, [goal])
        self._advance(goal)

    def _advance(self, goal: Goal) -> None:
        """Take the next step of a goal that waits for nothing, after writing the copies that are on no drive.

        Its drive may just have failed.
        """
        if goal.pending or goal.registering or self.goals.get(goal.ticket) is not goal:
            return
        unwritten = self._unwritten(goal)
        pool = self._copies.pool
        if unwritten and pool is not None and not pool.working:
            goal.error, unwritten = DriveFailed("no drive is left", pool.failed_drives()), []
        if goal.error is not None and goal.step is not Step.ACKNOWLEDGE:
            self._fail(goal, goal.error)
            return
        if unwritten:
            self._writes.start_or_join(unwritten, goal)
        if not goal.pending:
            self._take(goal)

    def _unwritten(self, goal: Goal) -> list[Entry]:
        """Return the copies of a goal that have to be on a drive and are not."""
        if self._copies.pool is None or goal.level is Durability.MEMORY or goal.error is not None:
            return []
        entries = [entry for entry in goal.entries if entry.phase is not Phase.LEAVING]
        if goal.step is Step.ACKNOWLEDGE:  # registered copies may sleep, or be a later store's
            awake = self._copies.by_number
            entries = [entry for entry in entries if entry.phase is Phase.RESIDENT and entry.number in awake]
        return [entry for entry in entries if entry.disk is None and entry.memory is not None]

    def _take(self, goal: Goal) -> None:
        match goal.step:
            case Step.PUBLISH:
                self._publish(goal)
            case Step.ACKNOWLEDGE:
                self._acknowledge(goal)
            case Step.CONFIRM_LEVEL:
                self._confirm_level(goal)

    def _fail(self, goal: Goal, error: QuireError) -> None:
        """Keep nothing of a store."""
        del self.goals[goal.ticket]
        self._out.append(ev.Fail(goal.ticket, error))
        self._departures.withdraw([entry for entry in goal.fresh if entry.promised])
        self._departures.leave(goal.fresh)
        self._pins.unpin(goal.ticket)
        self._copies.unblocked = True

    def _publish(self, goal: Goal) -> None:
        """Make a store's copies readable, and register them: they are as durable as this node can make them."""
        for entry in goal.fresh:
            entry.phase, entry.provisional = Phase.RESIDENT, True
        self._copies.enter_orders(goal.fresh)
        self._register(goal)

    # ---- registrations

    def _register(self, goal: Goal, *, patient: bool = True) -> None:
        goal.step = Step.ACKNOWLEDGE
        goal.entries = [awake for entry in goal.entries if (awake := self._awake(entry)) is not None]
        for entry in goal.entries:
            entry.registering += 1
        goal.registering = True
        records = [entry.chunk.record for entry in goal.entries]
        within = [goal.within.get(entry.key, 0) for entry in goal.entries] if goal.within else []
        self._out.append(ev.Register(goal.ticket, records, patient, goal.generation, within, goal.in_object))

    def _awake(self, entry: Entry) -> Entry | None:
        """Look a copy up again: if the client disconnected, nothing pins it, and it may sleep or be evicted."""
        if entry.number in self._copies.by_number:
            return entry
        return None if self._copies.is_busy(entry.key) else self._copies.find_resident(entry.key)

    def registration_wanted(self, event: ev.RegistrationWanted) -> None:
        """Register copies that the index was seen not to list, or to list with the object tier alone."""
        candidates = (self._copies.find(key) for key in event.keys)
        entries = [entry for entry in candidates if entry is not None and not self._copies.is_busy(entry.key)]
        if event.in_object:  # what was stored since is listed, or on its way to be
            for entry in [entry for entry in entries if entry.generation]:
                entries.remove(entry)
                self._copies.rest(entry)
        for entry in entries if not event.within else ():
            self._copies.set_generation(entry, 0)
        self._pins.pin(event.ticket, entries)
        self.goals[event.ticket] = goal = Goal(event.ticket, entries, Step.ACKNOWLEDGE)
        goal.within, goal.in_object = event.within, event.in_object
        self._register(goal, patient=event.patient)

    def indexed(self, event: ev.Indexed) -> None:
        """The index lists this node for copies of a goal."""
        goal = self.goals[event.ticket]
        registered = {entry.key: entry for entry in goal.entries}
        outdated, listings = list[Entry](), list[tuple[Entry, int]]()
        for key, generation in event.generations.items():
            entry = registered[key]
            if entry.phase is Phase.LEAVING:
                outdated += self._listed_too_late(entry, generation, in_object=goal.in_object)
            elif generation not in entry.ended:
                if entry.disk is not None and entry.recorded != generation:
                    outdated.append(entry)
                listings.append((entry, generation))
        self._list(listings, in_object=goal.in_object)
        if outdated:  # after a restart the header alone tells which deletions concern the copy
            self._writes.write_headers(outdated, [] if goal.level is Durability.MEMORY else [goal])

    def _listed_too_late(self, entry: Entry, generation: int, *, in_object: bool) -> list[Entry]:
        """The copy was removed while its registration was in flight.

        Returns:
            A copy whose header has to name the index entry.
        """
        copies = self._copies
        current = copies.entries.get(entry.key)
        if current is None:
            asleep = copies.pool is not None and entry.key in copies.pool and entry.key not in copies.leaving
            if not asleep:
                self._departures.withdraw([entry])
        elif current.phase is Phase.ARRIVING:
            current.promised = True
        elif not current.generation and entry.key not in copies.withdrawing:
            outdated = [current] if current.disk is not None and current.recorded != generation else []
            self._list([(current, generation)], in_object=in_object)
            return outdated
        return []

    def listed(self, event: ev.Listed) -> None:
        """The index was found to list copies that seemed not to be listed."""
        outdated = []
        for key, generation in event.generations.items():
            entry = self._copies.find_resident(key)
            if entry is None:
                continue
            if not entry.generation and not entry.registering and not self._copies.is_busy(key):
                if entry.disk is not None and entry.recorded != generation:
                    outdated.append(entry)
                self._list([(entry, generation)])
            self._copies.rest(entry)
        if outdated:
            self._writes.write_headers(outdated)

    def _list(self, listings: list[tuple[Entry, int]], *, in_object: bool = False) -> None:
        self._copies.set_generations(listings)
        for entry, _ in listings:
            entry.provisional, entry.in_object = False, entry.in_object or in_object
            self._uploads.start(entry)

    def indexing_ended(self, event: ev.IndexingEnded) -> None:
        """No more answers of the index arrive for a goal."""
        goal = self.goals[event.ticket]
        refused = list[Entry]()
        for entry in goal.entries:
            entry.registering -= 1
            if not entry.registering:
                entry.ended = frozenset()
                if entry.provisional and entry.phase is Phase.RESIDENT:
                    refused.append(entry)
        self._departures.withdraw(refused)  # an answer that was lost, or one for a copy before it, may have listed them
        self._departures.leave(refused)
        goal.error = goal.error or event.error
        goal.registering = False
        self._copies.unblocked = True
        self._advance(goal)
        if goal.pending:  # headers that have to name the index entry are being written, of some of them
            for entry in goal.entries:
                self._copies.rest(entry)

    def _acknowledge(self, goal: Goal) -> None:
        """End a registration. The caller looks once more at the chunks of a store (`Contents.acknowledged`)."""
        del self.goals[goal.ticket]
        if goal.error is not None:
            self._out.append(ev.Fail(goal.ticket, goal.error))
        else:
            self._copies.spared.registered(goal.entries if goal.fresh else (), self._copies.now_s)
            self._out.append(ev.Complete(goal.ticket, goal.listed()))
        for entry in goal.entries:
            self._copies.rest(entry)

    def check(self) -> None:
        """Assert that copies count their registrations. For tests."""
        counts = Counter(entry.number for goal in self.goals.values() if goal.registering for entry in goal.entries)
        for entry in self._copies.by_number.values():
            assert entry.registering == counts[entry.number], f"{entry.key.hex()}: it is being registered"

    # ---- levels

    def level_raised(self, event: ev.LevelRaised) -> None:
        """Bring copies to a higher level of durability."""
        resident = (self._copies.find_resident(key) for key in event.keys)
        entries = [entry for entry in resident if entry is not None and not entry.question]  # those may be leaving
        self._pins.pin(event.ticket, entries)
        goal = self.goals[event.ticket] = Goal(event.ticket, entries, Step.CONFIRM_LEVEL, event.level)
        self._raise_level(goal)

    def _confirm_level(self, goal: Goal) -> None:
        del self.goals[goal.ticket]
        resident = [entry for entry in goal.entries if entry.phase is Phase.RESIDENT]
        safe = [entry.key for entry in resident if self._copies.pool is None or entry.disk is not None]
        self._out.append(ev.Complete(goal.ticket, safe))
        self._pins.unpin(goal.ticket)
