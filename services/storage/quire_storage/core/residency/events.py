"""Events of chunks, into `Residency`, and instructions, out of it.

Headers are written and zeroed (`WriteHeaders`, `Forget`) in the order of the instructions; all else ends in any order.

Tickets are numbers of the caller's choice, never used twice: a transfer's, a holder's, a request's. Numbers of writes,
removals and questions are chosen by the machine; the executor gives them back with the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.model.durability import Durability, OnExisting
from quire.model.errors import QuireError
from quire.model.records import ChunkRecord
from quire_storage.core.chunks import Chunk, Copy, MemoryPlace, Placed
from quire_storage.core.pool.slots import Shape

# ---- events: slots for a transfer


@dataclass(frozen=True, slots=True)
class Reserved:
    """A transfer wants `count` slots of memory. Completes with their offsets, or fails with `PoolFull`.

    `patient`: it waits for them; else it fails at once where there are none.
    """

    ticket: int
    shape: Shape
    count: int
    patient: bool = True


@dataclass(frozen=True, slots=True)
class ReservationEnded:
    """A transfer waits no more, or is over: the slots that no chunk has taken over are free again."""

    ticket: int


@dataclass(frozen=True, slots=True)
class TransferUnsettled:
    """A peer may still touch a transfer's slots: those that no chunk has taken over are quarantined."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Followed:
    """A holder of pins wants chunks whose store is running, too: `keys`, at `offsets` of the slots of `transfer`.

    Completes with the positions of the chunks that are still there. Their slots keep their bytes, whatever becomes of
    the store, until `Unpinned` names the holder. `Pinned` answers for the others.
    """

    ticket: int
    holder: int
    transfer: int
    keys: Sequence[bytes]
    offsets: Sequence[int]


