"""The readable chunks of a node: queries that change nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Final

from quire_storage.core.chunks import Chunk, Header, Placed
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.entry import Phase
from quire_storage.core.residency.pins import Pins

_SCANNED: Final = 4096


class Contents:
    """The readable chunks of a node."""

    def __init__(self, copies: Copies, pins: Pins) -> None:
        self.copies = copies
        self.pins = pins
        self.ledger = copies.ledger
        self.pool = copies.pool
        self.in_memory, self.on_disk = copies.in_memory, copies.on_disk
        self.namespaces = copies.namespaces
        self.replicated = copies.replicated

    def __len__(self) -> int:
        return self.copies.off_drives + (len(self.pool) if self.pool is not None else 0)

    def __contains__(self, key: bytes) -> bool:
        entry = self.copies.entries.get(key)
        if entry is None:
            return self.pool is not None and key in self.pool and key not in self.copies.leaving
        return entry.phase is Phase.RESIDENT

    def look(self, key: bytes) -> tuple[Header, int] | None:
        """Return header and index generation (0: not listed) of a chunk; None if it cannot be read here."""
        entry = self.copies.entries.get(key)
        if entry is not None:
            return (entry.header(), entry.generation) if entry.phase is Phase.RESIDENT else None
        placed = self._asleep(key)
        return (placed.header, self._listing(placed)[0]) if placed is not None else None

    def generation(self, key: bytes) -> int | None:
        """Return the generation of the index entry that lists a chunk, 0 for none; None if it cannot be read here."""
        entry = self.copies.entries.get(key)
        if entry is not None:
            return entry.generation if entry.phase is Phase.RESIDENT else None
        return self.pool.generation(key) if self.pool is not None and key not in self.copies.leaving else None

    def recorded(self, key: bytes) -> int | None:
        """Return the generation of the entry that lists a chunk, or listed it last; 0: unknown.

        None if it cannot be read here.
        """
        entry = self.copies.entries.get(key)
        if entry is not None:
            return (entry.generation or entry.recorded) if entry.phase is Phase.RESIDENT else None
        placed = self._asleep(key)
        return self._listing(placed)[0] or placed.header.generation if placed is not None else None

    def may_return(self, key: bytes, generation: int) -> bool:
        """Return whether a retired drive has a copy that was listed in this entry: it comes back with the drive."""
        return self.copies.on_retired.get(key) == generation

    def retired(self) -> dict[bytes, int]:
        """Return the generations of the entries of chunks that are on retired drives alone, as far as is known."""
        in_objects = self.copies.retired_in_objects
        rows = self.copies.on_retired.items()
        return {key: generation for key, generation in rows if key not in in_objects and key not in self}

    def in_object(self, key: bytes) -> bool:
        """Return whether the object tier has a readable chunk, under the index entry that lists this node."""
        entry = self.copies.entries.get(key)
        if entry is not None:
            return entry.phase is Phase.RESIDENT and entry.in_object and entry.generation != 0
        placed = self._asleep(key)
        return placed is not None and all(self._listing(placed))

    def wants_object(self, key: bytes) -> bool:
        """Return whether a readable and listed chunk is not in the object tier, as far as is known."""
        about = self.look(key)
        return self.copies.objects and about is not None and about[1] != 0 and not self.in_object(key)

    def keys(self) -> list[bytes]:
        """Return the keys of all readable chunks, in about the order in which they were stored."""
        awake, on_drives = self.copies.entries, self.pool.keys() if self.pool is not None else ()
        asleep = [key for key in on_drives if key not in awake and key not in self.copies.leaving]
        return asleep + [key for key, entry in awake.items() if entry.phase is Phase.RESIDENT]

    def scan(self) -> Iterator[list[bytes]]:
        """Yield the keys of readable chunks, some at a time, while chunks arrive and leave.

        A chunk that is readable all the while is named; one that is being written to a drive may be named twice.
        """
        keys = list(self.copies.entries)
        for first in range(0, len(keys), _SCANNED):
            page = keys[first : first + _SCANNED]
            yield [key for key in page if (entry := self.copies.entries.get(key)) is not None and entry.disk is None]
        if self.pool is not None:
            yield from self.pool.scan()

    def age(self, key: bytes) -> int | None:
        """Return the rank of a readable chunk by when it was stored, parents before children; None for other keys."""
        if key not in self:
            return None
        entry = self.copies.entries.get(key)
        if entry is not None and entry.disk is None:  # an older copy of it may be leaving a drive
            return (1 << 63) + entry.number
        return self.pool.age(key) if self.pool is not None else None

    @contextlib.contextmanager
    def arriving(self) -> Iterator[set[bytes]]:
        """Collect, inside the block, the keys whose copies arrive on this node or move on it."""
        assert self.copies.arriving is None, "one scan at a time"
        self.copies.arriving = set()
        try:
            yield self.copies.arriving
        finally:
            self.copies.arriving = None

    def acknowledged(self, ticket: int) -> set[bytes]:
        """Return the keys of a completed store that can be read here and that the index lists, as of now."""
        entries = self.pins.holders.get(ticket, ())
        return {entry.key for entry in entries if entry.phase is Phase.RESIDENT and entry.generation}

    def off_drives(self) -> list[Chunk]:
        """Return the readable chunks without a place on a drive, in the order of storing."""
        entries = self.copies.entries.values()
        return [entry.chunk for entry in entries if entry.disk is None and entry.phase is Phase.RESIDENT]

    @property
    def dirty_chunks(self) -> int:
        """Number of chunks in memory only, to be written to a drive."""
        return len(self.copies.dirty)

    @property
    def listed_count(self) -> int:
        """Number of index entries that list this node."""
        return self.copies.listed_count

    @property
    def listed_digest(self) -> int:
        """Digest of the index entries that list this node."""
        return self.copies.listed_digest

    @property
    def hits(self) -> Counter[str]:
        """Chunks that readers found, by tier."""
        return self.pins.hits

    @property
    def evictions(self) -> Counter[str]:
        """Copies that were evicted, by tier."""
        return self.copies.evictions

    def _asleep(self, key: bytes) -> Placed | None:
        """Return the place on a drive of a chunk without an awake copy."""
        return self.pool.get(key) if self.pool is not None and key not in self.copies.leaving else None

    def _listing(self, placed: Placed) -> tuple[int, bool]:
        assert self.pool is not None, "it lies on a drive"
        return self.pool.listing(placed.place)
