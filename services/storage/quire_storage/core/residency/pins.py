"""Readers, and the copies that they pin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quire_storage.core.residency import events as ev
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.entry import Entry, Phase


class Pins:
    """Pins by ticket of the holder.

    Attributes:
        holders: Pinned copies of each holder; a copy appears once for each pin.
        used: Holders whose copies count as used when they are unpinned.
        hits: Chunks that readers found, by tier.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.holders: dict[int, list[Entry]] = {}
        self.used: set[int] = set()
        self.hits: Counter[str] = Counter()

    def pinned(self, event: ev.Pinned) -> None:
        """Pin the chunks of a reader that are here."""
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
        self.pin(event.ticket, hits)
        if event.used:
            self.used.add(event.ticket)
        self._copies.out.append(ev.Complete(event.ticket, ([entry.as_copy() for entry in hits], absent)))

    def pinned_also(self, event: ev.PinnedAlso) -> None:
        """Pin one more copy for a holder."""
        self.pin(event.ticket, [self._copies.by_number[event.number]])

    def pin(self, ticket: int, entries: Iterable[Entry]) -> None:
        """Pin copies for a holder."""
        pinned = self.holders.setdefault(ticket, [])
        for entry in entries:
            entry.pins += 1
            pinned.append(entry)

    def unpin(self, ticket: int) -> None:
        """Give back the pins of a holder."""
        entries = self.holders.pop(ticket, ())
        if ticket in self.used:
            self.used.discard(ticket)
            self._copies.touch(entries)  # not before: until now they stayed anyway
        in_order = not (self._copies.in_memory.has_aside or self._copies.on_disk.has_aside)
        for entry in entries:
            entry.pins -= 1
            assert entry.pins >= 0, "a pin is given back once"
            if in_order and entry.memory is not None and entry.phase is Phase.RESIDENT:
                continue  # it stays as it is, and none waits for its turn
            self._copies.rest(entry)

    def check(self) -> None:
        """Assert that copies count their holders. For tests."""
        pins = Counter(entry.number for entries in self.holders.values() for entry in entries)
        for entry in self._copies.by_number.values():
            assert entry.pins == pins[entry.number], f"{entry.key.hex()}: {pins[entry.number]} hold it"
