"""A copy of a chunk, as the residency machine sees it. Only `core.residency` changes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quire.model.durability import Durability
from quire_storage.core.chunks import Chunk, Copy, DiskPlace, Header, MemoryPlace


class Phase(Enum):
    """See `core.residency`."""

    ARRIVING = 1
    RESIDENT = 2
    LEAVING = 3


@dataclass(slots=True, eq=False)
class Entry:
    """A copy of a chunk. `generation`: of the index entry that lists this node for it, 0 for none that is known.

    `recorded`: of the entry under which it was listed last, or is about to be, as its header says; 0 where that is
    unknown. `in_object`: that entry lists the object tier too. `written`: an object of it was written once.
    `provisional`: entered by a store, and no registration has succeeded yet. `promised`: it arrives, and the index
    lists this node for its key by the registration of a copy before it. `ended`: index entries that ended while a
    registration was under way. `forgotten`: its header is off the drive.
    """

    number: int
    key: bytes
    chunk: Chunk
    level: Durability
    phase: Phase
    memory: MemoryPlace | None = None
    disk: DiskPlace | None = None
    in_object: bool = False
    written: bool = False
    generation: int = 0
    recorded: int = 0
    provisional: bool = False
    promised: bool = False
    registering: int = 0
    ended: frozenset[int] = frozenset()
    pins: int = 0
    write: int = 0
    rewrites: int = 0
    removal: int = 0
    question: int = 0
    promotion: int = 0
    forgotten: bool = False
    shown: Copy | None = None

    @property
    def is_used(self) -> bool:
        """Whether anything under way names this copy."""
        return bool(self.pins or self.write or self.removal or self.question or self.promotion) or (
            self.registering > 0 or self.rewrites > 0
        )

    @property
    def is_kept_in_memory(self) -> bool:
        """Whether something needs its slot in memory."""
        if self.pins or self.write or self.question or self.promotion:
            return True
        awaited = self.registering > 0 or self.rewrites > 0
        return self.disk is None and (awaited or not self.in_object)

    def held_only_by(self, pins: int) -> bool:
        """Return whether only this number of pins keeps a leaving copy on its drive."""
        if self.phase is not Phase.LEAVING or self.disk is None or self.pins > pins:
            return False
        return not (self.removal or self.question or self.promotion or self.registering or self.rewrites)

    def in_order(self) -> tuple[bytes, bytes, int]:
        """Return its key, parent and size, as an order of eviction stores them."""
        return self.key, self.chunk.record.parent, self.chunk.slot_bytes

    def header(self) -> Header:
        return Header(self.chunk, self.level, self.written, self.recorded)

    def agrees_with(self, header: Header) -> bool:
        """Return whether a written header is current."""
        return (self.level, self.written, self.recorded) == (header.level, header.in_object, header.generation)

    def as_copy(self) -> Copy:
        """Return its current state; the same object for as long as it does not change."""
        copy = self.shown
        if copy is None or copy.memory is not self.memory or copy.disk is not self.disk:
            copy = self.shown = Copy(self.number, self.chunk, self.memory, self.disk)
        return copy
