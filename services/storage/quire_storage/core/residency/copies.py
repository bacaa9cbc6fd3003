"""The table of copies: every fact about the chunks of a node, and the counts that follow from the facts.

Other parts change entries through it, so that orders, counts and the map of the drives agree with them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

from quire.model.durability import Durability
from quire.model.fingerprints import fingerprint, fingerprints
from quire.model.index import DIGEST_MODULUS, listing_number, listing_total
from quire_storage.core.chunks import Chunk, DiskPlace
from quire_storage.core.eviction import LeafArc
from quire_storage.core.namespaces import NamespaceBook
from quire_storage.core.pool.map import PoolMap
from quire_storage.core.pool.slots import SlotAllocator
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.ledger import Ledger
from quire_storage.core.residency.spared import Spared

_ENTERED_AT_ONCE: Final = 4096
_COUNTED_FROM: Final = 12
"""Chunks from which arrays are quicker."""


class Instructions(list[ev.Instruction]):
    """Instructions of the event that is being handled, in the order of the decisions."""

    def take(self) -> list[ev.Instruction]:
        """Return the instructions, and begin with none."""
        instructions = list(self)
        self.clear()
        return instructions


class Copies:
    """Copies of chunks by key and by number, their orders of eviction, and counts.

    Attributes:
        entries: Arriving and resident copies that are awake, by key.
        by_number: All copies that are awake, by number.
        leaving: Number of leaving copies of a key.
        leaving_bytes: Bytes on the drives that will be free once headers are removed.
        dirty: Keys of resident copies in memory only, oldest first.
        withdrawing: Keys whose withdrawal the index has not acknowledged, with the number of withdrawals.
        replicated: Keys of resident copies that have to have a second copy on another node.
        on_retired: Generations of the entries of chunks whose headers are on retired drives, by key.
        retired_in_objects: Keys of those that the object tier has, as far as is known.
        arriving: While a scan runs, the keys of copies that arrived or moved.
        spared: Copies that are not chosen for eviction for a time.
        unblocked: A store that waits for a key may proceed.
        freed_places: How many places on the drives have come free since writes that wait for some were looked at.
        left_writes: Numbers of writes that need less since then: copies of theirs have left.
    """

    def __init__(self, arena: SlotAllocator, pool: PoolMap | None, *, objects: bool) -> None:
        self.out = Instructions()
        self.now_s = 0.0
        self.pool = pool
        self.objects = objects
        self.ledger = Ledger(arena)
        self.entries: dict[bytes, Entry] = {}
        self.by_number: dict[int, Entry] = {}
        self.leaving: Counter[bytes] = Counter()
        self.leaving_bytes = 0
        self.in_memory = LeafArc(arena.capacity_bytes, leaves_only=pool is None)
        self.on_disk = LeafArc(pool.capacity_bytes, rows=pool.rows) if pool is not None else LeafArc(0)
        self.dirty: OrderedDict[bytes, None] = OrderedDict()
        self.withdrawing: Counter[bytes] = Counter()
        self.spared = Spared()
        self.namespaces = NamespaceBook()
        self.replicated: dict[bytes, None] = {}
        self.on_retired: dict[bytes, int] = {}
        self.retired_in_objects: set[bytes] = set()
        self.evictions: Counter[str] = Counter()
        self.off_drives = 0
        self.arriving: set[bytes] | None = None
        self.listed_count = self.listed_digest = 0
        self.unblocked = False
        self.freed_places, self.left_writes = 0, set[int]()
        self.last_number = 1 << 40  # tickets of callers are below
        if pool is not None:
            stored = pool.entries()
            for first in range(0, len(stored), _ENTERED_AT_ONCE):
                part = stored[first : first + _ENTERED_AT_ONCE]
                self.on_disk.enter([(key, parent, size) for key, parent, size, _ in part])
            self.replicated.update((key, None) for key, _, _, level in stored if level is Durability.REPLICATED)

    def number(self) -> int:
        """Return a number that nothing else has: of a copy, write, removal, question or promotion."""
        self.last_number += 1
        return self.last_number

    # ---- entries

    def add(self, chunk: Chunk, level: Durability, phase: Phase) -> Entry:
        """Add a copy that lies nowhere yet."""
        entry = Entry(self.number(), chunk.record.key, chunk, level, phase)
        self.by_number[entry.number] = entry
        if phase is Phase.LEAVING:
            self.leaving[entry.key] += 1
        else:
            self.entries[entry.key] = entry
            self.off_drives += 1
        return entry

    def find(self, key: bytes) -> Entry | None:
        """Return the arriving or resident copy of a key, and wake it up if it sleeps.

        The caller has to `rest` it unless something uses it from now on.
        """
        entry = self.entries.get(key)
        if entry is None and self.pool is not None and key not in self.leaving:
            placed = self.pool.get(key)
            if placed is not None:
                entry = self.add(placed.header.chunk, placed.header.level, Phase.RESIDENT)
                self.put_on_drive(entry, placed.place)
                entry.written, entry.recorded = placed.header.in_object, placed.header.generation
                entry.generation, entry.in_object = self.pool.listing(placed.place)
        return entry

    def find_resident(self, key: bytes) -> Entry | None:
        """Return the copy of a key that can be read. See `find`."""
        entry = self.find(key)
        return entry if entry is not None and entry.phase is Phase.RESIDENT else None

    def is_busy(self, key: bytes) -> bool:
        """Return whether a store has to wait: for another store, or for an answer of the index about the copy.

        One registration at a time: the answers of two could come in another order than the entries they speak of.
        """
        entry = self.entries.get(key)
        return key in self.withdrawing or (
            entry is not None and (entry.phase is Phase.ARRIVING or entry.question != 0 or entry.registering > 0)
        )

    def note_arrival(self, entry: Entry) -> None:
        """Tell a scan that runs."""
        if self.arriving is not None:
            self.arriving.add(entry.key)

    def put_on_drive(self, entry: Entry, place: DiskPlace | None) -> None:
        """Record where on the drives a copy lies; None for nowhere."""
        if self.entries.get(entry.key) is entry:
            self.off_drives += (place is None) - (entry.disk is None)
        entry.disk = place

    def detach(self, entry: Entry) -> None:
        """Make a copy no longer the current one of its key."""
        del self.entries[entry.key]
        self.off_drives -= entry.disk is None

    # ---- orders of eviction

    def enter_orders(self, entries: Sequence[Entry]) -> None:
        """Make copies subject to eviction. The deepest first, so that it is the oldest."""
        deepest_first = entries[::-1]
        self.in_memory.enter([entry.in_order() for entry in deepest_first if entry.memory is not None])
        self.on_disk.enter([entry.in_order() for entry in deepest_first if entry.disk is not None])
        self.namespaces.entered([entry.chunk for entry in entries])
        for entry in entries:
            if entry.level is Durability.REPLICATED:
                self.replicated[entry.key] = None
            if self.pool is not None and entry.disk is None and entry.memory is not None:
                self.dirty[entry.key] = None

    def leave_orders(self, entry: Entry) -> None:
        """Make a copy no longer subject to eviction."""
        self.in_memory.remove(entry.key)
        self.on_disk.remove(entry.key)
        self.dirty.pop(entry.key, None)
        self.spared.forget(entry.key)
        self.namespaces.left(entry.chunk)
        self.replicated.pop(entry.key, None)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Count copies as used now."""
        keys = [entry.key for entry in reversed(entries)]
        self.in_memory.touch_each(keys)
        if self.pool is not None:
            self.on_disk.touch_each(keys)
        self.namespaces.used(entry.chunk for entry in reversed(entries))

    def is_kept_in_memory(self, key: bytes) -> bool:
        """Return whether something needs the slot of a copy in memory."""
        return self.entries[key].is_kept_in_memory

    def is_kept_on_disk(self, key: bytes) -> bool:
        """Return whether something needs the place of a copy on a drive, or it is spared."""
        entry = self.entries.get(key)
        return key in self.spared or (entry is not None and (entry.is_used or entry.phase is not Phase.RESIDENT))

    # ---- the index entry that lists this node

    def set_generation(self, entry: Entry, generation: int) -> None:
        """Record the index entry that lists this node for a copy; 0 for none."""
        if entry.generation != generation:
            entry.in_object = False  # what is known of it is another entry's
            self.count_listed(entry.key, entry.generation, -1)
            self.count_listed(entry.key, generation, 1)
        entry.generation = generation
        entry.recorded = generation or entry.recorded

    def set_generations(self, listings: Sequence[tuple[Entry, int]]) -> None:
        """Record the generation of each copy's index entry; 0 for none. Many new entries are counted in one step."""
        if len(listings) < _COUNTED_FROM or any(entry.generation or not generation for entry, generation in listings):
            for entry, generation in listings:
                self.set_generation(entry, generation)
            return
        generations = [generation for _, generation in listings]
        for entry, generation in listings:
            entry.in_object = False
            entry.generation = entry.recorded = generation
        total = listing_total(fingerprints(b"".join(entry.key for entry, _ in listings)), generations)
        self.listed_count += len(listings)
        self.listed_digest = (self.listed_digest + total) % DIGEST_MODULUS

    def count_listed(self, key: bytes, generation: int, sign: int) -> None:
        """Count an index entry, or no longer; 0 for none."""
        if generation:
            self.listed_count += sign
            number = listing_number(fingerprint(key), generation)
            self.listed_digest = (self.listed_digest + sign * number) % DIGEST_MODULUS

    def check(self) -> None:
        """Assert that counts are those of the facts. For tests: walks over everything."""
        assert self.off_drives == sum(entry.disk is None for entry in self.entries.values()), "they are counted"
        for entry in self.by_number.values():
            assert entry.is_used or entry.memory is not None or entry.key in self.leaving, "an unused copy sleeps"
            somewhere = entry.memory is not None or entry.disk is not None
            assert somewhere or entry.phase is not Phase.RESIDENT, "what can be read lies somewhere"
            current = self.entries.get(entry.key) is entry
            assert current == (entry.phase is not Phase.LEAVING), f"{entry.key.hex()} is {entry.phase.name}"
            stride = self.ledger.slots.layer_stride(entry.chunk.shape)
            assert entry.memory is None or entry.memory.layer_stride == stride, "layers lie as its shape has them"
        leaving = [entry for entry in self.by_number.values() if entry.phase is Phase.LEAVING]
        assert Counter(entry.key for entry in leaving) == self.leaving, "what is leaving is counted"
        freed = [entry for entry in leaving if entry.disk is not None and (entry.removal or entry.forgotten)]
        leaving_bytes = sum(entry.chunk.slot_bytes for entry in freed)
        assert self.leaving_bytes == leaving_bytes, "what comes free is counted"

    # ---- the end of a use

    @property
    def may_place(self) -> bool:
        """Whether a write that waits for space may be placed now, or needs less."""
        return bool(self.freed_places or self.left_writes)

    def rest(self, entry: Entry) -> None:
        """Free the places and numbers that a copy no longer needs, after a use of it has ended."""
        if entry.pins or entry.number not in self.by_number:
            return  # a pinned copy needs everything that it has
        if entry.is_used:  # perhaps by what does not need it in memory
            if entry.phase is Phase.RESIDENT and entry.memory is not None and not entry.is_kept_in_memory:
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
            self.detach(entry)
            del self.by_number[entry.number]
        if entry.phase is Phase.RESIDENT:
            self.in_memory.release(entry.key)
            self.on_disk.release(entry.key)

    def count_leaving(self, entry: Entry, sign: int) -> None:
        """Count the drive bytes of a leaving copy as about to be free, or no longer."""
        if entry.phase is Phase.LEAVING and entry.disk is not None:
            self.leaving_bytes += sign * entry.chunk.slot_bytes

    def _must_stay_awake(self, entry: Entry) -> bool:
        """The pool's map has one copy of a key: the leaving one, as long as there is one."""
        return entry.disk is not None and entry.key in self.leaving

    def _free(self, entry: Entry) -> None:
        """Give up the places of a copy that has left."""
        if entry.disk is not None and not entry.forgotten:
            return
        if entry.memory is not None:
            self.ledger.free([entry.memory.offset], entry.number)
        if entry.disk is not None and self.pool is not None:
            self.count_leaving(entry, -1)
            self.freed_places += self.pool.release([entry.disk])
        del self.by_number[entry.number]
        self.leaving[entry.key] -= 1
        if not self.leaving[entry.key]:
            del self.leaving[entry.key]
            current = self.entries.get(entry.key)
            if current is not None:
                self.rest(current)
