"""Readers: copies that they pin, and chunks that they wait for from the object tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire_storage.core.chunks import MemoryPlace
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.memory import SlotReservations


@dataclass(slots=True)
class AwaitingFetch:
    """A holder that waits for chunks of the object tier.

    Attributes:
        event: The request.
        entries: Copies that are here.
        pending: Keys that are being fetched.
    """

    event: ev.Pinned
    entries: list[Entry]
    pending: set[bytes]


class Pins:
    """Pins by ticket of the holder.

    Attributes:
        holders: Pinned copies of each holder; a copy appears once for each pin.
        used: Holders whose copies count as used when they are unpinned.
        awaiting: Holders that wait for the object tier.
        fetching: Holders that wait for each key, in order.
        hits: Chunks that readers found, by tier.
    """

    def __init__(self, copies: Copies, memory: SlotReservations) -> None:
        self._copies = copies
        self._memory = memory
        self.holders: dict[int, list[Entry]] = {}
        self.used: set[int] = set()
        self.awaiting: dict[int, AwaitingFetch] = {}
        self.fetching: dict[bytes, list[int]] = {}
        self.hits: Counter[str] = Counter()

    def pinned(self, event: ev.Pinned) -> None:
        """Pin the chunks of a reader; ask for those that only the object tier has."""
        hits, absent = [], []
        for key in event.keys:
            entry = self._copies.entries.get(key)
            if entry is None or entry.phase is not Phase.RESIDENT:
                entry = self._copies.find_resident(key)
            if entry is not None:
                hits.append(entry)
            else:
                absent.append(key)
        if event.used:
            in_memory = sum(1 for entry in hits if entry.memory is not None)
            self.hits.update(memory=in_memory, disk=len(hits) - in_memory, object=len(absent))
        if not (absent and event.fetch and self._copies.objects):
            self._complete(event, hits, absent)
            return
        for entry in hits:
            entry.awaited += 1
        self.awaiting[event.ticket] = AwaitingFetch(event, hits, set(absent))
        requested = [key for key in absent if key not in self.fetching]
        for key in absent:
            self.fetching.setdefault(key, []).append(event.ticket)
        if requested:
            self._copies.out.append(ev.Fetch(requested))

    def pinned_also(self, event: ev.PinnedAlso) -> None:
        """Pin one more copy for a holder."""
        self.pin(event.ticket, [self._copies.by_number[event.number]])

    def pin(self, ticket: int, entries: Iterable[Entry]) -> None:
        """Pin copies for a holder."""
        pinned = self.holders.setdefault(ticket, [])
        for entry in entries:
            entry.pins += 1
            pinned.append(entry)

    def unpinned(self, ticket: int) -> None:
        """End all that a holder holds or waits for."""
        awaiting = self.awaiting.pop(ticket, None)
        if awaiting is not None:
            for entry in awaiting.entries:
                entry.awaited -= 1
                self._copies.rest(entry)
        self.unpin(ticket)

    def unpin(self, ticket: int) -> None:
        """Give back the pins of a holder."""
        entries = self.holders.pop(ticket, ())
        if ticket in self.used:
            self.used.discard(ticket)
            self._copies.touch(entries)  # not before: until now they stayed anyway
        for entry in entries:
            entry.pins -= 1
            assert entry.pins >= 0, "a pin is given back once"
            self._copies.rest(entry)

    def fetched(self, event: ev.Fetched) -> None:
        """Use the bytes that arrived, unless the same are here by now; other ones serve the waiting readers only."""
        copies, key = self._copies, event.chunk.key
        entry = copies.find(key)
        if entry is None or not entry.chunk.same_content(event.chunk):
            phase = Phase.RESIDENT if entry is None else Phase.LEAVING
            entry = copies.add(event.chunk, event.level, phase)
            copies.note_arrival(entry)
            self._memory.give(event.offset, event.transfer, entry)
            entry.memory = MemoryPlace(event.offset, copies.ledger.slots.layer_stride(event.chunk.shape))
            entry.in_object = entry.written = True
            if phase is Phase.RESIDENT:
                copies.enter_orders([entry])
        self._arrived(key, entry)

    def fetch_failed(self, event: ev.FetchFailed) -> None:
        """Go on without a chunk that the object tier did not deliver."""
        self._arrived(event.key, self._copies.find_resident(event.key))

    def check(self) -> None:
        """Assert that copies count their holders. For tests."""
        pins = Counter(entry.number for entries in self.holders.values() for entry in entries)
        awaited = Counter(entry.number for awaiting in self.awaiting.values() for entry in awaiting.entries)
        for entry in self._copies.by_number.values():
            counted = (pins[entry.number], awaited[entry.number])
            assert (entry.pins, entry.awaited) == counted, f"{entry.key.hex()}: {counted} hold it or wait for it"

    def _arrived(self, key: bytes, entry: Entry | None) -> None:
        for ticket in self.fetching.pop(key, ()):
            awaiting = self.awaiting.get(ticket)
            if awaiting is None:
                continue
            awaiting.pending.discard(key)
            if entry is not None:
                entry.awaited += 1
                awaiting.entries.append(entry)
            if not awaiting.pending:
                del self.awaiting[ticket]
                self._serve(awaiting)
        if entry is not None:
            self._copies.rest(entry)

    def _serve(self, awaiting: AwaitingFetch) -> None:
        """Pin the copies that a holder has waited for."""
        for entry in awaiting.entries:
            entry.awaited -= 1
        alive = [entry for entry in awaiting.entries if entry.memory is not None or entry.disk is not None]
        by_key, keys = {entry.key: entry for entry in alive}, awaiting.event.keys
        ordered = [by_key[key] for key in keys if key in by_key]
        self._complete(awaiting.event, ordered, [key for key in keys if key not in by_key])
        for entry in awaiting.entries:
            self._copies.rest(entry)

    def _complete(self, event: ev.Pinned, entries: Sequence[Entry], absent: Sequence[bytes]) -> None:
        self.pin(event.ticket, entries)
        if event.used:
            self.used.add(event.ticket)
        self._copies.out.append(ev.Complete(event.ticket, ([entry.as_copy() for entry in entries], absent)))
