"""Where every chunk of a node is, and what may happen to it next: the only place that decides it.

A copy of a chunk is ARRIVING while its store makes it durable, RESIDENT while it can be read, LEAVING from the moment
that it cannot, until its last pin is gone and its header is off the drive. A key has one ARRIVING or RESIDENT copy at
a time, and any number of LEAVING ones. An unused copy on a drive alone is known to the pool's map only; it wakes up as
a RESIDENT one when an event names it.

Pure: no clock, no I/O, no await. `handle` takes what happened and returns what is to be done; `execution.py` does it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from quire.model.durability import Durability, OnExisting
from quire.model.errors import ContentConflict, KeysInvalid, PoolFull, QuireError
from quire.model.fingerprints import fingerprint
from quire.model.index import DIGEST_MODULUS, listing_number
from quire_storage.core import events as ev
from quire_storage.core.chunks import Chunk, DiskPlace, Header, MemoryPlace, Placed
from quire_storage.core.entry import Entry, Phase
from quire_storage.core.eviction import LeafArc
from quire_storage.core.ledger import QUARANTINED, Ledger
from quire_storage.core.namespaces import NamespaceBook
from quire_storage.core.pool_map import PoolMap
from quire_storage.core.slab_victims import SlabVictims
from quire_storage.core.slots import Shape, SlotAllocator
from quire_storage.core.under_way import AwaitingFetch, DriveWrite, Goal, PromotedSlots, Question
from quire_storage.errors import DriveFailed

GROUP: Final = 64
_POLICY_GROUP: Final = 512
_RETRY_S, _PAUSE_S_MAX = 0.5, 30.0
_RECENT_MAX: Final = 65_536
_CROWDED: Final = 0.8
_SLABS_TRIED: Final = 64
_SCANNED: Final = 4096
_TRIM: Final = ev.EvictionWanted(0, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySettings:
    """High and low watermark of the pool, as shares of its capacity."""

    pool_high_share: float = 0.95
    pool_low_share: float = 0.90


class Residency:
    """`pool` is None for a node without drives; `objects`: whether there is an object tier."""

    def __init__(
        self, settings: ResidencySettings, arena: SlotAllocator, pool: PoolMap | None, *, objects: bool
    ) -> None:
        self._settings = settings
        self.ledger = Ledger(arena)
        self.pool = pool
        self._objects = objects
        self._numbers = 1 << 40  # tickets of callers are below
        self._now_s = 0.0
        self._out: list[ev.Instruction] = []
        self._entries: dict[bytes, Entry] = {}
        self._copies: dict[int, Entry] = {}
        self._leaving: Counter[bytes] = Counter()
        self._leaving_bytes = 0
        self.in_memory = LeafArc(arena.capacity_bytes, leaves_only=pool is None)
        self.on_disk = LeafArc(pool.capacity_bytes if pool is not None else 0)
        self._dirty: OrderedDict[bytes, None] = OrderedDict()
        self._reservations: dict[int, ev.Reserved] = {}
        self._transfers: dict[int, set[int]] = {}
        self._offers: dict[int, ev.StoreOffered] = {}
        self._offers_may_go = self._space_freed = False
        self._holders: dict[int, list[Entry]] = {}
        self._used: set[int] = set()
        self._goals: dict[int, Goal] = {}
        self._writes: dict[int, DriveWrite] = {}
        self._rewrites: dict[int, tuple[list[Entry], Sequence[Goal]]] = {}
        self._removals: dict[int, Entry] = {}
        self._removal_waits: list[tuple[int, set[int], int]] = []
        self._unplaced: list[DriveWrite] = []
        self._questions: dict[int, Question] = {}
        self._asking: set[int] = set()
        self._trimming = False
        self._slabs = SlabVictims(self.on_disk, pool)
        self._refused, self._trim_pause_s = 0, _RETRY_S
        self._flush_at_s = self._trim_at_s = 0.0
        self._stopping = 0
        self._withdrawing: Counter[bytes] = Counter()
        self._awaiting: dict[int, AwaitingFetch] = {}
        self._fetching: dict[bytes, list[int]] = {}
        self._promotions: dict[int, PromotedSlots] = {}
        self._read_lately: OrderedDict[bytes, None] = OrderedDict()
        self._off_drives = 0  # entries that lie on none
        self._arriving: set[bytes] | None = None
        self.listed_count = self.listed_digest = 0
        self.namespaces = NamespaceBook()
        self.replicated: dict[bytes, None] = {}
        self.hits: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        if pool is not None:
            for key, parent, size, level in pool.entries():
                self.on_disk.insert(key, parent, size)
                if level is Durability.REPLICATED:
                    self.replicated[key] = None

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Instruction]:
        """What is to be done now that this has happened."""
        self._now_s = now_s
        _HANDLERS[type(event)](self, event)
        self._go_on()
        out, self._out = self._out, []
        return out

    # ---- what is here

    def __len__(self) -> int:
        return self._off_drives + (len(self.pool) if self.pool is not None else 0)

    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk can be read here."""
        entry = self._entries.get(key)
        if entry is None:
            return self.pool is not None and key in self.pool and key not in self._leaving
        return entry.phase is Phase.RESIDENT

    def look(self, key: bytes) -> tuple[Header, int] | None:
        """What is known of a chunk that can be read here, and the generation under which the index lists it."""
        entry = self._entries.get(key)
        if entry is not None:
            return (entry.header(), entry.generation) if entry.phase is Phase.RESIDENT else None
        placed = self.pool.get(key) if self.pool is not None and key not in self._leaving else None
        if placed is None or self.pool is None:
            return None
        return placed.header, self.pool.listing(placed.place)[0]

    def generation(self, key: bytes) -> int | None:
        """Of the index entry that lists a chunk that can be read here, 0 for none; None for a chunk that cannot."""
        entry = self._entries.get(key)
        if entry is not None:
            return entry.generation if entry.phase is Phase.RESIDENT else None
        return self.pool.generation(key) if self.pool is not None and key not in self._leaving else None

    def in_object(self, key: bytes) -> bool:
        """Whether the object tier has a chunk that can be read here, under the index entry that lists this node."""
        entry = self._entries.get(key)
        if entry is not None:
            return entry.phase is Phase.RESIDENT and entry.in_object and entry.generation != 0
        placed = self.pool.get(key) if self.pool is not None and key not in self._leaving else None
        return placed is not None and self.pool is not None and all(self.pool.listing(placed.place))

    def wants_object(self, key: bytes) -> bool:
        """Whether a chunk that is here and listed is not in the object tier, as far as is known."""
        found = self.look(key)
        return self._objects and found is not None and found[1] != 0 and not self.in_object(key)

    def keys(self) -> list[bytes]:
        """Everything that can be read here, in about the order in which it was stored."""
        awake, on_drives = self._entries, self.pool.keys() if self.pool is not None else ()
        asleep = [key for key in on_drives if key not in awake and key not in self._leaving]
        return asleep + [key for key, entry in awake.items() if entry.phase is Phase.RESIDENT]

    def scan(self) -> Iterator[list[bytes]]:
        """Keys of what can be read here, some at a time, while chunks come and go. One that is here all the while is
        named; one that is being written to a drive may be named twice.
        """
        entries = list(self._entries)
        for first in range(0, len(entries), _SCANNED):
            some = entries[first : first + _SCANNED]
            yield [key for key in some if (entry := self._entries.get(key)) is not None and entry.disk is None]
        if self.pool is not None:
            yield from self.pool.scan()

    def age(self, key: bytes) -> int | None:
        """Rank of a readable chunk by when it was stored, parents before children; None for other keys."""
        if key not in self:
            return None
        entry = self._entries.get(key)
        if entry is not None and entry.disk is None:  # an older copy of it may be leaving a drive
            return (1 << 63) + entry.number
        return self.pool.age(key) if self.pool is not None else None

    @contextlib.contextmanager
    def arriving(self) -> Iterator[set[bytes]]:
        """Inside the block, the set of keys whose copies arrive on this node or move on it."""
        assert self._arriving is None, "one looks at a time"
        self._arriving = set()
        try:
            yield self._arriving
        finally:
            self._arriving = None

    def acknowledged(self, ticket: int) -> set[bytes]:
        """Of a store that has completed: the keys that can be read here and that the index lists, as of now."""
        mine = self._holders.get(ticket, ())
        return {entry.key for entry in mine if entry.phase is Phase.RESIDENT and entry.generation}

    def off_drives(self) -> list[Chunk]:
        """What can be read here and lies on no drive, in the order of storing."""
        here = self._entries.values()
        return [entry.chunk for entry in here if entry.disk is None and entry.phase is Phase.RESIDENT]

    @property
    def dirty_chunks(self) -> int:
        """In memory only, to be written to a drive."""
        return len(self._dirty)

    # ---- slots for a transfer

    def _reserved(self, event: ev.Reserved) -> None:
        if event.count * event.shape.slot_bytes > self.ledger.slots.capacity_bytes:
            self._out.append(ev.Fail(event.ticket, _no_memory(event, self.ledger.slots.used_bytes)))
        else:
            self._reservations[event.ticket] = event

    def _serve_reservations(self) -> None:
        for ticket, wanted in list(self._reservations.items()):
            if self._clear_memory(wanted.shape, wanted.count):
                del self._reservations[ticket]
                offsets = self.ledger.take(wanted.shape, wanted.count, ticket)
                self._transfers[ticket] = set(offsets)
                self._out.append(ev.Complete(ticket, offsets))

    def _reservation_ended(self, event: ev.ReservationEnded) -> None:
        self._reservations.pop(event.ticket, None)
        self.ledger.free(self._transfers.pop(event.ticket, ()), event.ticket)

    def _transfer_unsettled(self, event: ev.TransferUnsettled) -> None:
        for offset in self._transfers.pop(event.ticket, ()):
            self.ledger.move(offset, event.ticket, QUARANTINED)

    def _clear_memory(self, shape: Shape, count: int) -> bool:
        """Whether there are that many slots of the shape, once copies that lie elsewhere too have given up theirs.

        A slab of another shape is emptied whole or not at all: one slot less of it would not help.
        """
        slots, skipped = self.ledger.slots, list[bytes]()
        if self.pool is None and not self._objects:  # nothing lies elsewhere too
            return slots.available(shape) >= count
        while slots.available(shape) < count and len(skipped) < _SLABS_TRIED:
            key = self.in_memory.victim(self._kept_in_memory)
            if key is None:
                break
            entry = self._entries[key]
            assert entry.memory is not None, "what is in the order of memory has a place there"
            if entry.chunk.shape == shape:
                self._leave_memory(entry)
            elif not self._clear_slab(slots.slab_of(entry.memory.offset)):
                self.in_memory.set_aside(key)
                skipped.append(key)
        for key in reversed(skipped):
            self.in_memory.release(key)
        return slots.available(shape) >= count

    def _clear_slab(self, slab: int) -> bool:
        owners = self.ledger.owners_in(slab)
        here = [entry for owner in owners if (entry := self._copies.get(owner)) is not None]
        if len(here) < len(owners) or any(e.phase is not Phase.RESIDENT or self._kept_in_memory(e.key) for e in here):
            return False
        for entry in here:
            self._leave_memory(entry)
        return True

    def _kept_in_memory(self, key: bytes) -> bool:
        entry = self._entries[key]
        if entry.pins or entry.write or entry.question or entry.promotion:
            return True
        return entry.disk is None and (not entry.in_object or entry.awaited > 0 or entry.registering > 0)

    def _leave_memory(self, entry: Entry) -> None:
        """Give up the slot of a copy that lies elsewhere too."""
        assert entry.memory is not None, "the caller saw a place"
        self.in_memory.evicted(entry.key)
        self.ledger.free([entry.memory.offset], entry.number)
        entry.memory = None
        self._dirty.pop(entry.key, None)
        self.evictions["memory"] += 1
        if entry.disk is None:  # the object tier has it; this node does not any more
            self._withdraw([entry])
        self._rest(entry)

    def _give(self, offset: int, transfer: int, entry: Entry) -> None:
        self._transfers[transfer].remove(offset)
        self.ledger.move(offset, transfer, entry.number)

    # ---- storing

    def _store_offered(self, event: ev.StoreOffered) -> None:
        self._offers[event.ticket] = event
        self._offers_may_go = True

    def _admit_offers(self) -> None:
        while self._offers_may_go:
            self._offers_may_go = False
            for ticket, event in list(self._offers.items()):
                if not any(self._is_busy(chunk.key) for chunk in event.chunks):
                    del self._offers[ticket]
                    self._admit(event)

    def _is_busy(self, key: bytes) -> bool:
        """Whether a store has to wait: for another store, or for what the index says about the copy that is here.

        One registration at a time: the answers of two could come in another order than the entries they speak of.
        """
        entry = self._entries.get(key)
        return key in self._withdrawing or (
            entry is not None and (entry.phase is Phase.ARRIVING or entry.question != 0 or entry.registering > 0)
        )

    def _admit(self, event: ev.StoreOffered) -> None:
        try:
            entries = self._enter(event)
        except QuireError as error:
            self._out.append(ev.Fail(event.ticket, error))
            return
        fresh = [entry for entry in entries if entry.phase is Phase.ARRIVING]
        self._pin(event.ticket, entries)
        goal = Goal(event.ticket, entries, self._publish, event.level, fresh, generation=event.generation)
        self._goals[event.ticket] = goal
        self._raise(goal)

    def _enter(self, event: ev.StoreOffered) -> list[Entry]:
        """Entries for all chunks of a store, or none. Raises `KeysInvalid`, `ContentConflict`."""
        keys = [chunk.key for chunk in event.chunks]
        if len(set(keys)) < len(keys):
            raise KeysInvalid("a key appears twice", field="chunk_keys")
        known = {key: entry for key in keys if (entry := self._find(key)) is not None}
        other = [
            chunk for chunk in event.chunks if chunk.key in known and not known[chunk.key].chunk.same_content(chunk)
        ]
        if other and event.on_existing is OnExisting.VERIFY:
            for entry in known.values():
                self._rest(entry)
            raise ContentConflict(f"key {other[0].key.hex()} holds other bytes; they were kept", field="chunk_keys")
        stride = self.ledger.slots.layer_stride(event.chunks[0].shape)
        entries = []
        for chunk, offset in zip(event.chunks, event.offsets, strict=True):
            entry = known.get(chunk.key)
            if entry is None:
                entry = self._new_entry(chunk, event.level, Phase.ARRIVING)
                entry.recorded = event.generation
                self._note_arrival(entry)
                self._give(offset, event.transfer, entry)
                entry.memory = MemoryPlace(offset, stride)
            entries.append(entry)
        return entries

    def _raise(self, goal: Goal) -> None:
        """Bring the goal's chunks to its level: write those that are on no drive, and the headers that change."""
        changed = []
        for entry in goal.entries:
            raised = _RANK[entry.level] < _RANK[goal.level]
            if raised:
                entry.level = goal.level
                if entry.level is Durability.REPLICATED and entry.phase is Phase.RESIDENT:
                    self.replicated[entry.key] = None
            if entry.disk is not None and (raised or entry.rewrites):  # the header that says so may be under way
                changed.append(entry)
        if changed:
            self._write_headers(changed, [goal])
        self._advance(goal)

    def _advance(self, goal: Goal) -> None:
        """Go on with a goal that waits for nothing: write what is on no drive (its drive may just have failed)."""
        if goal.pending or goal.registering or goal.ticket not in self._goals:
            return
        if goal.after == self._acknowledge:  # the headers that had to name the index entry do
            self._write_what_lost_its_drive(goal)
            if not goal.pending:
                goal.after(goal)
            return
        wanted = []
        if self.pool is not None and goal.level is not Durability.MEMORY and goal.error is None:
            stays = [entry for entry in goal.entries if entry.phase is not Phase.LEAVING]
            wanted = [entry for entry in stays if entry.disk is None and entry.memory is not None]
            if wanted and not self.pool.working:
                goal.error = DriveFailed("no drive is left", self.pool.failed_drives())
        if goal.error is not None:
            self._fail_goal(goal, goal.error)
            return
        for entry in wanted:
            if entry.write:
                self._join(goal, self._writes[entry.write])
        self._start_writes([entry for entry in wanted if not entry.write], goal)
        if not goal.pending:
            goal.after(goal)

    def _write_what_lost_its_drive(self, goal: Goal) -> None:
        """Write the goal's chunks to another drive if theirs has failed since they were written."""
        if self.pool is None or goal.level is Durability.MEMORY or goal.error is not None:
            return
        resident = [entry for entry in goal.entries if entry.phase is Phase.RESIDENT and entry.number in self._copies]
        in_memory_only = [entry for entry in resident if entry.disk is None and entry.memory is not None]
        if in_memory_only and not self.pool.working:
            goal.error = DriveFailed("no drive is left", self.pool.failed_drives())
            return
        for entry in in_memory_only:
            if entry.write:
                self._join(goal, self._writes[entry.write])
        self._start_writes([entry for entry in in_memory_only if not entry.write], goal)

    def _fail_goal(self, goal: Goal, error: QuireError) -> None:
        """Nothing of it is kept."""
        del self._goals[goal.ticket]
        self._out.append(ev.Fail(goal.ticket, error))
        self._withdraw([entry for entry in goal.fresh if entry.promised])
        for entry in goal.fresh:
            self._leave(entry)
        self._unpin(goal.ticket)
        self._offers_may_go = True

    def _publish(self, goal: Goal) -> None:
        """What a store brought is as durable as this node can make it: readable from now on, and registered."""
        for entry in goal.fresh:
            entry.phase, entry.provisional = Phase.RESIDENT, True
        self._enter_orders(goal.fresh)
        self._register(goal)

    def _enter_orders(self, entries: Sequence[Entry]) -> None:
        """Make copies subject to eviction. The deepest first, so that it is the oldest."""
        for entry in reversed(entries):
            size, parent = entry.chunk.shape.slot_bytes, entry.chunk.record.parent
            if entry.memory is not None and entry.key not in self.in_memory:
                self.in_memory.insert(entry.key, parent, size)
            if entry.disk is not None and entry.key not in self.on_disk:
                self.on_disk.insert(entry.key, parent, size)
        self.namespaces.entered([entry.chunk for entry in entries])
        for entry in entries:
            if entry.level is Durability.REPLICATED:
                self.replicated[entry.key] = None
            if self.pool is not None and entry.disk is None and entry.memory is not None:
                self._dirty[entry.key] = None

    def _register(self, goal: Goal, *, patient: bool = True) -> None:
        goal.after = self._acknowledge
        goal.entries = [awake for entry in goal.entries if (awake := self._awake(entry)) is not None]
        for entry in goal.entries:
            entry.registering += 1
        goal.registering = True
        records = [entry.chunk.record for entry in goal.entries]
        self._out.append(ev.Register(goal.ticket, records, patient, goal.generation))

    def _awake(self, entry: Entry) -> Entry | None:
        """A goal whose client has gone holds nothing: its copies that lay on drives may have fallen asleep, or gone."""
        if entry.number in self._copies:
            return entry
        return None if self._is_busy(entry.key) else self._find_resident(entry.key)

    def _registration_wanted(self, event: ev.RegistrationWanted) -> None:
        """Of what is here and in no question: the index was seen not to list it."""
        entries = [e for key in event.keys if (e := self._find(key)) is not None and not self._is_busy(key)]
        for entry in entries:
            self._set_generation(entry, 0)
        self._pin(event.ticket, entries)
        goal = self._goals[event.ticket] = Goal(event.ticket, entries, self._acknowledge)
        self._register(goal, patient=event.patient)

    def _indexed(self, event: ev.Indexed) -> None:
        goal = self._goals[event.ticket]
        mine = {entry.key: entry for entry in goal.entries}
        outdated = []
        for key, generation in event.generations.items():
            entry = mine[key]
            if entry.phase is Phase.LEAVING:
                outdated += self._listed_too_late(entry, generation)
            elif generation not in entry.ended:
                if entry.disk is not None and entry.recorded != generation:
                    outdated.append(entry)
                self._list(entry, generation)
        if outdated:  # after a restart the header alone tells which deletions concern the copy
            self._write_headers(outdated, [] if goal.level is Durability.MEMORY else [goal])

    def _listed_too_late(self, entry: Entry, generation: int) -> list[Entry]:
        """The copy went while the index was asked to list it. Returns a copy whose header has to name that entry."""
        now = self._entries.get(entry.key)
        if now is None and entry.key not in self:
            self._withdraw([entry])
        elif now is not None and now.phase is Phase.ARRIVING:
            now.promised = True
        elif now is not None and not now.generation and entry.key not in self._withdrawing:
            outdated = [now] if now.disk is not None and now.recorded != generation else []
            self._list(now, generation)
            return outdated
        return []

    def _list(self, entry: Entry, generation: int) -> None:
        entry.provisional = False
        self._set_generation(entry, generation)
        self._upload(entry)

    def _set_generation(self, entry: Entry, generation: int) -> None:
        if entry.generation != generation:
            entry.in_object = False  # what is known of it is another entry's
            self._count_listed(entry.key, entry.generation, -1)
            self._count_listed(entry.key, generation, 1)
        entry.generation = generation
        entry.recorded = generation or entry.recorded

    def _count_listed(self, key: bytes, generation: int, sign: int) -> None:
        if generation:
            self.listed_count += sign
            self.listed_digest = (
                self.listed_digest + sign * listing_number(fingerprint(key), generation)
            ) % DIGEST_MODULUS

    def _indexing_ended(self, event: ev.IndexingEnded) -> None:
        goal = self._goals[event.ticket]
        for entry in goal.entries:
            entry.registering -= 1
            if not entry.registering:
                entry.ended.clear()
                if entry.provisional and entry.phase is Phase.RESIDENT:
                    self._withdraw([entry])  # an answer that was lost, or of a copy before it, may have listed it
                    self._leave(entry)
        goal.error = goal.error or event.error
        goal.registering = False
        self._offers_may_go = True
        self._advance(goal)
        if goal.pending:  # headers that have to name the index entry are being written, of some of them
            for entry in goal.entries:
                self._rest(entry)

    def _acknowledge(self, goal: Goal) -> None:
        """The registration has ended. What a store acknowledges is looked at once more then (`acknowledged`)."""
        del self._goals[goal.ticket]
        if goal.error is not None:
            self._out.append(ev.Fail(goal.ticket, goal.error))
        else:
            self._out.append(ev.Complete(goal.ticket, {entry.key for entry in goal.entries if entry.generation}))
        for entry in goal.entries:
            self._rest(entry)

    def _level_raised(self, event: ev.LevelRaised) -> None:
        found = [entry for key in event.keys if (entry := self._find_resident(key)) is not None]
        entries = [entry for entry in found if not entry.question]  # it may be about to leave: nothing is promised
        self._pin(event.ticket, entries)
        goal = self._goals[event.ticket] = Goal(event.ticket, entries, self._raised, event.level)
        self._raise(goal)

    def _raised(self, goal: Goal) -> None:
        del self._goals[goal.ticket]
        safe = [e.key for e in goal.entries if e.phase is Phase.RESIDENT and (self.pool is None or e.disk is not None)]
        self._out.append(ev.Complete(goal.ticket, safe))
        self._unpin(goal.ticket)

    # ---- reading

    def _pinned(self, event: ev.Pinned) -> None:
        found, missing = [], []
        for key in event.keys:
            entry = self._entries.get(key)
            if entry is None or entry.phase is not Phase.RESIDENT:
                entry = self._find_resident(key)
            if entry is not None:
                found.append(entry)
            else:
                missing.append(key)
        if event.used:
            in_memory = sum(1 for entry in found if entry.memory is not None)
            self.hits.update(memory=in_memory, disk=len(found) - in_memory, object=len(missing))
        if not (missing and event.fetch and self._objects):
            self._complete_pin(event, found, missing)
            return
        for entry in found:
            entry.awaited += 1
        self._awaiting[event.ticket] = AwaitingFetch(event, found, set(missing))
        new = [key for key in missing if key not in self._fetching]
        for key in missing:
            self._fetching.setdefault(key, []).append(event.ticket)
        if new:
            self._out.append(ev.Fetch(new))

    def _complete_pin(self, event: ev.Pinned, entries: Sequence[Entry], missing: Sequence[bytes]) -> None:
        self._pin(event.ticket, entries)
        if event.used:
            self._used.add(event.ticket)
        self._out.append(ev.Complete(event.ticket, ([entry.as_copy() for entry in entries], missing)))

    def _pin(self, ticket: int, entries: Iterable[Entry]) -> None:
        mine = self._holders.setdefault(ticket, [])
        for entry in entries:
            entry.pins += 1
            mine.append(entry)

    def _unpinned(self, event: ev.Unpinned) -> None:
        self._offers.pop(event.ticket, None)
        waiting = self._awaiting.pop(event.ticket, None)
        if waiting is not None:
            for entry in waiting.entries:
                entry.awaited -= 1
                self._rest(entry)
        self._unpin(event.ticket)

    def _unpin(self, ticket: int) -> None:
        entries = self._holders.pop(ticket, ())
        if ticket in self._used:
            self._used.discard(ticket)
            self._touch(entries)
        for entry in entries:
            entry.pins -= 1
            assert entry.pins >= 0, "a pin is given back once"
            self._rest(entry)

    def _touch(self, entries: Sequence[Entry]) -> None:
        """They were used: noted when they are let go, as until then they stay anyway."""
        for entry in reversed(entries):
            self.in_memory.touch(entry.key)
            self.on_disk.touch(entry.key)
            self.namespaces.used(entry.chunk)

    def _fetched(self, event: ev.Fetched) -> None:
        """The bytes that came are used unless the same ones are here by now; other ones serve those who wait only."""
        key = event.chunk.key
        entry = self._find(key)
        if entry is None or not entry.chunk.same_content(event.chunk):
            phase = Phase.RESIDENT if entry is None else Phase.LEAVING
            entry = self._new_entry(event.chunk, event.level, phase)
            self._note_arrival(entry)
            self._give(event.offset, event.transfer, entry)
            entry.memory = MemoryPlace(event.offset, self.ledger.slots.layer_stride(event.chunk.shape))
            entry.in_object = entry.written = True
            if phase is Phase.RESIDENT:
                self._enter_orders([entry])
        self._arrived(key, entry)

    def _arrived(self, key: bytes, entry: Entry | None) -> None:
        for ticket in self._fetching.pop(key, ()):
            waiting = self._awaiting.get(ticket)
            if waiting is None:
                continue
            waiting.pending.discard(key)
            if entry is not None:
                entry.awaited += 1
                waiting.entries.append(entry)
            if not waiting.pending:
                del self._awaiting[ticket]
                for each in waiting.entries:
                    each.awaited -= 1
                alive = [each for each in waiting.entries if each.memory is not None or each.disk is not None]
                by_key, keys = {each.key: each for each in alive}, waiting.event.keys
                ordered = [by_key[key] for key in keys if key in by_key]
                self._complete_pin(waiting.event, ordered, [key for key in keys if key not in by_key])
                for each in waiting.entries:
                    self._rest(each)
        if entry is not None:
            self._rest(entry)

    def _promotion_wanted(self, event: ev.PromotionWanted) -> None:
        answer: dict[int, tuple[int, MemoryPlace]] = {}
        wanted: dict[Shape, list[Entry]] = {}
        for number in event.numbers:
            entry = self._copies[number]
            if entry.promotion:
                shared = self._promotions[entry.promotion]
                shared.holders.add(event.ticket)
                answer[number] = (entry.promotion, shared.places[number][1])
            elif entry.phase is Phase.RESIDENT and entry.memory is None and (event.prefetch or self._is_wanted(entry)):
                wanted.setdefault(entry.chunk.shape, []).append(entry)
        for shape, entries in wanted.items():
            self._clear_memory(shape, len(entries))
            promotion = self._number()
            offsets = self.ledger.take(shape, len(entries), promotion)
            if not offsets:
                continue
            stride = self.ledger.slots.layer_stride(shape)
            chosen = [(entry, MemoryPlace(at, stride)) for entry, at in zip(entries, offsets, strict=False)]
            for entry, place in chosen:
                entry.promotion = promotion
                answer[entry.number] = (promotion, place)
            places = {entry.number: (entry, place) for entry, place in chosen}
            self._promotions[promotion] = PromotedSlots(places, {event.ticket})
        self._out.append(ev.Complete(event.ticket, answer))

    def _is_wanted(self, entry: Entry) -> bool:
        """Whether a copy that is read from a drive should stay in memory: it was read before, or there is space."""
        again = entry.key in self._read_lately or self.in_memory.went_lately(entry.key)
        self._read_lately[entry.key] = None
        while len(self._read_lately) > _RECENT_MAX:
            self._read_lately.popitem(last=False)
        slots = self.ledger.slots
        return again or slots.used_bytes + entry.chunk.shape.slot_bytes < _CROWDED * slots.capacity_bytes

    def _promotion_ended(self, event: ev.PromotionEnded) -> None:
        promotion = self._promotions[event.promotion]
        promotion.holders.discard(event.ticket)
        if event.complete:
            for number, (entry, place) in list(promotion.places.items()):
                if entry.phase is Phase.RESIDENT and entry.memory is None:
                    del promotion.places[number]
                    self.ledger.move(place.offset, event.promotion, number)
                    entry.memory = place
                    entry.promotion = 0
                    self._enter_orders([entry])
                    self._rest(entry)
        if not promotion.holders:
            del self._promotions[event.promotion]
            for entry, place in promotion.places.values():
                self.ledger.free([place.offset], event.promotion)
                entry.promotion = 0
                self._rest(entry)

    # ---- drives

    def _start_writes(self, entries: Sequence[Entry], goal: Goal | None = None) -> None:
        groups: dict[Shape, list[Entry]] = {}
        for entry in entries:
            groups.setdefault(entry.chunk.shape, []).append(entry)
        for group in groups.values():
            write = DriveWrite(self._number(), group, goal is None)
            self._writes[write.number] = write
            for entry in group:
                entry.write = write.number
            if goal is not None:
                self._join(goal, write)
            self._place(write)

    def _join(self, goal: Goal, write: DriveWrite) -> None:
        if write.number not in goal.pending:
            goal.pending.add(write.number)
            write.goals.append(goal)

    def _place(self, write: DriveWrite) -> None:
        """Find places for a write and start it; without places it waits for them."""
        assert self.pool is not None, "only drives are written to"
        leaving = [entry for entry in write.entries if entry.phase is Phase.LEAVING]
        if leaving:  # since the write was begun: no drive needs them
            self._spare(write, leaving)
        if not write.entries:
            return
        try:
            write.places = self.pool.allocate(write.entries[0].chunk.shape, len(write.entries))
        except PoolFull:
            if write not in self._unplaced:
                self._unplaced.append(write)
            return
        headers = write.headers = [entry.header() for entry in write.entries]
        sources = [entry.memory for entry in write.entries if entry.memory is not None]
        assert len(sources) == len(headers), "what is written lies in memory"
        placed = [Placed(header, place) for header, place in zip(headers, write.places, strict=True)]
        self._out.append(ev.Write(write.number, placed, sources))

    def _spare(self, write: DriveWrite, leaving: Sequence[Entry]) -> None:
        """Take these out of a write that has not begun."""
        write.entries = [entry for entry in write.entries if entry not in leaving]
        for entry in leaving:
            entry.write = 0
            self._off_its_drive(entry)
            self._rest(entry)
        if not write.entries:
            del self._writes[write.number]
            self._end_write(write.goals, write.number, None)

    def _write_headers(self, entries: Sequence[Entry], goals: Sequence[Goal] = ()) -> None:
        number = self._number()
        for entry in entries:
            entry.rewrites += 1
        self._rewrites[number] = (list(entries), goals)
        for goal in goals:
            goal.pending.add(number)
        placed = [Placed(entry.header(), entry.disk) for entry in entries if entry.disk is not None]
        self._out.append(ev.WriteHeaders(number, placed))

    def _written(self, event: ev.Written) -> None:
        if event.write in self._rewrites:
            self._rewritten(event.write, None)
            return
        write = self._writes.pop(event.write)
        assert self.pool is not None, "a drive was written to"
        failed = self.pool.failed_drives()
        for entry, place in zip(write.entries, write.places, strict=True):
            entry.write = 0
            if place.drive not in failed:
                self._put_on_drive(entry, place)
                self._note_arrival(entry)
                if entry.phase is not Phase.LEAVING:  # else the key may have another copy, which is to be written
                    self._dirty.pop(entry.key, None)
            if entry.phase is Phase.LEAVING and entry.disk is not None:
                self._remove_header(entry)
            elif entry.phase is Phase.LEAVING:
                self._off_its_drive(entry)
        self._enter_orders([entry for entry in write.entries if entry.phase is Phase.RESIDENT])
        self._correct_headers(write)
        for entry in write.entries:
            self._rest(entry)
        self._end_write(write.goals, write.number, None)

    def _correct_headers(self, write: DriveWrite) -> None:
        """Chunks were raised to a level, or uploaded, while they were written: their headers say what was before.

        Goals of a level above `local` wait, because after a restart the header alone says which it is.
        """
        both = zip(write.entries, write.headers, strict=True)
        outdated = [entry for entry, written in both if not entry.agrees_with(written)]
        stale = [entry for entry in outdated if entry.disk is not None and entry.phase is not Phase.LEAVING]
        if stale:
            self._write_headers(stale, [goal for goal in write.goals if _RANK[goal.level] > _RANK[Durability.LOCAL]])

    def _write_failed(self, event: ev.WriteFailed) -> None:
        if event.write in self._rewrites:
            self._rewritten(event.write, event.error)
            return
        write = self._writes[event.write]
        assert self.pool is not None, "a drive was written to"
        self.pool.release(write.places)
        write.places, write.tries = [], write.tries + 1
        if isinstance(event.error, DriveFailed) and self.pool.working and write.tries < GROUP:
            self._place(write)
        else:
            self._give_up(write, event.error)

    def _give_up(self, write: DriveWrite, error: QuireError) -> None:
        del self._writes[write.number]
        for entry in write.entries:
            entry.write = 0
            if entry.phase is Phase.LEAVING:
                self._off_its_drive(entry)
            self._rest(entry)
        if write.background:
            self._flush_at_s = self._now_s + _RETRY_S
            self._out.append(ev.WakeAt(self._flush_at_s))
        self._end_write(write.goals, write.number, error)

    def _end_write(self, goals: Sequence[Goal], number: int, error: QuireError | None) -> None:
        for goal in goals:
            goal.pending.discard(number)
            goal.error = goal.error or error
            self._advance(goal)

    def _rewritten(self, number: int, error: QuireError | None) -> None:
        entries, goals = self._rewrites.pop(number)
        for entry in entries:
            entry.rewrites -= 1
            self._rest(entry)
        self._end_write(goals, number, None if isinstance(error, DriveFailed) else error)  # it is written elsewhere now

    def _drive_lost(self, event: ev.DriveLost) -> None:
        """What is in memory too lives on, the rest is gone."""
        assert self.pool is not None, "there was a drive"
        mine = [each for each in self._copies.values() if each.disk is not None and each.disk.drive == event.drive]
        for placed in self.pool.fail(event.drive):
            key = placed.header.chunk.key
            awake = self._entries.get(key)
            if awake is not None and awake.disk is None:  # in memory; its write has not ended
                continue
            self.on_disk.remove(key)
            self.namespaces.left(placed.header.chunk)
            self.replicated.pop(key, None)
            if key not in self._entries and key not in self._leaving:
                generation, in_object = self.pool.listing(placed.place)
                self._count_listed(key, generation, -1)
                self._out.append(self._withdrawal([placed.header.chunk]))
                if self._objects and not in_object:
                    self._out.append(ev.CancelUpload(key))
        for entry in mine:
            self._count_leaving(entry, -1)
            self._put_on_drive(entry, None)
            if entry.phase is Phase.RESIDENT:
                if entry.memory is not None:
                    self._note_arrival(entry)  # a scan took it to be on a drive, and may not have come there
                    self._enter_orders([entry])
                else:
                    self._withdraw([entry])
                    self._leave(entry)
            self._rest(entry)

    # ---- what goes

    def _dropped(self, event: ev.Dropped) -> None:
        """Only what was listed under the entry that has ended goes. An entry that is unknown decides nothing."""
        going: list[Entry] = []
        for key, generation in event.generations.items():
            entry = self._find_resident(key)
            if entry is None:
                continue
            if generation and generation == (entry.generation or entry.recorded):
                going.append(entry)
            elif not entry.generation and entry.registering:
                entry.ended.add(generation)
            else:
                self._rest(entry)
        for entry in going:
            self._leave(entry)
        self._await_removal(event.ticket, going)

    def recorded(self, key: bytes) -> int | None:
        """Generation of the entry that lists a chunk that can be read here, or listed it last; 0: unknown.

        None for a chunk that cannot be read here.
        """
        entry = self._entries.get(key)
        if entry is not None:
            return (entry.generation or entry.recorded) if entry.phase is Phase.RESIDENT else None
        placed = self.pool.get(key) if self.pool is not None and key not in self._leaving else None
        if placed is None or self.pool is None:
            return None
        return self.pool.listing(placed.place)[0] or placed.header.generation

    def _listed(self, event: ev.Listed) -> None:
        outdated = []
        for key, generation in event.generations.items():
            entry = self._find_resident(key)
            if entry is None:
                continue
            if not entry.generation and not entry.registering and not self._is_busy(key):
                if entry.disk is not None and entry.recorded != generation:
                    outdated.append(entry)
                self._list(entry, generation)
            self._rest(entry)
        if outdated:
            self._write_headers(outdated)

    def _await_removal(self, ticket: int, going: Sequence[Entry]) -> None:
        pending = {entry.number for entry in going if entry.number in self._copies and (entry.write or entry.removal)}
        if pending:
            self._removal_waits.append((ticket, pending, len(going)))
        else:
            self._out.append(ev.Complete(ticket, len(going)))

    def _leave(self, entry: Entry) -> None:
        """Unreadable from now on; off its places when nothing uses them."""
        if entry.phase is Phase.LEAVING:
            return
        entry.phase = Phase.LEAVING
        self._forget_entry(entry)
        self._leaving[entry.key] += 1
        if entry.question:  # the answer may end what lists the next copy of the key
            self._withdrawing[entry.key] += 1
        self.in_memory.remove(entry.key)
        self.on_disk.remove(entry.key)
        self._dirty.pop(entry.key, None)
        self.namespaces.left(entry.chunk)
        self.replicated.pop(entry.key, None)
        if self._objects and not entry.in_object:
            self._out.append(ev.CancelUpload(entry.key))
        self._set_generation(entry, 0)
        self._offers_may_go = True
        self._remove_header(entry)
        self._rest(entry)

    def _remove_header(self, entry: Entry) -> None:
        """Take a leaving copy's header off its drive: only then its slot there may be used again."""
        if entry.disk is not None and not entry.write:
            self._count_leaving(entry, 1)
            entry.removal = self._number()
            self._removals[entry.removal] = entry
            self._out.append(ev.Forget(entry.removal, [Placed(entry.header(), entry.disk)]))

    def _forgotten(self, event: ev.Forgotten) -> None:
        entry = self._removals.pop(event.removal)
        entry.removal, entry.forgotten = 0, True
        self._off_its_drive(entry, event.error)
        self._rest(entry)

    def _off_its_drive(self, entry: Entry, error: QuireError | None = None) -> None:
        """A copy that leaves is on no drive any more, or never will be: who waits for that is told."""
        waits, self._removal_waits = self._removal_waits, []
        for ticket, pending, count in waits:
            if error is not None and entry.number in pending:
                self._out.append(ev.Fail(ticket, error))
                continue
            pending.discard(entry.number)
            if pending:
                self._removal_waits.append((ticket, pending, count))
            else:
                self._out.append(ev.Complete(ticket, count))

    def _count_leaving(self, entry: Entry, sign: int) -> None:
        """Bytes on the drives that come free without anything being done about it."""
        if entry.phase is Phase.LEAVING and entry.disk is not None:
            self._leaving_bytes += sign * entry.chunk.shape.slot_bytes

    def _hidden(self, event: ev.Hidden) -> None:
        entry = self._copies.get(event.number)
        if entry is not None and entry.phase is Phase.RESIDENT and entry.generation and not self._is_busy(entry.key):
            self._withdraw([entry])

    def _lost(self, event: ev.Lost) -> None:
        mine = [e for n in event.numbers if (e := self._copies.get(n)) is not None and e.phase is Phase.RESIDENT]
        self._withdraw(mine)
        for entry in mine:
            self._leave(entry)

    def _withdraw(self, entries: Sequence[Entry]) -> None:
        """Tell the index that this node does not hold these; until it has heard, no store of them is admitted."""
        if entries:
            self._out.append(self._withdrawal([entry.chunk for entry in entries]))
            for entry in entries:
                self._set_generation(entry, 0)

    def _withdrawal(self, chunks: Sequence[Chunk]) -> ev.Withdraw:
        self._withdrawing.update(chunk.key for chunk in chunks)
        return ev.Withdraw([chunk.record for chunk in chunks])

    def _denied(self, event: ev.Denied) -> None:
        absent = [record for record in event.records if record.key not in self._entries and record.key not in self]
        if absent:
            self._withdrawing.update(record.key for record in absent)
            self._out.append(ev.Withdraw(absent))

    def _heard(self, keys: Sequence[bytes]) -> None:
        """The index has answered what was said, or asked, of copies that leave: stores of their keys go on."""
        for key in keys:
            self._withdrawing[key] -= 1
            if not self._withdrawing[key]:
                del self._withdrawing[key]
        self._offers_may_go = True

    # ---- space on the drives, and last copies

    def _ask(self, entries: Sequence[Entry], tier: LeafArc, of_object: bool, by: ev.EvictionWanted = _TRIM) -> None:
        number = self._number()
        for entry in entries:
            entry.question = number
        self._questions[number] = Question(list(entries), tier, of_object, by.ticket)
        records = [entry.chunk.record for entry in entries]
        here = of_object or by.keepers
        self._out.append(ev.AskToWithdraw(number, records, by.keepers) if here else ev.AskToEvict(number, records))
        if not by.ticket:
            self._asking.add(number)

    def _answered(self, event: ev.Answered) -> None:
        question = self._questions.pop(event.question)
        self._asking.discard(event.question)
        gone = []
        for entry in question.entries:
            asked, entry.question = entry.question, 0
            if entry.phase is Phase.LEAVING:
                self._heard([entry.key] if asked else [])
                self._rest(entry)
            elif entry.key in event.out:
                self._leave(entry)
                gone.append(entry)
            else:
                self._stays(entry, question)
                self._slabs.refused()
        self.evictions["disk" if question.tier is self.on_disk else "memory"] += len(gone)
        if question.ticket:
            self._out.append(ev.Complete(question.ticket, len(gone)))
        elif gone:
            self._refused, self._trim_pause_s = 0, _RETRY_S
        else:
            self._refused += len(question.entries)
            if self._refused > len(question.tier):  # everything was asked for
                self._refused = 0
                self._give_up_unplaced()
                self._trim_at_s = self._now_s + self._trim_pause_s
                self._trim_pause_s = min(_PAUSE_S_MAX, 2 * self._trim_pause_s)
                self._out.append(ev.WakeAt(self._trim_at_s))
        self._offers_may_go = True

    def _stays(self, entry: Entry, question: Question) -> None:
        """The index keeps it: leased, or extended by others; or the object tier does not have it after all."""
        if question.of_object and entry.in_object:
            entry.in_object = False
            self._upload(entry)
        self._enter_orders([entry])
        question.tier.touch(entry.key)
        self._rest(entry)

    def _trim(self) -> None:
        """Ask for the last copies that are to go from the drives, a group at a time."""
        pool = self.pool
        if pool is None or self._asking:
            return
        comes_free = bool(self._unplaced and self._leaving_bytes) and self._comes_free()
        if self._stopping and not comes_free:
            self._give_up_unplaced()
        if self._stopping or self._now_s < self._trim_at_s:
            return
        capacity, used = pool.capacity_bytes, pool.used_bytes - self._leaving_bytes
        if used > self._settings.pool_high_share * capacity:
            self._trimming = True
        excess = used - self._settings.pool_low_share * capacity if self._trimming else 0
        waiting = [each for write in self._unplaced for each in write.entries if each.phase is not Phase.LEAVING]
        wanted = sum(entry.chunk.shape.slot_bytes for entry in waiting)
        needed = max(excess, 0 if comes_free else wanted)
        self._trimming = excess > 0
        if needed <= 0:
            return
        victims: list[Entry] = []
        if excess <= 0 and self._unplaced:
            shape = self._unplaced[0].entries[0].chunk.shape
            victims = self._woken(self._slabs.victims(shape, self._kept_on_disk, GROUP))
        victims = victims or self._victims(self.on_disk, self._kept_on_disk, needed)
        if not victims:
            self._trimming = False
            if not comes_free:
                self._give_up_unplaced()
            return
        self._ask_for(victims, self.on_disk)

    def _comes_free(self) -> bool:
        """Whether space on the drives comes free by itself. What goals hold may be what they wait for."""
        by_goals = Counter(each for ticket in self._goals for each in self._holders.get(ticket, ()))
        held = sum(each.chunk.shape.slot_bytes for each, pins in by_goals.items() if each.held_only_by(pins))
        return self._leaving_bytes > held

    def _ask_for(self, victims: Sequence[Entry], tier: LeafArc) -> None:
        in_object = [entry for entry in victims if entry.in_object]
        last = [entry for entry in victims if not entry.in_object]
        for group, of_object in ((last, False), (in_object, True)):
            if group:
                self._ask(group, tier, of_object)

    def _give_up_unplaced(self) -> None:
        unplaced, self._unplaced = self._unplaced, []
        for write in unplaced:
            size = sum(entry.chunk.shape.slot_bytes for entry in write.entries)
            self._give_up(write, PoolFull(f"no space on the drives for {size} bytes, and nothing that may go"))

    def _victims(self, tier: LeafArc, kept: Callable[[bytes], bool], needed: float) -> list[Entry]:
        victims, size = list[Entry](), 0
        while size < needed and len(victims) < GROUP:
            key = tier.evict(kept)
            if key is None:
                break
            victims += self._woken([key])
            size += victims[-1].chunk.shape.slot_bytes
        return victims

    def _woken(self, keys: Iterable[bytes]) -> list[Entry]:
        """Entries of keys that were in an order: they can be read."""
        entries = [self._find_resident(key) for key in keys]
        return [entry for entry in entries if entry is not None]

    def _kept_on_disk(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and (entry.is_used or entry.phase is not Phase.RESIDENT)

    def _kept_as_last(self, key: bytes) -> bool:
        return self._entries[key].is_used

    def _eviction_wanted(self, event: ev.EvictionWanted) -> None:
        entries = [e for key in event.keys if (e := self._find_resident(key)) is not None and not self._is_busy(key)]
        if event.keepers:  # a copy that was raised since is more than the keepers have
            raised = [entry for entry in entries if _RANK[entry.level] > _RANK[event.level]]
            entries = [entry for entry in entries if entry not in raised]
            for entry in raised:
                self._rest(entry)
        for entry in entries:
            self.in_memory.remove(entry.key)
            self.on_disk.remove(entry.key)
        if entries:
            tier = self.on_disk if self.pool is not None else self.in_memory
            self._ask(entries, tier, False, event)
        else:
            self._out.append(ev.Complete(event.ticket, 0))

    # ---- the object tier

    def _upload(self, entry: Entry) -> None:
        if self._wants_object(entry):
            self._out.append(ev.Upload(entry.key, entry.chunk.shape.slot_bytes, entry.written))

    def _wants_object(self, entry: Entry) -> bool:
        return self._objects and entry.phase is Phase.RESIDENT and entry.generation != 0 and not entry.in_object

    def _uploaded(self, event: ev.Uploaded) -> None:
        entry = self._find_resident(event.chunk.key)
        if entry is None:
            return
        if entry.chunk.same_content(event.chunk):
            if entry.generation == event.generation:
                entry.in_object = True
            if not entry.written:
                entry.written = True
                if entry.disk is not None and not entry.write:
                    self._write_headers([entry])
        self._rest(entry)

    # ---- what goes on by itself

    def _go_on(self) -> None:
        while True:
            self._admit_offers()
            if self._space_freed:
                self._space_freed = False
                waiting, self._unplaced = self._unplaced, []
                for write in waiting:
                    self._place(write)
            self._flush()
            self._trim()
            if self._reservations:
                self._serve_reservations()
                self._ask_for_memory()
            if not self._offers_may_go and not self._space_freed:
                break
        hopeless = self._now_s < self._flush_at_s or self.pool is None or not self.pool.working
        if self._stopping and not self._flushing and not self._rewrites and (hopeless or not self._dirty):
            self._out.append(ev.Complete(self._stopping, None))
            self._stopping = 0

    @property
    def _flushing(self) -> bool:
        return any(write.background for write in self._writes.values())

    def _flush(self) -> None:
        """Write what lies in memory only, a group at a time."""
        if self.pool is None or not self._dirty or self._flushing or self._now_s < self._flush_at_s:
            return
        first = [self._entries[key] for key in islice(self._dirty, GROUP)]
        group = [entry for entry in first if not entry.write]
        if group and self.pool.working:
            self._start_writes(group)

    def _ask_for_memory(self) -> None:
        """Without drives: ask for last copies that are to go, so that a reservation can be served."""
        if self.pool is not None or not self._reservations or self._asking or self._now_s < self._trim_at_s:
            return
        wanted = next(iter(self._reservations.values()))
        needed = wanted.shape.slot_bytes * (wanted.count - self.ledger.slots.available(wanted.shape))
        victims = self._victims(self.in_memory, self._kept_as_last, needed)
        if not victims and self.in_memory.look_again():  # `_clear_memory` has no eye for what lies here alone
            victims = self._victims(self.in_memory, self._kept_as_last, needed)
        if victims:
            self._ask_for(victims, self.in_memory)

    def _stop(self, event: ev.Stopping) -> None:
        self._stopping = event.ticket

    # ---- entries

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _new_entry(self, chunk: Chunk, level: Durability, phase: Phase) -> Entry:
        entry = Entry(self._number(), chunk, level, phase)
        self._copies[entry.number] = entry
        if phase is Phase.LEAVING:
            self._leaving[entry.key] += 1
        else:
            self._entries[entry.key] = entry
            self._off_drives += 1
        return entry

    def _note_arrival(self, entry: Entry) -> None:
        if self._arriving is not None:
            self._arriving.add(entry.key)

    def _put_on_drive(self, entry: Entry, place: DiskPlace | None) -> None:
        """It lies there, or on no drive."""
        if self._entries.get(entry.key) is entry:
            self._off_drives += (place is None) - (entry.disk is None)
        entry.disk = place

    def _forget_entry(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._off_drives -= entry.disk is None

    def _find(self, key: bytes) -> Entry | None:
        """The copy of a key that is arriving or resident, woken up if need be. `_rest` it unless something uses it."""
        entry = self._entries.get(key)
        if entry is None and self.pool is not None and key not in self._leaving:
            placed = self.pool.get(key)
            if placed is not None:
                entry = self._new_entry(placed.header.chunk, placed.header.level, Phase.RESIDENT)
                self._put_on_drive(entry, placed.place)
                entry.written, entry.recorded = placed.header.in_object, placed.header.generation
                entry.generation, entry.in_object = self.pool.listing(placed.place)
        return entry

    def _find_resident(self, key: bytes) -> Entry | None:
        entry = self._find(key)
        return entry if entry is not None and entry.phase is Phase.RESIDENT else None

    def _rest(self, entry: Entry) -> None:
        """Something that was done with a copy has ended: free what it need not have."""
        if entry.number not in self._copies:
            return
        if entry.is_used:  # by what does not need it in memory, perhaps
            if entry.phase is Phase.RESIDENT and entry.memory is not None and not self._kept_in_memory(entry.key):
                self.in_memory.release(entry.key)
            return
        if entry.phase is Phase.LEAVING:
            self._free(entry)
        elif entry.phase is Phase.RESIDENT and entry.memory is None and not self._must_stay_awake(entry):
            if entry.disk is not None and self.pool is not None:
                self.pool.set_listing(entry.disk, entry.generation, entry.in_object)
            else:
                self.namespaces.left(entry.chunk)
                self.replicated.pop(entry.key, None)
            self._forget_entry(entry)
            del self._copies[entry.number]
        if entry.phase is Phase.RESIDENT:
            self.in_memory.release(entry.key)
            self.on_disk.release(entry.key)

    def _must_stay_awake(self, entry: Entry) -> bool:
        """The pool's map has one copy of a key, which is the one that leaves, as long as there is one."""
        return entry.disk is not None and entry.key in self._leaving

    def _free(self, entry: Entry) -> None:
        """Give up the places of a copy that has left."""
        if entry.disk is not None and not entry.forgotten:
            return
        if entry.memory is not None:
            self.ledger.free([entry.memory.offset], entry.number)
        if entry.disk is not None and self.pool is not None:
            self._count_leaving(entry, -1)
            self.pool.release([entry.disk])
            self._space_freed = True
        del self._copies[entry.number]
        self._leaving[entry.key] -= 1
        if not self._leaving[entry.key]:
            del self._leaving[entry.key]
            now = self._entries.get(entry.key)
            if now is not None:
                self._rest(now)


def _no_memory(wanted: ev.Reserved, used_bytes: int) -> PoolFull:
    return PoolFull(f"no memory for {wanted.count} chunks of {wanted.shape.bytes} bytes ({used_bytes} in use)")


_RANK: Final = {level: rank for rank, level in enumerate(Durability)}
_HANDLERS: Final[dict[type, Callable[[Residency, Any], None]]] = {
    ev.Reserved: Residency._reserved,
    ev.ReservationEnded: Residency._reservation_ended,
    ev.TransferUnsettled: Residency._transfer_unsettled,
    ev.StoreOffered: Residency._store_offered,
    ev.Indexed: Residency._indexed,
    ev.IndexingEnded: Residency._indexing_ended,
    ev.RegistrationWanted: Residency._registration_wanted,
    ev.LevelRaised: Residency._level_raised,
    ev.Pinned: Residency._pinned,
    ev.PinnedAlso: lambda machine, event: machine._pin(event.ticket, [machine._copies[event.number]]),
    ev.Unpinned: Residency._unpinned,
    ev.Fetched: Residency._fetched,
    ev.FetchFailed: lambda machine, event: machine._arrived(event.key, machine._find_resident(event.key)),
    ev.PromotionWanted: Residency._promotion_wanted,
    ev.PromotionEnded: Residency._promotion_ended,
    ev.Written: Residency._written,
    ev.WriteFailed: Residency._write_failed,
    ev.Forgotten: Residency._forgotten,
    ev.DriveLost: Residency._drive_lost,
    ev.Answered: Residency._answered,
    ev.Denied: Residency._denied,
    ev.Withdrawn: lambda machine, event: machine._heard(event.keys),
    ev.Uploaded: Residency._uploaded,
    ev.Dropped: Residency._dropped,
    ev.Listed: Residency._listed,
    ev.Hidden: Residency._hidden,
    ev.Lost: Residency._lost,
    ev.EvictionWanted: Residency._eviction_wanted,
    ev.TimePassed: lambda machine, event: None,  # what waits for a time looks at it
    ev.Stopping: Residency._stop,
}
