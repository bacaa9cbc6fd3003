"""Placement of the chunks of a node in its tiers, and every transition between them; decided here alone.

Pure: no clock, no I/O, no await. `Residency.handle` takes an event and returns instructions; `tiers.execution` carries
them out, and reports each end as another event. So every order of events can be tried in tests.

**Copies.** A copy of a chunk is ARRIVING while its store makes it durable, RESIDENT while it can be read, LEAVING from
the moment that it cannot until its last pin is given back and its header is removed from the drive. A key has one
ARRIVING or RESIDENT copy at a time, and any number of LEAVING ones: a reader may still pin the old bytes of a key that
was stored again. An unused copy on a drive alone sleeps: only the map of the pool knows it, in a few bytes, and it
wakes up as a RESIDENT one when an event names it.

**A store.**

1. `Reserved`: slots of the arena for a transfer. They are the transfer's until it ends, because a peer may write there.
2. `StoreOffered`: the slots have the bytes. The store waits while one of its keys is busy: stored by another request,
   or being evicted at the index. The answers of two registrations could arrive in another order than their entries.
3. Copies enter as ARRIVING, and take over their slots. For a level above `memory` they are written to a drive, header
   last, with the index generation that the store proposes: after a restart the header alone names the index
   entry whose deletion concerns the copy.
4. Written, they become RESIDENT and are registered. They are readable before the index answers, and provisional: if no
   registration succeeds, they leave.
5. `Indexed`: the index lists them, each under a generation. A header that says otherwise is written again.
6. `IndexingEnded`: the store completes with the keys that are listed. The caller looks once more whether they can be
   read, because a drive may have failed since.

Deliveries may follow a store from `Reserved` on (`Followed`): they read the layers whose checksums are taken. The slots
keep their bytes until the last follower has ended, also if their copy is evicted from memory, if the store fails, or if
another store of the chunk was first.

**An eviction.**

1. The drives are above their high watermark, or a write finds no place. The oldest leaves of the prefix trees are
   taken, and the index is requested to release them (`AskToEvict`; `AskToWithdraw` if the object tier has them).
2. `Answered`: the index removes what no lease, retention or longer prefix needs. Those copies leave; the others stay
   where they were in the order, and are spared for ten seconds or longer. So is the end of a range that was just
   registered, for as long as the next range, on another node, may wait for it. Spared copies go where a write finds
   nothing else.
3. A leaving copy is unreadable at once, but keeps its places while it is pinned. Its header is removed first
   (`Forget`), and only then is its place free: a header must never name bytes of another chunk.
4. `Forgotten`: the place is free, and writes that wait for it are placed.

**Order.** `WriteHeaders` and `Forget` take effect in the order of the instructions; everything else may end in any
order. After each event the rules of `machine` run until none has anything left to do; a part never calls back into a
part that has called it (`Writes.ready`).

The parts, each of which uses only those before it: `copies` (facts), `departures`, `memory`, `pins`, `promotions`,
`writes`, `uploads`, `stores`, `evictions`; `contents` is the side that reads.
"""

from quire_storage.core.residency.evictions import ResidencySettings
from quire_storage.core.residency.machine import Residency

__all__ = ["Residency", "ResidencySettings"]
