"""Goals, writes, questions and promotions of the residency machine. Only `core.residency` changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire_storage.core import events as ev
from quire_storage.core.chunks import DiskPlace, Header, MemoryPlace
from quire_storage.core.entry import Entry
from quire_storage.core.eviction import LeafArc


@dataclass(slots=True)
class Goal:
    """What a ticket waits for: writes, then answers of the index. `after`: called once `pending` is empty.

    `generation`: proposed for new index entries. `registering`: answers of the index may still come.
    """

    ticket: int
    entries: list[Entry]
    after: Callable[[Goal], None]
    level: Durability = Durability.MEMORY
    fresh: list[Entry] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    error: QuireError | None = None
    generation: int = 0
    registering: bool = False


@dataclass(slots=True)
class DriveWrite:
    """Chunks of one shape on their way to the drives; `places` are empty while there is no space for them."""

    number: int
    entries: list[Entry]
    background: bool
    places: list[DiskPlace] = field(default_factory=list)
    headers: list[Header] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    tries: int = 0


@dataclass(slots=True)
class Question:
    """Asked of the index: may these go. `ticket`: of a policy, 0 for none."""

    entries: list[Entry]
    tier: LeafArc
    of_object: bool
    ticket: int = 0


@dataclass(slots=True)
class PromotedSlots:
    """Slots that copies on a drive are read into, shared by its holders."""

    places: dict[int, tuple[Entry, MemoryPlace]]
    holders: set[int]


@dataclass(slots=True)
class AwaitingFetch:
    """A holder some of whose chunks come from the object tier."""

    event: ev.Pinned
    entries: list[Entry]
    pending: set[bytes]
