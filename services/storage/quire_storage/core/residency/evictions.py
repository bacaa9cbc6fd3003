"""Last copies that leave the drives, or memory where there are none: chosen by rank, confirmed by the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from quire_storage.core.eviction import LeafArc
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.departures import Departures
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.goals import RANK
from quire_storage.core.residency.memory import SlotReservations
from quire_storage.core.residency.pins import Pins
from quire_storage.core.residency.slab_victims import SlabVictims
from quire_storage.core.residency.stores import StoreGoals
from quire_storage.core.residency.uploads import Uploads
from quire_storage.core.residency.writes import RETRY_S, Writes

GROUP: Final = 256
"""Chunks that are asked for together."""
_PAUSE_S_MAX: Final = 30.0
_TRIM: Final = ev.EvictionWanted(0, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySettings:
    """High and low watermark of the pool, as shares of its capacity."""

    pool_high_share: float = 0.95
    pool_low_share: float = 0.90


@dataclass(slots=True)
class EvictionQuestion:
    """A question to the index: may these copies be evicted?

    Attributes:
        entries: The copies.
        tier: The order that they were taken from.
        of_object: The object tier has them.
        ticket: Of a policy that wants them evicted; 0 for none.
    """

    entries: list[Entry]
    tier: LeafArc
    of_object: bool
    ticket: int = 0


class CopyEvictions:
    """Asks the index for copies that may be evicted, and evicts those that it releases.

    Attributes:
        questions: Questions without an answer, by number.
        asking: Numbers of those that no policy has asked.
    """

    def __init__(
        self,
        settings: ResidencySettings,
        copies: Copies,
        *,
        memory: SlotReservations,
        pins: Pins,
        writes: Writes,
        stores: StoreGoals,
        departures: Departures,
        uploads: Uploads,
    ) -> None:
        self._settings = settings
        self._copies = copies
        self._memory = memory
        self._pins = pins
        self._writes = writes
        self._stores = stores
        self._departures = departures
        self._uploads = uploads
        self._out = copies.out
        self._slabs = SlabVictims(copies.on_disk, copies.pool)
        self.questions: dict[int, EvictionQuestion] = {}
        self.asking: set[int] = set()
        self._trimming = False
        self._refused, self._pause_s, self._trim_at_s = 0, RETRY_S, 0.0
        self._asked_min = 1

    def wanted(self, event: ev.EvictionWanted) -> None:
        """Ask for copies that a policy wants evicted."""
        copies = self._copies
        candidates = (copies.find_resident(key) for key in dict.fromkeys(event.keys))
        entries = [entry for entry in candidates if entry is not None and not copies.is_busy(entry.key)]
        if event.keepers:  # a copy that was raised since is more than the keepers have
            raised = [entry for entry in entries if RANK[entry.level] > RANK[event.level]]
            entries = [entry for entry in entries if entry not in raised]
            for entry in raised:
                copies.rest(entry)
        for entry in entries:
            copies.in_memory.remove(entry.key)
            copies.on_disk.remove(entry.key)
        if entries:
            tier = copies.on_disk if copies.pool is not None else copies.in_memory
            self._ask(entries, tier, False, event)
        else:
            self._out.append(ev.Complete(event.ticket, 0))

    def answered(self, event: ev.Answered) -> None:
        """Evict the copies that the index has released; the others stay."""
        copies, question = self._copies, self.questions.pop(event.question)
        self.asking.discard(event.question)
        evicted = list[Entry]()
        for entry in question.entries:
            was_asked, entry.question = entry.question, 0
            if entry.phase is Phase.LEAVING:
                self._departures.acknowledged([entry.key] if was_asked else [])
                copies.rest(entry)
            elif entry.key in event.out:
                evicted.append(entry)
            else:
                self._stay(entry, question, refused=event.refused)
                self._slabs.refused()
        self._departures.leave(evicted)
        copies.evictions["disk" if question.tier is copies.on_disk else "memory"] += len(evicted)
        if question.ticket:
            self._out.append(ev.Complete(question.ticket, len(evicted)))
        elif evicted:
            self._refused, self._pause_s, self._asked_min = 0, RETRY_S, 1
        else:
            self._asked_min = min(GROUP, 2 * self._asked_min) if event.refused else 1
            self._count_refused(question)
        copies.unblocked = True

    def trim(self) -> None:
        """Rule: ask for the copies that are to leave the drives, a group at a time."""
        copies, pool, unplaced = self._copies, self._copies.pool, self._writes.unplaced
        self._release(copies.spared.end(copies.now_s))
        if pool is None or (self.asking and not self._writes.stopping):
            return
        soon_free = bool(unplaced and copies.leaving_bytes) and self._space_is_coming()
        if self._writes.stopping:
            if not soon_free and not (self.asking and copies.now_s < self._writes.stop_at_s):
                self._writes.give_up_unplaced()  # the index may have stopped first
            return
        if copies.now_s < self._trim_at_s:
            return
        capacity, used = pool.capacity_bytes, pool.used_bytes - copies.leaving_bytes
        if used > self._settings.pool_high_share * capacity:
            self._trimming = True
        excess = used - self._settings.pool_low_share * capacity if self._trimming else 0
        waiting_bytes = sum(write.lacking * write.shape.slot_bytes for write in unplaced)
        needed = max(excess, 0 if soon_free else waiting_bytes)
        self._trimming = excess > 0
        if needed <= 0:
            return
        victims = self._victims_on_disk(needed, for_unplaced=excess <= 0)
        while not victims and unplaced and not soon_free and self._release(copies.spared.end()):
            victims = self._victims_on_disk(needed, for_unplaced=excess <= 0)
        if victims:
            self._ask_for(victims, copies.on_disk)
            return
        self._trimming = False
        if not soon_free:
            self._writes.give_up_unplaced()

    def ask_for_memory(self) -> None:
        """Rule: without drives, ask for copies that are to leave memory, so that a reservation can be served."""
        copies = self._copies
        if copies.pool is not None or not self._memory.waiting or self.asking or copies.now_s < self._trim_at_s:
            return
        first = next(iter(self._memory.waiting.values()))
        needed = first.shape.slot_bytes * (first.count - copies.ledger.slots.available(first.shape))
        if needed <= 0:
            return
        victims = self._victims(copies.in_memory, self._is_kept, needed)
        if not victims and copies.in_memory.look_again():  # `SlotReservations.clear` leaves out what lies here alone
            victims = self._victims(copies.in_memory, self._is_kept, needed)
        while not victims and self._release(copies.spared.end()):
            victims = self._victims(copies.in_memory, self._is_kept, needed)
        if victims:
            self._ask_for(victims, copies.in_memory)

    def check(self) -> None:
        """Assert that copies know their questions. For tests."""
        for entry in self._copies.by_number.values():
            assert not entry.question or entry in self.questions[entry.question].entries, "its question has it"
        by_itself = {number for number, question in self.questions.items() if not question.ticket}
        assert self.asking == by_itself, "what it asked without a policy"

    def _ask(self, entries: Sequence[Entry], tier: LeafArc, of_object: bool, by: ev.EvictionWanted = _TRIM) -> None:
        number = self._copies.number()
        for entry in entries:
            entry.question = number
        self.questions[number] = EvictionQuestion(list(entries), tier, of_object, by.ticket)
        records = [entry.chunk.record for entry in entries]
        withdraws = of_object or by.keepers
        self._out.append(ev.AskToWithdraw(number, records, by.keepers) if withdraws else ev.AskToEvict(number, records))
        if not by.ticket:
            self.asking.add(number)

    def _ask_for(self, victims: Sequence[Entry], tier: LeafArc) -> None:
        in_object = [entry for entry in victims if entry.in_object]
        last = [entry for entry in victims if not entry.in_object]
        for group, of_object in ((last, False), (in_object, True)):
            if group:
                self._ask(group, tier, of_object)

    def _count_refused(self, question: EvictionQuestion) -> None:
        """Pause once the index has refused as many copies as the tier has."""
        self._refused += len(question.entries)
        if self._refused > len(question.tier):
            self._refused, self._asked_min = 0, 1
            self._writes.give_up_unplaced()
            self._trim_at_s = self._copies.now_s + self._pause_s
            self._pause_s = min(_PAUSE_S_MAX, 2 * self._pause_s)
            self._out.append(ev.WakeAt(self._trim_at_s))

    def _stay(self, entry: Entry, question: EvictionQuestion, *, refused: bool) -> None:
        """Keep a copy: it is leased, or extended by others; or the object tier does not have it after all."""
        if question.of_object and entry.in_object:
            entry.in_object = False
            self._uploads.start(entry)
        copies, tier = self._copies, question.tier
        place = entry.disk if tier is copies.on_disk else entry.memory
        is_policy = bool(question.ticket)
        if not is_policy and place is not None and entry.key not in tier:
            tier.put_back(*entry.in_order())
            if refused:
                copies.spared.refused(entry.key, copies.now_s)
        copies.enter_orders([entry])
        if is_policy:  # it was in no order meanwhile
            tier.touch(entry.key)
        copies.rest(entry)

    def _space_is_coming(self) -> bool:
        """Return whether space on the drives will be freed without an eviction.

        Stores may wait for space that they hold.
        """
        if self._departures.removals:
            return True
        holders = self._pins.holders
        by_stores = Counter(entry for ticket in self._stores.goals for entry in holders.get(ticket, ()))
        held_bytes = sum(entry.chunk.slot_bytes for entry, pins in by_stores.items() if entry.held_only_by(pins))
        return self._copies.leaving_bytes > held_bytes

    def _release(self, keys: Sequence[bytes]) -> bool:
        """Look at copies again that are spared no more, the last one first; whether there are any."""
        for key in keys:
            self._copies.in_memory.release(key)
            self._copies.on_disk.release(key)
        return bool(keys)

    def _victims_on_disk(self, needed: float, *, for_unplaced: bool) -> list[Entry]:
        copies, unplaced = self._copies, self._writes.unplaced
        victims: list[Entry] = []
        if for_unplaced and unplaced:
            shape = unplaced[0].shape
            lacking = sum(write.lacking for write in unplaced if write.shape == shape)
            count = max(lacking, self._asked_min)
            victims = self._woken(self._slabs.victims(shape, count, copies.is_kept_on_disk, GROUP))
        return victims or self._victims(copies.on_disk, copies.is_kept_on_disk, needed)

    def _victims(self, tier: LeafArc, is_kept: Callable[[bytes], bool], needed: float) -> list[Entry]:
        victims, size = list[Entry](), 0
        while (size < needed or len(victims) < self._asked_min) and len(victims) < GROUP:
            key = tier.evict(is_kept)
            if key is None:
                break
            victims += self._woken([key])
            size += victims[-1].chunk.slot_bytes
        return victims

    def _woken(self, keys: Iterable[bytes]) -> list[Entry]:
        """Return the copies of keys that were in an order: they can be read."""
        entries = [self._copies.find_resident(key) for key in keys]
        return [entry for entry in entries if entry is not None]

    def _is_kept(self, key: bytes) -> bool:
        return key in self._copies.spared or self._copies.entries[key].is_used
