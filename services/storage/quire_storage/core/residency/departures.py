"""Copies that leave: withdrawn from the index, unreadable, then off their drive, then gone."""

from __future__ import annotations

from collections.abc import Sequence

from quire.model.errors import QuireError
from quire_storage.core.chunks import Chunk, Placed
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.entry import Entry, Phase


class Departures:
    """Ends copies.

    Attributes:
        removals: Copies whose headers are being removed together, by the number of the removal.
        waits: Requests that wait for headers to be removed: ticket, numbers of copies, and the count to answer.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._out = copies.out
        self.removals: dict[int, list[Entry]] = {}
        self.waits: list[tuple[int, set[int], int]] = []

    # ---- the index

    def withdraw(self, entries: Sequence[Entry], *, hidden: bool = False) -> None:
        """Tell the index that this node does not hold copies. Until it acknowledges, no store of them is admitted.

        `hidden`: it keeps them.
        """
        if entries:
            self.withdraw_chunks([entry.chunk for entry in entries], hidden=hidden)
            for entry in entries:
                self._copies.set_generation(entry, 0)

    def withdraw_chunks(self, chunks: Sequence[Chunk], *, hidden: bool = False) -> None:
        """Tell the index that this node does not hold chunks, or keeps them `hidden`."""
        self._copies.withdrawing.update(chunk.key for chunk in chunks)
        self._out.append(ev.Withdraw([chunk.record for chunk in chunks], hidden))

    def denied(self, event: ev.Denied) -> None:
        """Withdraw what the index lists and this node has not."""
        entries, pool, leaving = self._copies.entries, self._copies.pool, self._copies.leaving
        absent = [
            record
            for record in event.records
            if record.key not in entries and not (pool is not None and record.key in pool and record.key not in leaving)
        ]
        for hidden in (False, True):
            records = [record for record in absent if (record.key in self._copies.on_retired) is hidden]
            if records:
                self._copies.withdrawing.update(record.key for record in records)
                self._out.append(ev.Withdraw(records, hidden))

    def acknowledged(self, keys: Sequence[bytes]) -> None:
        """The index has acknowledged these withdrawals; stores of the same keys may proceed."""
        withdrawing = self._copies.withdrawing
        for key in keys:
            withdrawing[key] -= 1
            if not withdrawing[key]:
                del withdrawing[key]
        self._copies.unblocked = True

    def hidden(self, event: ev.Hidden) -> None:
        """Withdraw a copy that stays readable here."""
        entry = self._copies.by_number.get(event.number)
        if entry is None or entry.phase is not Phase.RESIDENT:
            return
        if entry.generation and not self._copies.is_busy(entry.key):
            self.withdraw([entry], hidden=True)

    # ---- copies

    def leave(self, entries: Sequence[Entry]) -> None:
        """Make copies unreadable. They give up their places once nothing uses them."""
        copies, leaving = self._copies, list[Entry]()
        for entry in entries:
            if entry.phase is Phase.LEAVING:
                continue
            leaving.append(entry)
            entry.phase = Phase.LEAVING
            copies.detach(entry)
            copies.leaving[entry.key] += 1
            if entry.write:  # perhaps one that waits for space, which this copy does not need any more
                copies.left_writes.add(entry.write)
            if entry.question:  # the answer may end what lists the next copy of the key
                copies.withdrawing[entry.key] += 1
            copies.leave_orders(entry)
            if copies.objects and not entry.in_object:
                self._out.append(ev.CancelUpload(entry.key))
            copies.set_generation(entry, 0)
            copies.unblocked = True
        self.remove_headers(leaving)
        for entry in leaving:
            copies.rest(entry)

    def lost(self, event: ev.Lost) -> None:
        """End copies that failed verification in every tier."""
        candidates = (self._copies.by_number.get(number) for number in event.numbers)
        entries = [entry for entry in candidates if entry is not None and entry.phase is Phase.RESIDENT]
        self.withdraw(entries)
        self.leave(entries)

    def dropped(self, event: ev.Dropped) -> None:
        """End copies whose index entry has ended. An entry that is unknown decides nothing."""
        ended: list[Entry] = []
        for key, generation in event.generations.items():
            entry = self._copies.find_resident(key)
            if entry is None:
                continue
            if generation and generation == (entry.generation or entry.recorded):
                ended.append(entry)
            elif not entry.generation and entry.registering:
                entry.ended |= {generation}
            else:
                self._copies.rest(entry)
        self.leave(ended)
        by_number = self._copies.by_number
        pending = {entry.number for entry in ended if entry.number in by_number and (entry.write or entry.removal)}
        if pending:
            self.waits.append((event.ticket, pending, len(ended)))
        else:
            self._out.append(ev.Complete(event.ticket, len(ended)))

    # ---- headers

    def remove_headers(self, entries: Sequence[Entry]) -> None:
        """Remove the headers of leaving copies from their drives: only then may their places be used again."""
        on_drives = [entry for entry in entries if entry.disk is not None and not entry.write]
        if on_drives:
            number = self._copies.number()
            self.removals[number] = on_drives
            for entry in on_drives:
                self._copies.count_leaving(entry, 1)
                entry.removal = number
            placed = [Placed(entry.header(), entry.disk) for entry in on_drives if entry.disk is not None]
            self._out.append(ev.Forget(number, placed))

    def forgotten(self, event: ev.Forgotten) -> None:
        """The headers of leaving copies were removed, or could not be."""
        for entry in self.removals.pop(event.removal):
            entry.removal, entry.forgotten = 0, True
            self.off_drive(entry, event.error)
            self._copies.rest(entry)

    def off_drive(self, entry: Entry, error: QuireError | None = None) -> None:
        """Answer the requests that wait until a leaving copy is on no drive, or never will be."""
        waits, self.waits = self.waits, []
        for ticket, pending, count in waits:
            if error is not None and entry.number in pending:
                self._out.append(ev.Fail(ticket, error))
                continue
            pending.discard(entry.number)
            if pending:
                self.waits.append((ticket, pending, count))
            else:
                self._out.append(ev.Complete(ticket, count))