# ---- events: storing


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOffered:
    """Bytes of `chunks` are at `offsets`, slots of `transfer`. Completes with the keys that are indexed.

    Fails with `ContentConflict`, `PoolFull` or `DriveFailed` before the copies are registered: then nothing of it was
    kept. After a failure of the index, or of the last drive, copies that are registered stay, and promise nothing.
    Chunks that are here with other bytes stay unchanged; for `OnExisting.VERIFY` it is a conflict.

    `generation`: proposed to the index for entries that are new, so that headers have it from the first; 0 for none.
    `elsewhere`: chunks of the object tier to compare with, as long as no copy of theirs is here. `within`: by key,
    generations of the only entries in which copies of another node's chunks may be listed; empty: any, also new ones.
    """

    ticket: int
    transfer: int
    chunks: Sequence[Chunk]
    offsets: Sequence[int]
    level: Durability
    on_existing: OnExisting
    generation: int = 0
    elsewhere: Sequence[Chunk] = ()
    within: Mapping[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Indexed:
    """The index lists this node for these keys, each under an entry of that generation; for `ticket`'s chunks."""

    ticket: int
    generations: Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class IndexingEnded:
    """No more answers will come for the chunks of `ticket`; `error`: why not."""

    ticket: int
    error: QuireError | None = None


@dataclass(frozen=True, slots=True)
class RegistrationWanted:
    """The index does not list this node for chunks that are here.

    Completes as a store does; chunks whose eviction is in question are left out.

    `patient`: parents that are on their way to other nodes are waited for. `within`: by key, generations of the entries
    of the copies that these were made from; they are listed in these very entries, or not at all. `in_object`: these
    are copies of the object tier, which the entries have to list.
    """

    ticket: int
    keys: Sequence[bytes]
    patient: bool = True
    within: Mapping[bytes, int] = field(default_factory=dict)
    in_object: bool = False


@dataclass(frozen=True, slots=True)
class LevelRaised:
    """Chunks are wanted at a level. Completes with the keys that are here, and on a drive if there is one."""

    ticket: int
    keys: Sequence[bytes]
    level: Durability


# ---- events: reading


@dataclass(frozen=True, slots=True)
class Pinned:
    """Keep chunks where they are, for a holder. Completes with (copies, missing keys).

    `used`: a sign of interest.
    """

    ticket: int
    keys: Sequence[bytes]
    used: bool = True


@dataclass(frozen=True, slots=True)
class PinnedAlso:
    """Keep a copy that is held for one holder more."""

    ticket: int
    number: int


@dataclass(frozen=True, slots=True)
class Unpinned:
    """A holder releases all of its pins, and ends its reading of running stores."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A chunk's bytes came from the object tier, verified, into a slot of `transfer`."""

    chunk: Chunk
    transfer: int
    offset: int


@dataclass(frozen=True, slots=True)
class PromotionWanted:
    """A holder will read these copies from a drive. Completes with {number: (promotion, place)} for those to be kept.

    Promotions are shared: of several that want the same chunk, one reads. `prefetch`: a client wants them in memory,
    whether they were read before or not.
    """

    ticket: int
    numbers: Sequence[int]
    prefetch: bool = False


@dataclass(frozen=True, slots=True)
class PromotionEnded:
    """A holder no longer needs a promotion. `complete`: every byte of it is in memory, verified."""

    ticket: int
    promotion: int
    complete: bool


# ---- events: what drives, index and object tier did


@dataclass(frozen=True, slots=True)
class Written:
    """A write is durable."""

    write: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A write failed, and no header of it will come back: `DriveLost` came before for the drives concerned."""

    write: int
    error: QuireError


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Headers were removed from the drives; `error`: their drive has failed, and they may come back with it."""

    removal: int
    error: QuireError | None = None


@dataclass(frozen=True, slots=True)
class DriveLost:
    """A drive is used no more."""

    drive: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The index took these keys out of itself, or this node off their entries; the others stay.

    `refused`: the index keeps the others; else it did not answer.
    """

    question: int
    out: frozenset[bytes]
    refused: bool = True


@dataclass(frozen=True, slots=True)
class Denied:
    """The index believes that this node holds these. Wrong entries are withdrawn."""

    records: Sequence[ChunkRecord]


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The index has received, or will not receive, the withdrawal of these."""

    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The object tier has a chunk, and the index entry of that generation lists it there."""

    chunk: Chunk
    generation: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The index entries of these generations have ended. Completes with how many copies went.

    Only copies go that were listed under these very entries: one that is listed under another entry was stored again
    since, and of one whose entry is unknown nothing is decided here. Fails with `DriveFailed` where a drive has failed
    with which a chunk may come back.
    """

    ticket: int
    generations: Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class Listed:
    """The index was asked: it lists this node for these keys, under entries of these generations."""

    generations: Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class Hidden:
    """A copy is temporarily unreadable. It keeps its place; the node withdraws it from the index."""

    number: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Copies without a sound byte anywhere."""

    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class EvictionWanted:
    """A policy wants chunks gone from everywhere, children before parents. Completes with how many went.

    `keepers`, if there are any: gone from this node only, where the index lists each of these too; and only copies at
    `level` at most, which is as durable as the keepers have said that theirs are.
    """

    ticket: int
    keys: Sequence[bytes]
    keepers: Sequence[str] = ()
    level: Durability = Durability.MEMORY


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened for a while that was waited for."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """Write the copies that are in memory only, and stop trimming. Completes when that is done."""

    ticket: int


Event = (
    Reserved | ReservationEnded | TransferUnsettled | Followed | StoreOffered | Indexed | IndexingEnded
    | RegistrationWanted | LevelRaised | Pinned | PinnedAlso | Unpinned | Loaded | PromotionWanted | PromotionEnded
    | Written | WriteFailed | Forgotten | DriveLost | Answered | Denied | Withdrawn | Uploaded | Dropped | Listed
    | Hidden | Lost | EvictionWanted | TimePassed | Stopping
)  # fmt: skip

# ---- instructions


@dataclass(frozen=True, slots=True)
class Complete:
    """`ticket` is answered."""

    ticket: int
    value: object


@dataclass(frozen=True, slots=True)
class Fail:
    """`ticket` is answered with an error."""

    ticket: int
    error: QuireError


@dataclass(frozen=True, slots=True)
class Write:
    """Write chunks from memory to their places, then their headers. → `Written`, `WriteFailed`."""

    write: int
    placed: Sequence[Placed]
    sources: Sequence[MemoryPlace]


@dataclass(frozen=True, slots=True)
class WriteHeaders:
    """Write headers again, whose level or tiers have changed. → `Written`, `WriteFailed`."""

    write: int
    placed: Sequence[Placed]


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove headers. → `Forgotten`."""

    removal: int
    placed: Sequence[Placed]


@dataclass(frozen=True, slots=True)
class Register:
    """Have the index list this node, under entries of `generation` where they are new (0: whatever it draws).

    `within`: for each record, the only entry under which it may be listed, by generation; none of them is made.
    `in_object`: these entries have to list the object tier.

    → `Indexed`, any number of times, then `IndexingEnded`.
    """

    ticket: int
    records: Sequence[ChunkRecord]
    patient: bool = True
    generation: int = 0
    within: Sequence[int] = ()
    in_object: bool = False


@dataclass(frozen=True, slots=True)
class Withdraw:
    """This node does not hold these, or, `hidden`, cannot read them now. → `Withdrawn`."""

    records: Sequence[ChunkRecord]
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class AskToEvict:
    """The last copies here are to be evicted: take them, deepest first, out of the index. → `Answered`."""

    question: int
    records: Sequence[ChunkRecord]


@dataclass(frozen=True, slots=True)
class AskToWithdraw:
    """Take this node off the entries that list each of `keepers`, or, for none, the object tier. → `Answered`."""

    question: int
    records: Sequence[ChunkRecord]
    keepers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Upload:
    """Put a chunk into the object tier when there is time, and have the index list it there. → `Uploaded`.

    `written`: an object of it was written before, and may still be there. May come again for a chunk that waits.
    """

    key: bytes
    size: int
    written: bool


@dataclass(frozen=True, slots=True)
class CancelUpload:
    """A chunk was evicted here before it was uploaded."""

    key: bytes


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `TimePassed` then (monotonic seconds)."""

    at_s: float


Instruction = (
    Complete | Fail | Write | WriteHeaders | Forget | Register | Withdraw | AskToEvict | AskToWithdraw | Upload
    | CancelUpload | WakeAt
)  # fmt: skip

PinResult = tuple[list[Copy], list[bytes]]
