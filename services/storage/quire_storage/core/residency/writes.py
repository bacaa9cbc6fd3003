"""Writes to the drives: chunks of stores, of the background flush, and headers that change."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from quire.model.durability import Durability
from quire.model.errors import PoolFull, QuireError
from quire_storage.core.chunks import Chunk, Placed
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.departures import Departures
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.goals import RANK, DriveWrite, Goal
from quire_storage.errors import DriveFailed

GROUP: Final = 64  # chunks that are written together
RETRY_S: Final = 0.5
_STOP_S: Final = 2.0
_WITHDRAWN_AT_ONCE: Final = 1024


class Writes:
    """Writes that have not ended.

    A goal whose last write has ended goes on the `ready` queue; `StoreGoals` advances it in its rule. So no part calls
    back into a part that has called it.

    Attributes:
        running: Writes of chunks, by number.
        rewrites: Writes of headers: copies, and goals that wait for them.
        unplaced: Writes that wait for space on the drives.
        ready: Goals one of whose writes has ended.
        flush_at_s: When the background flush may begin again after a failure.
        stopping: Ticket of the request to stop, which waits for the flush; 0 for none.
        stop_at_s: Until when it waits for an answer of the index.
    """

    def __init__(self, copies: Copies, departures: Departures) -> None:
        self._copies = copies
        self._departures = departures
        self._out = copies.out
        self.running: dict[int, DriveWrite] = {}
        self.rewrites: dict[int, tuple[list[Entry], Sequence[Goal]]] = {}
        self.unplaced: list[DriveWrite] = []
        self.ready: deque[Goal] = deque()
        self.flush_at_s = 0.0
        self.stopping, self.stop_at_s = 0, 0.0

    # ---- chunks

    def start(self, entries: Iterable[Entry], goal: Goal | None = None) -> None:
        """Write copies to the drives, those of one shape together; without a goal in the background."""
        groups: dict[Shape, list[Entry]] = {}
        for entry in entries:
            groups.setdefault(entry.chunk.shape, []).append(entry)
        for shape, group in groups.items():
            write = DriveWrite(self._copies.number(), shape, group, goal is None)
            self.running[write.number] = write
            for entry in group:
                entry.write = write.number
            if goal is not None:
                self._join(goal, write)
            self._place(write)

    def start_or_join(self, entries: Sequence[Entry], goal: Goal) -> None:
        """Write copies for a goal, or have it wait for the writes that have them already."""
        for entry in entries:
            if entry.write:
                self._join(goal, self.running[entry.write])
        self.start([entry for entry in entries if not entry.write], goal)

    def written(self, event: ev.Written) -> None:
        """A write of chunks or headers has ended well."""
        if event.write in self.rewrites:
            self._rewritten(event.write, None)
            return
        write = self.running.pop(event.write)
        copies = self._copies
        assert copies.pool is not None, "a drive was written to"
        failed = copies.pool.failed_drives()
        for entry, place in zip(write.entries, write.places, strict=True):
            entry.write = 0
            if place.drive not in failed:
                copies.put_on_drive(entry, place)
                copies.note_arrival(entry)
                if entry.phase is not Phase.LEAVING:  # else the key may have another copy, which is to be written
                    copies.dirty.pop(entry.key, None)
            if entry.phase is Phase.LEAVING and entry.disk is None:
                self._departures.off_drive(entry)
        self._departures.remove_headers([entry for entry in write.entries if entry.phase is Phase.LEAVING])
        copies.enter_orders([entry for entry in write.entries if entry.phase is Phase.RESIDENT])
        self._correct_headers(write)
        for entry in write.entries:
            copies.rest(entry)
        self._end(write.goals, write.number, None)

    def write_failed(self, event: ev.WriteFailed) -> None:
        """Write chunks elsewhere after a drive has failed, or give up."""
        if event.write in self.rewrites:
            self._rewritten(event.write, event.error)
            return
        write, pool = self.running[event.write], self._copies.pool
        assert pool is not None, "a drive was written to"
        self._copies.freed_places += pool.release(write.places)
        write.places, write.tries = [], write.tries + 1
        if isinstance(event.error, DriveFailed) and pool.working and write.tries < GROUP:
            self._place(write)
        else:
            self._give_up(write, event.error)

    def give_up_unplaced(self) -> None:
        """Fail the writes that wait for space."""
        unplaced, self.unplaced = self.unplaced, []
        for write in unplaced:
            size = len(write.entries) * write.shape.slot_bytes
            self._give_up(write, PoolFull(f"no space on the drives for {size} bytes, and nothing that may go"))

    def _join(self, goal: Goal, write: DriveWrite) -> None:
        if write.number not in goal.pending:
            goal.pending.add(write.number)
            write.goals.append(goal)

    def _place(self, write: DriveWrite) -> None:
        """Find places for a write and start it; without places it waits for them."""
        pool = self._copies.pool
        assert pool is not None, "only drives are written to"
        leaving = [entry for entry in write.entries if entry.phase is Phase.LEAVING]
        if leaving:  # since the write was begun: no drive needs them
            self._spare(write, leaving)
        if not write.entries:
            return
        places = pool.take(write.shape, len(write.entries))
        if len(places) < len(write.entries):
            pool.release(places)
            write.lacking = len(write.entries) - len(places)
            if write not in self.unplaced:
                self.unplaced.append(write)
            return
        write.places = places
        headers = write.headers = [entry.header() for entry in write.entries]
        sources = [entry.memory for entry in write.entries if entry.memory is not None]
        assert len(sources) == len(headers), "what is written lies in memory"
        placed = [Placed(header, place) for header, place in zip(headers, write.places, strict=True)]
        self._out.append(ev.Write(write.number, placed, sources))

    def _spare(self, write: DriveWrite, leaving: Sequence[Entry]) -> None:
        """Take leaving copies out of a write that has not begun."""
        write.entries = [entry for entry in write.entries if entry not in leaving]
        for entry in leaving:
            entry.write = 0
            self._departures.off_drive(entry)
            self._copies.rest(entry)
        if not write.entries:
            del self.running[write.number]
            self._end(write.goals, write.number, None)

    def _give_up(self, write: DriveWrite, error: QuireError) -> None:
        del self.running[write.number]
        for entry in write.entries:
            entry.write = 0
            if entry.phase is Phase.LEAVING:
                self._departures.off_drive(entry)
            self._copies.rest(entry)
        if write.background:
            self.flush_at_s = self._copies.now_s + RETRY_S
            self._out.append(ev.WakeAt(self.flush_at_s))
        self._end(write.goals, write.number, error)

    def _end(self, goals: Sequence[Goal], number: int, error: QuireError | None) -> None:
        for goal in goals:
            goal.pending.discard(number)
            goal.error = goal.error or error
            self.ready.append(goal)

    # ---- headers

    def write_headers(self, entries: Sequence[Entry], goals: Sequence[Goal] = ()) -> None:
        """Write the headers of copies on drives anew. Goals wait for it."""
        number = self._copies.number()
        for entry in entries:
            entry.rewrites += 1
        self.rewrites[number] = (list(entries), goals)
        for goal in goals:
            goal.pending.add(number)
        placed = [Placed(entry.header(), entry.disk) for entry in entries if entry.disk is not None]
        self._out.append(ev.WriteHeaders(number, placed))

    def _correct_headers(self, write: DriveWrite) -> None:
        """Rewrite outdated headers: their chunks were raised, or uploaded, during the write.

        Goals of a level above `local` wait, because after a restart the header alone says which it is.
        """
        pairs = zip(write.entries, write.headers, strict=True)
        outdated = [entry for entry, header in pairs if not entry.agrees_with(header)]
        stale = [entry for entry in outdated if entry.disk is not None and entry.phase is not Phase.LEAVING]
        if stale:
            self.write_headers(stale, [goal for goal in write.goals if RANK[goal.level] > RANK[Durability.LOCAL]])

    def _rewritten(self, number: int, error: QuireError | None) -> None:
        entries, goals = self.rewrites.pop(number)
        for entry in entries:
            entry.rewrites -= 1
            self._copies.rest(entry)
        self._end(goals, number, None if isinstance(error, DriveFailed) else error)  # it is written elsewhere now

    # ---- drives

    def drive_lost(self, event: ev.DriveLost) -> None:
        """End the copies of a drive, except for those that are in memory too. They may come back with it: hide them."""
        copies, asleep = self._copies, list[Chunk]()
        assert copies.pool is not None, "there was a drive"
        awake = [
            entry for entry in copies.by_number.values() if entry.disk is not None and entry.disk.drive == event.drive
        ]
        for placed in copies.pool.fail(event.drive):
            key = placed.header.chunk.key
            generation, in_object = copies.pool.listing(placed.place)
            copies.on_retired[key] = generation or placed.header.generation
            if in_object:
                copies.retired_in_objects.add(key)
            entry = copies.entries.get(key)
            if entry is not None and entry.disk is None:  # in memory; its write has not ended
                continue
            copies.on_disk.remove(key)
            copies.namespaces.left(placed.header.chunk)
            copies.replicated.pop(key, None)
            if key not in copies.entries and key not in copies.leaving:
                generation, in_object = copies.pool.listing(placed.place)
                copies.count_listed(key, generation, -1)
                asleep.append(placed.header.chunk)
                if copies.objects and not in_object:
                    self._out.append(ev.CancelUpload(key))
        for at in range(0, len(asleep), _WITHDRAWN_AT_ONCE):
            self._departures.withdraw_chunks(asleep[at : at + _WITHDRAWN_AT_ONCE], hidden=True)
        for entry in awake:
            copies.count_leaving(entry, -1)
            copies.put_on_drive(entry, None)
            if entry.phase is Phase.RESIDENT:
                if entry.memory is not None:
                    copies.note_arrival(entry)  # a scan took it to be on a drive, and may not have come there
                    copies.enter_orders([entry])
                else:
                    self._departures.withdraw([entry], hidden=True)
                    self._departures.leave([entry])
            copies.rest(entry)

    def check(self) -> None:
        """Assert that copies know their writes. For tests."""
        rewrites = Counter(entry.number for entries, _ in self.rewrites.values() for entry in entries)
        for entry in self._copies.by_number.values():
            assert entry.rewrites == rewrites[entry.number], f"{entry.key.hex()}: its headers are being written"
            assert not entry.write or entry in self.running[entry.write].entries, "its write has it"
        assert not self.ready, "no goal waits for the rules"

    # ---- rules

    def place_unplaced(self) -> None:
        """Rule: after space was freed, or copies of such writes have left, try the writes that wait for space."""
        copies = self._copies
        if copies.may_place:
            freed, copies.freed_places = copies.freed_places, 0
            smaller, copies.left_writes = copies.left_writes, set()
            unplaced, self.unplaced = self.unplaced, []
            for write in unplaced:
                write.lacking -= freed
                if write.lacking <= 0 or write.number in smaller:
                    self._place(write)
                else:
                    self.unplaced.append(write)

    def flush(self) -> None:
        """Rule: write copies in memory only, a group at a time."""
        copies = self._copies
        if copies.pool is None or not copies.dirty or self._flushing or copies.now_s < self.flush_at_s:
            return
        group = [entry for key in islice(copies.dirty, GROUP) if not (entry := copies.entries[key]).write]
        if group and copies.pool.working:
            self.start(group)

    def stop(self, event: ev.Stopping) -> None:
        """Complete once everything is on drives, as far as it can be."""
        self.stopping, self.stop_at_s = event.ticket, self._copies.now_s + _STOP_S
        self._out.append(ev.WakeAt(self.stop_at_s))

    def end_stop(self) -> None:
        """Rule: complete a stop."""
        copies = self._copies
        hopeless = copies.now_s < self.flush_at_s or copies.pool is None or not copies.pool.working
        if self.stopping and not self._flushing and not self.rewrites and (hopeless or not copies.dirty):
            self._out.append(ev.Complete(self.stopping, None))
            self.stopping = 0

    @property
    def _flushing(self) -> bool:
        return any(write.background for write in self.running.values())
