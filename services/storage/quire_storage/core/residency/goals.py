"""Goals, which are what requests wait for, and the writes to drives that goals wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire_storage.core.chunks import DiskPlace, Header
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency.entry import Entry

RANK: Final = {level: rank for rank, level in enumerate(Durability)}
"""Order of the levels of durability."""


class Step(Enum):
    """The step of a goal that is next once its writes have ended."""

    PUBLISH = "the copies become readable and are registered"
    ACKNOWLEDGE = "the index has answered: the request is complete"
    CONFIRM_LEVEL = "the copies have the level that was requested"


@dataclass(slots=True)
class Goal:
    """Writes, then answers of the index, for which a ticket waits.

    Attributes:
        ticket: Of the request.
        entries: Its copies.
        step: What follows once `pending` is empty.
        level: Durability that it wants.
        fresh: Copies that it has brought.
        pending: Numbers of writes that have not ended.
        error: Why it will fail.
        generation: Proposed for new index entries.
        within: The only entries in which its copies may be listed, by key. Empty: any.
        in_object: These entries list the object tier.
        registering: Answers of the index may still arrive.
    """

    ticket: int
    entries: list[Entry]
    step: Step
    level: Durability = Durability.MEMORY
    fresh: list[Entry] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    error: QuireError | None = None
    generation: int = 0
    within: Mapping[bytes, int] = field(default_factory=dict)
    in_object: bool = False
    registering: bool = False

    def listed(self) -> set[bytes]:
        """Return the keys of copies that are listed, in the entries in `within` if it names some."""
        named = self.within.get if self.within else None
        return {e.key for e in self.entries if e.generation and (named is None or e.generation == named(e.key))}


@dataclass(slots=True)
class DriveWrite:
    """Chunks of one shape on their way to the drives.

    Attributes:
        number: Of the write.
        shape: Of all of its chunks.
        entries: The copies.
        background: It is of the flush, and no goal began it.
        places: Their places; empty while there is no space.
        headers: Headers that are being written.
        goals: Goals that wait for it.
        tries: Drives that have failed it.
        lacking: While it waits for places: how many have to come free before it is tried again.
    """

    number: int
    shape: Shape
    entries: list[Entry]
    background: bool
    places: list[DiskPlace] = field(default_factory=list)
    headers: list[Header] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    tries: int = 0
    lacking: int = 0
